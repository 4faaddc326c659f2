"""The tiers of one engine, in its scheduler's process: the block store, its host pool that workers see, and `Loads`.

A slot of the pool is one block of all ranks: their parts lie one after the other, so that one checksum covers a block
and nothing of it can be lost alone.

No vLLM import. Invariant: after `give_up` nothing more is promised, and what was promised is reported as bad.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from kvsteward.errors import KVStewardError
from kvsteward.kv.blocks import BlockStore, Fingerprint, HostPool
from kvsteward.kv.blocks.codecs import Codec, Raw
from kvsteward.kv.blocks.disk import DiskTier
from kvsteward.kv.blocks.lossless import Lossless
from kvsteward.kv.blocks.record import HEADER_BYTES
from kvsteward.kv.blocks.tier import Tier
from kvsteward.kv.blocks.valkey import ValkeyTier
from kvsteward.kv.vllm.copies import Place, Shape
from kvsteward.kv.vllm.loads import Loads, Moves
from kvsteward.kv.vllm.options import Options
from kvsteward.kv.vllm.segment import Segment
from kvsteward.kv.vllm.worker import Report

Rank = tuple[int, int]
log = logging.getLogger("vllm.kvsteward")


def lower_tiers(options: Options, namespace: str) -> list[Tier]:
    """Below host memory, the nearest first. Raises ConfigError."""
    tiers: list[Tier] = []
    if options.disk_path is not None:
        tiers.append(DiskTier(options.disk_path, options.disk_bytes))
    if options.valkey_url is not None:
        tiers.append(
            ValkeyTier(
                options.valkey_url,
                namespace=namespace,
                ttl_s=options.valkey_ttl_s,
                cluster=options.valkey_cluster,
            )
        )
    return tiers


def codec(name: str, shape: Shape) -> Codec:
    """Raises ConfigError where the KV's dtype cannot be stored that way."""
    if name == "raw":
        return Raw()
    if name == "lossless":
        return Lossless(shape.value_bytes)
    from kvsteward.kv.blocks.int8 import Int8  # needs numpy, which vLLM has and the gateway has not

    return Int8(shape.dtype.removeprefix("torch."), shape.row)


class Tiers:
    """`shapes` of the workers' parts by rank; `fingerprint(salt)` of their blocks. Raises ConfigError where a tier
    cannot be made."""

    def __init__(
        self,
        options: Options,
        shapes: Mapping[Rank, Shape],
        fingerprint: Callable[[str], Fingerprint],
        clock: Callable[[], float],
    ) -> None:
        self._options, self._fingerprint = options, fingerprint
        found = fingerprint(options.salt)
        made: list[Segment] = []

        def allocate(size_bytes: int) -> memoryview:
            made.append(Segment.create(size_bytes))
            return made[-1].view

        pool = HostPool(found.block_bytes, options.host_bytes, allocate=allocate)
        (self._segment,) = made
        self.store = BlockStore(
            pool,
            lower_tiers(options, found.digest().hex()),
            codec=codec(options.codec, next(iter(shapes.values()))),
            queue_blocks=max(1, len(pool.slots) * 7 // 8),
        )
        self.loads = Loads(
            self.store,
            found.digest(),
            block_tokens=found.block_tokens,
            ranks=len(shapes),
            stage_within_s=options.stage_within_s,
            clock=clock,
        )
        self.given_up = False
        self._told = False
        self._places: dict[Rank, Place] = {}
        offset = HEADER_BYTES
        for rank, shape in shapes.items():
            self._places[rank] = Place(self._segment.name, len(pool.slots), pool.slot_bytes, offset)
            offset += shape.part_bytes

    def describe(self) -> str:
        pool = self.store.host
        names = [f"{len(pool.slots)} blocks of {pool.block_bytes} bytes in host memory"]
        return ", ".join([*names, *(tier.name for tier in self.store.tiers)])

    def plan(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Any]) -> Moves:
        moves = self.loads.plan(scheduled, blocks_of)
        if self._options.check:
            self.store.check()
        return moves

    def places(self, moves: Moves) -> Mapping[Rank, Place] | None:
        """Until the first steps with moves are done: where the workers find the pool."""
        if not moves or self._told:
            return None
        return self._places

    def heard(self, report: Report) -> None:
        """What workers say of steps, once for each step."""
        self.loads.stepped()
        for number, ranks in report.done.items():
            self._told = True
            self.loads.done(number, ranks, failed=False)
        for number, ranks in report.failed.items():
            self.loads.done(number, ranks, failed=True)

    def reset(self) -> None:
        """All that was stored is of no use any more (the weights may have changed): from now on this engine has keys
        that nobody had before, and shares nothing with others until it is started again."""
        found = self._fingerprint(f"{self._options.salt} reset {secrets.token_hex(8)}")
        self.loads.reset(found.digest())

    def give_up(self, error: Exception) -> None:
        if not self.given_up:
            self.given_up = True
            log.error("kvsteward: the tiers are left alone from now on", exc_info=error)

    def rescue(self) -> Moves:
        return self.loads.rescue()

    def figures(self) -> dict[str, Any]:
        """Counts since the start, how many blocks of host memory each session uses now, and turns under way."""
        return {
            "moves": asdict(self.loads.counts),
            "store": asdict(self.store.figures()),
            "sessions": self.store.host.sessions(),
            "turns": len(self.loads.running),
            "given_up": self.given_up,
        }

    def close(self) -> None:
        try:
            self.loads.close()
        except KVStewardError as error:
            log.warning("kvsteward: the tiers did not close: %s", error.message)
        self._segment.close()

"""Writes blocks to the tiers below host memory, in threads of its own, while their callers have long gone on.

Each tier has a queue that is bounded, and as many threads as it can use at once (`Tier.writers`). Blocks may overtake
each other, since each stands for itself; the end of a session overtakes nothing and is overtaken by nothing.

Methods that end in `_locked` are called under the store's lock, which is this one's too. Invariant: a block stays in
its slot until every tier has had it or said why not; what is queued, made ready or being written is `pending`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvsteward.errors import InvariantError
from kvsteward.kv.blocks.codecs import Codec, Raw
from kvsteward.kv.blocks.host import HostPool, Slot
from kvsteward.kv.blocks.record import HEADER_BYTES, crc, encode_header, plain_crc
from kvsteward.kv.blocks.tier import Tier, Write

log = logging.getLogger("kvsteward.blocks")


def seal(slot: Slot, key: bytes, expires_s: float, payload_crc: int | None = None) -> None:
    """Writes the header of a raw record before the block. `expires_s` is Unix time, 0 for never; `payload_crc` where it
    is known."""
    slot.record[:HEADER_BYTES] = encode_header(
        key,
        slot.block,
        codec=Raw.number,
        raw_bytes=slot.block.nbytes,
        expires_s=expires_s,
        payload_crc=payload_crc,
    )


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A block on its way down; pinned until every tier has had it."""

    slot: Slot
    key: bytes
    session: str
    expires_s: float
    tiers: list[int]
    left: int
    parts: tuple[memoryview | bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class _Use:
    session: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Forget:
    session: str


_Item = _Outgoing | _Use | _Forget


class WriteBehind:
    """`not_behind` counts the blocks that a tier did not get, by its name. `inline`: the threads that write make the
    checksums too, where hardware does; else `sealers` threads do."""

    def __init__(
        self,
        lock: threading.Lock,
        host: HostPool,
        tiers: Sequence[Tier],
        codec: Codec,
        not_behind: Counter[str],
        *,
        queue_blocks: int,
        batch_blocks: int,
    ) -> None:
        self.inline = bool(tiers) and codec.number == Raw.number and crc() is not plain_crc
        self._lock, self._host, self._tiers, self._codec = lock, host, tiers, codec
        self._not_behind, self._queue_blocks, self._batch_blocks = not_behind, queue_blocks, batch_blocks
        self._queues: list[deque[_Item]] = [deque() for _ in tiers]
        self._pending = [0] * len(tiers)
        self._busy = [0] * len(tiers)
        """Threads of each tier that write or forget now."""
        self._forgetting = [False] * len(tiers)
        self._seals: deque[_Outgoing] = deque()
        self._to_seal, self._idle = threading.Condition(lock), threading.Condition(lock)
        self._to_write = [threading.Condition(lock) for _ in tiers]
        self._stopping = False

    def threads(self, sealers: int) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names and what to run: until `stop_locked`."""
        for number in range(sealers):
            yield f"seal-{number}", self._seal_all
        for number, tier in enumerate(self._tiers):
            for writer in range(tier.writers):
                yield f"write-{tier.name}-{writer}", lambda number=number: self._write_all(number)  # type: ignore[misc]

    # what the store calls

    def send_locked(self, slot: Slot, session: str, expires_s: float, *, closed: bool) -> list[int]:
        """Queues a block, pinned once, for the tiers that have room, none if the store is `closed`. Returns them; where
        there are none the slot stays the caller's."""
        room = [] if closed else self._room()
        self._left_out(room)
        if room:
            for number in room:
                self._pending[number] += 1
            item = _Outgoing(slot, slot.key, session, expires_s, room, len(room))
            if self.inline:
                self._queue(item)
            else:
                self._seals.append(item)
                self._to_seal.notify()
        return room

    def forget_locked(self, session: str) -> None:
        """Queues the end of a session for the tiers that have room."""
        room = self._room()
        self._left_out(room)
        for number in room:
            self._pending[number] += 1
            self._queues[number].append(_Forget(session))
            self._to_write[number].notify()

    def use_locked(self, session: str, keys: Sequence[bytes]) -> bool:
        """Queues that a session uses blocks, for shared tiers. False where one has no room."""
        shared = [number for number, tier in enumerate(self._tiers) if tier.shared]
        room = [number for number in self._room() if number in shared]
        for number in room:
            self._pending[number] += 1
            self._queues[number].append(_Use(session, tuple(keys)))
            self._to_write[number].notify()
        return room == shared

    def drained_locked(self, timeout_s: float) -> bool:
        """Waits until nothing is pending."""
        return self._idle.wait_for(lambda: not any(self._pending), timeout_s)

    def stop_locked(self) -> None:
        """Drops what is queued and lets the threads end."""
        self._stopping = True
        for item in self._seals:
            for number in item.tiers:
                self._unsent(number, [item])
        self._seals.clear()
        for number, queue in enumerate(self._queues):
            self._unsent(number, queue)
            queue.clear()
        for condition in (self._to_seal, self._idle, *self._to_write):
            condition.notify_all()

    def pending_locked(self) -> dict[str, int]:
        return {tier.name: self._pending[n] for n, tier in enumerate(self._tiers)}

    def check_locked(self) -> None:
        """Raises InvariantError where the books do not add up."""
        if any(not 0 <= pending <= self._queue_blocks for pending in self._pending):
            raise InvariantError(f"{self._pending} blocks wait to be written, {self._queue_blocks} at most may")

    # queues

    def _room(self) -> list[int]:
        return [n for n, pending in enumerate(self._pending) if pending < self._queue_blocks]

    def _left_out(self, room: Sequence[int]) -> None:
        if len(room) < len(self._tiers):
            for number, tier in enumerate(self._tiers):
                self._not_behind[tier.name] += number not in room

    def _queue(self, item: _Outgoing) -> None:
        for number in item.tiers:
            self._queues[number].append(item)
            self._to_write[number].notify()

    def _sent(self, number: int, items: Iterable[_Item]) -> None:
        done = []
        for item in items:
            self._pending[number] -= 1
            if isinstance(item, _Outgoing):
                item.left -= 1
                if not item.left:
                    item.parts = ()
                    done.append(item.slot)
        self._host.unpin(done)
        if not any(self._pending):
            self._idle.notify_all()

    def _unsent(self, number: int, items: Iterable[_Item]) -> None:
        left = list(items)
        self._not_behind[self._tiers[number].name] += sum(isinstance(item, _Outgoing) for item in left)
        self._sent(number, left)

    # records

    def _seal_all(self) -> None:
        """Checksums and codecs in a thread of their own: the next block's, while the one before is on its way."""
        while True:
            with self._lock:
                while not self._seals and not self._stopping:
                    self._to_seal.wait()
                if self._stopping:
                    return
                item = self._seals.popleft()
            try:
                if not item.slot.doomed:
                    item.parts = self._parts(item)
            except ValueError as error:
                log.warning("kvsteward: a block cannot be stored as %s: %s", self._codec.name, error)
            except Exception:  # whatever it is, the thread lives on; the block is not written below
                log.exception("kvsteward: a block could not be made ready for the tiers")
            with self._lock:
                if item.parts:
                    self._queue(item)
                    continue
                for number in item.tiers:
                    self._not_behind[self._tiers[number].name] += not item.slot.doomed
                    self._sent(number, [item])

    def _parts(self, item: _Outgoing) -> tuple[memoryview | bytes, ...]:
        """The record; the block as it is where the codec does not make it smaller, so no record is larger than a
        slot."""
        slot, number = item.slot, self._codec.number
        payload = None if number == Raw.number else self._codec.encode(slot.block)
        if payload is not None and memoryview(payload).nbytes < slot.block.nbytes:
            raw_bytes = slot.block.nbytes
            header = encode_header(item.key, payload, codec=number, raw_bytes=raw_bytes, expires_s=item.expires_s)
            return (header, payload)
        if not slot.sealed:
            seal(slot, item.key, item.expires_s)
            slot.sealed = True
        return (slot.record,)

    # writing

    def _write_all(self, number: int) -> None:
        while True:
            with self._lock:
                while not self._stopping and not (taken := self._take(number)):
                    self._to_write[number].wait()
                if self._stopping:
                    return
            try:
                self._write(self._tiers[number], taken)
            except Exception:  # whatever it is, the thread lives on; what was taken counts as sent
                log.exception("kvsteward: writing to tier %s failed", self._tiers[number].name)
            finally:
                with self._lock:
                    self._busy[number] -= 1
                    self._forgetting[number] = False
                    self._sent(number, taken)
                    self._to_write[number].notify_all()

    def _take(self, number: int) -> list[_Item]:
        """A batch of blocks, or the end of a session once no other thread writes to this tier."""
        queue, taken = self._queues[number], list[_Item]()
        if not queue or self._forgetting[number]:
            return taken
        if isinstance(queue[0], _Forget):
            if self._busy[number]:
                return taken
            self._forgetting[number] = True
            taken.append(queue.popleft())
        while queue and len(taken) < self._batch_blocks and not self._forgetting[number]:
            if isinstance(queue[0], _Forget):
                break
            taken.append(queue.popleft())
        self._busy[number] += 1
        return taken

    def _write(self, tier: Tier, taken: Sequence[_Item]) -> None:
        writes: list[Write] = []
        for item in taken:
            if isinstance(item, _Forget):
                session = item.session
                tier.forget_session(session, lambda keys, name=session: self._host.used_elsewhere(keys, name))  # type: ignore[misc]
            elif isinstance(item, _Use):
                tier.use(item.session, item.keys)
            elif not item.slot.doomed:  # its session ended meanwhile
                writes.append(Write(item.key, item.parts or self._parts(item), item.session, item.expires_s))
        if writes:
            tier.write(writes)

"""Our tier and cache policy under vLLM's own offloading managers, without an engine. Prints one JSON object.

PYTHONPATH=src VLLM_PYTHON tests/kv/offload_check.py VALKEY_URL VALKEY_PID
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import valkey
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvsteward.errors import ConfigError
from kvsteward.kv.vllm.cache_policy import SHARED, SessionCachePolicy

CHUNK_BYTES = 8192
PATIENCE_S = 20.0
POLICY = ("SessionCachePolicy", "kvsteward.kv.vllm.cache_policy")


class Region:
    """What the primary tier asks of its memory."""

    def __init__(self, chunks: int) -> None:
        self.memory = np.zeros((chunks, CHUNK_BYTES), np.int8)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.memory)

    def cleanup(self) -> None:
        return


def spec(model: str = "smol") -> Any:
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        kv_cache_layout="LBNHC",
    )
    return SimpleNamespace(config=config)


def key(number: int) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def content(number: int) -> bytes:
    return random.Random(number).randbytes(CHUNK_BYTES)


def request(name: str, session: str = "", **hint: Any) -> ReqContext:
    body = {"version": 1, **({"session": session} if session else {}), **hint}
    return ReqContext(name, {"kvsteward": body} if len(body) > 1 else None)


class Replica:
    """vLLM's tiering manager with our tier below its CPU tier."""

    def __init__(self, url: str, chunks: int = 8, model: str = "smol", **options: Any) -> None:
        self.region = Region(chunks)
        primary = CPUPrimaryTierOffloadingManager(chunks, self.region, *POLICY)
        tier = {"type": "KVStewardValkeyTier", "module_path": "kvsteward.kv.vllm.offload_tier", "url": url, **options}
        self.tier: Any = SecondaryTierFactory.create_secondary_tier(tier, primary.get_kv_memoryview(), spec(model))
        self.manager = TieringOffloadingManager(primary, [self.tier])

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.001)

    def until(self, done: Any) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end, "it never came to an end"
            self.step()

    def settle(self) -> None:
        """All jobs are reported to vLLM's manager."""
        self.manager.lookup(key(10**6), ReqContext("tick"))
        self.until(lambda: not self.manager._jobs or self.manager.lookup(key(10**6), ReqContext("tick")) is None)

    def store(self, numbers: list[int], context: ReqContext) -> int:
        self.manager.on_new_request(context)
        plan = self.manager.prepare_store([key(n) for n in numbers], context)
        if plan is None:
            self.manager.on_request_finished(context)
            return 0
        for stored, chunk in zip(plan.keys_to_store, plan.store_spec.block_ids, strict=True):
            self.region.memory[chunk] = np.frombuffer(content(int.from_bytes(stored[:32], "big")), np.int8)
        self.manager.complete_store(plan.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.settle()
        return len(plan.keys_to_store)

    def load(self, numbers: list[int], context: ReqContext) -> list[int]:
        """Which of the chunks came, with the right bytes; a wrong one is negative."""
        self.manager.on_new_request(context)
        waiting = (LookupResult.RETRY, LookupResult.HIT_PENDING)

        def asked() -> bool:
            answers = [self.manager.lookup(key(n), context) for n in numbers]  # all of them are asked for at once
            return not any(answer in waiting for answer in answers)

        self.until(asked)
        here = [n for n in numbers if self.manager.lookup(key(n), context) is LookupResult.HIT]
        found = []
        if here:
            self.manager.touch([key(n) for n in here], context)
            plan: Any = self.manager.prepare_load([key(n) for n in here], context)
            for n, chunk in zip(here, plan.block_ids, strict=True):
                found.append(n if self.region.memory[chunk].tobytes() == content(n) else -n)
            self.manager.complete_load([key(n) for n in here], context)
        self.manager.on_request_finished(context)
        return found

    def close(self) -> None:
        self.tier.shutdown()


def tiers(url: str) -> dict[str, Any]:
    client = valkey.Valkey.from_url(url)
    report: dict[str, Any] = {}
    one, two = Replica(url), Replica(url)
    report["stored"] = one.store([1, 2, 3, 4], request("r1", "a"))
    report["loaded"] = two.load([1, 2, 3, 4, 5], request("r2", "b"))
    report["values"] = sorted(client.type(name).decode() for name in client.scan_iter())
    for name, options in {"salt": {"salt": "x"}, "model": {"model": "other"}}.items():
        other = Replica(url, **options)
        report[f"other_{name}"] = other.load([1, 2], request("r3"))
        other.close()
    lossless = Replica(url, salt="lossless", codec="lossless")
    lossless.store([7, 8], request("r4"))
    again = Replica(url, salt="lossless", codec="lossless")
    report["lossless"] = again.load([7, 8], request("r5"))
    names = sorted(name for name in client.scan_iter("kv:1:*:0:*") if name.endswith(b"%064x" % 2))
    for name in names:
        record = bytearray(client.get(name))
        record[-1] ^= 1
        client.set(name, bytes(record))
    three = Replica(url)
    report["flipped"] = three.load([1, 2, 3], request("r6", "c"))
    report["misses"] = dict(three.tier.figures().misses)
    report["dropped"] = [client.exists(name) for name in names]
    one.store([10], request("r7", "a", final=True))
    one.tier.drain_jobs()
    left = Replica(url)
    end = time.monotonic() + PATIENCE_S
    while client.exists(f"kv:1:{one.tier._digest.hex()}:session:a") and time.monotonic() < end:
        time.sleep(0.01)
    report["after_final"] = left.load([1, 3, 4, 10], request("r8", "d"))
    for replica, session in ((two, "b"), (three, "c"), (left, "d")):
        replica.store([12], request(f"e-{session}", session, final=True))
        replica.tier.drain_jobs()
        while client.exists(f"kv:1:{one.tier._digest.hex()}:session:{session}") and time.monotonic() < end:
            time.sleep(0.01)
    last = Replica(url)
    report["after_all_final"] = last.load([1, 3, 4, 10, 12], request("r12"))
    last.close()
    one.store([30, 31], request("u1", "f"))
    one.load([30], request("u2", "g"))
    small = Replica(url)
    small.load([30, 31], request("u3", "f"))
    small.load([30], request("u4", "g"))
    small.store([32], request("u5", "f", final=True))
    small.tier.drain_jobs()
    while client.exists(f"kv:1:{one.tier._digest.hex()}:session:f") and time.monotonic() < end:
        time.sleep(0.01)
    fresh = Replica(url)
    report["shared_stays"] = fresh.load([30, 31, 32], request("u6", "h"))
    one.store([11], request("r9", "e", ttl_s=0))
    report["not_kept"] = left.load([11], request("r10"))
    bounded = Replica(url, salt="bounded", max_jobs=1)
    bounded.tier._open = 1
    bounded.store([1], request("r11"))
    report["bounded"] = bounded.tier.figures().written_blocks
    bounded.tier._open = 0
    refused = []
    for options in ({"codec": "zip"}, {"readers": 0}, {"locality": "MOON"}, {"nonsense": 1}, {"allow_version": None}):
        try:
            Replica(url, **options).close()
            refused.append("")
        except (ConfigError, TypeError, ValueError) as error:
            refused.append(type(error).__name__)
    report["refused"] = refused
    for replica in (one, two, lossless, again, three, left, small, fresh, bounded):
        replica.close()
    return report


def dead(url: str, pid: int) -> dict[str, Any]:
    """The server is killed between a store and a load, and again nothing is lost but blocks."""
    replica, other = Replica(url), Replica(url)
    replica.store([20, 21, 22], request("k1", "k"))
    os.kill(pid, signal.SIGKILL)
    report = {"loaded": other.load([20, 21], request("k2")), "stored": replica.store([23, 24], request("k3"))}
    report["here"] = replica.load([20, 23], request("k4"))
    replica.tier.drain_jobs()
    report["jobs"] = len(replica.manager._jobs) + len(other.manager._jobs)
    report["refused"] = sum(replica.tier.figures().refused.values())
    for one in (replica, other):
        one.close()
    return report


class Cache:
    """vLLM's CPU manager with our policy; stores end at once."""

    def __init__(self, chunks: int) -> None:
        self.manager = CPUOffloadingManager(chunks, *POLICY)
        self.policy: SessionCachePolicy = self.manager._policy  # type: ignore[assignment]
        self.now = 0.0
        self.policy.clock = lambda: self.now
        self.turns = 0

    def turn(self, session: str, numbers: list[int], **hint: Any) -> list[int] | None:
        """Stores the chunks; returns what had to go."""
        self.turns += 1
        context = request(f"t{self.turns}", session, **hint)
        self.manager.on_new_request(context)
        plan = self.manager.prepare_store([key(n) for n in numbers], context)
        if plan is not None:
            self.manager.complete_store(plan.keys_to_store, context)
        self.now += 1
        self.manager.on_request_finished(context)
        self.now += 1
        return None if plan is None else [int.from_bytes(k[:32], "big") for k in plan.evicted_keys]


def policy() -> dict[str, Any]:
    report: dict[str, Any] = {}
    cache = Cache(6)
    cache.turn("a", [1, 2])
    cache.turn("b", [3, 4], final=True)
    cache.turn("c", [5, 6])
    report["final_first"] = cache.turn("d", [7])
    report["then"] = cache.turn("d", [7, 8])
    cache = Cache(4)
    cache.turn("kept", [1, 2], ttl_s=1000)
    cache.turn("b", [3, 4])
    report["ttl_stays"] = cache.turn("c", [5, 6])
    report["soft"] = cache.turn("d", [7, 8, 9, 10])
    cache = Cache(3)
    cache.turn("a", [1, 2, 3])
    report["tail_first"] = [cache.turn("b", [9]), cache.turn("b", [9, 10])]
    cache = Cache(4)
    cache.turn("a", [1])
    cache.turn("b", [1, 2])
    report["owners"] = sorted(cache.policy._owners)
    report["shared"] = SHARED + "a"
    report["refused"] = [cache.turn("z", [3], ttl_s="soon"), cache.policy.refused_hints]
    report["anonymous"] = cache.turn("", [4])
    report["random"] = random_work()
    return report


def random_work() -> dict[str, int]:
    """Thousands of steps against a model: exactly what is asked for is evicted, or nothing, and the books add up."""
    dice, counts = random.Random(3), Counter[str]()
    cache = Cache(14)
    manager, held = cache.manager, []
    for number in range(2500):
        session = dice.choice("abcdefgh")
        first = dice.randrange(60)
        keys = [key(n) for n in range(first, first + dice.randrange(1, 8))]
        context = request(f"q{number}", session, **({"final": True} if dice.random() < 0.1 else {}))
        manager.on_new_request(context)
        ready = [k for k in keys if manager.lookup(k, context) is LookupResult.HIT]
        if ready and dice.random() < 0.4:
            manager.prepare_load(ready, context)
            held.append((ready, context))
        before = set(cache.policy._entries)
        plan = manager.prepare_store(keys, context)
        after = set(cache.policy._entries)
        if plan is None:
            counts["none"] += 1
            assert before == after
        else:
            counts["evicted"] += len(plan.evicted_keys)
            assert set(plan.evicted_keys) == before - after
            assert not set(plan.evicted_keys) & set(keys)
            manager.complete_store(plan.keys_to_store, context, success=dice.random() < 0.9)
        manager.on_request_finished(context)
        while held and (len(held) > 6 or dice.random() < 0.3):
            manager.complete_load(*held.pop())
        cache.now += dice.random()
        check(cache)
        if number % 1000 == 999:
            for item in held:
                manager.complete_load(*item)
            held.clear()
            manager.reset_cache()
            assert not cache.policy._entries
            assert not cache.policy._owners
    return dict(counts)


def check(cache: Cache) -> None:
    entries, owners = cache.policy._entries, cache.policy._owners
    assert len(entries) <= 14
    assert sum(len(owner.keys) for owner in owners.values()) == len(entries)
    idle = {k for owner in owners.values() for k in owner.idle}
    assert (
        idle
        == {k for k, entry in entries.items() if entry.chunk.ref_cnt == 0}
        == {k for k, entry in entries.items() if entry.evictable}
    )
    assert len(idle) == cache.manager._num_evictable_cache_chunks


def main() -> None:
    url, pid = sys.argv[1], int(sys.argv[2])
    report = {}
    for name, part in (("tiers", lambda: tiers(url)), ("policy", policy), ("dead", lambda: dead(url, pid))):
        start = time.monotonic()
        report[name] = part()
        print(f"{name} took {time.monotonic() - start:.1f} s", file=sys.stderr)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

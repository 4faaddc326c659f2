"""A tier in memory whose faults the test makes: the double of a disk or a server."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from kvsteward.kv.blocks.record import Miss, Reason
from kvsteward.kv.blocks.tier import Meter, Tier, TierFigures, Write


class MemoryTier(Tier):
    """`gate`: cleared, every call waits. `broken`: the reason that every call gives."""

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self.records: dict[bytes, bytes] = {}
        self.sessions: dict[str, set[bytes]] = defaultdict(set)
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Semaphore(0)
        self.broken: Reason | None = None
        self.crash: Exception | None = None
        self.reads: list[list[bytes]] = []
        self.meter = Meter()

    def _enter(self) -> None:
        self.waiting.release()
        assert self.gate.wait(30)
        if self.crash is not None:
            raise self.crash

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter()
        return [key in self.records for key in keys]

    def read(self, keys: Sequence[bytes], rooms: Sequence[memoryview]) -> list[memoryview | Miss]:
        self._enter()
        self.reads.append(list(keys))
        if self.broken:
            return [Miss(self.broken) for _ in keys]
        return [memoryview(self.records[k]) if k in self.records else Miss(Reason.ABSENT) for k in keys]

    def write(self, writes: Sequence[Write]) -> list[Reason | None]:
        self._enter()
        if self.broken:
            self.meter.refused[self.broken] += len(writes)
            return [self.broken for _ in writes]
        for write in writes:
            self.records[write.key] = b"".join(write.parts)
            self.sessions[write.session].add(write.key)
        return [None for _ in writes]

    def forget(self, keys: Sequence[bytes]) -> int:
        return sum(self.records.pop(key, None) is not None for key in keys)

    def forget_session(self, session: str, spare: Callable[[Sequence[bytes]], set[bytes]]) -> int:
        self._enter()
        keys = list(self.sessions.pop(session, ()))
        return self.forget(list(set(keys) - spare(keys)))

    def missed(self, reason: Reason) -> None:
        self.meter.misses[reason] += 1

    def figures(self) -> TierFigures:
        return self.meter.figures(self.name, blocks=len(self.records))

"""Which chunks leave vLLM's CPU tier first (OffloadingConnector): those of the sessions that are least worth keeping.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "eviction_policy": "SessionCachePolicy", "cache_policy_module_path": "kvsteward.kv.vllm.cache_policy"}

Sessions and hints come in `kv_transfer_params` (`hints`, with `session`); a request without one is a session of its
own. `policy.retention` orders the sessions, of each the chunks that were not used for longest go first, the last ones
of a prefix before the first. Chunks that several sessions used are an owner of their own.

No I/O. Invariant: `evict` takes exactly what it was asked for, or nothing; what is in use or protected stays.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsteward.errors import ProtocolError
from kvsteward.kv.vllm import compat_offload
from kvsteward.kv.vllm.hints import Told, parse
from kvsteward.policy.retention import NO_HINT, Hint, State, order
from kvsteward.policy.returns import Returns

SHARED, ALONE, LOOSE = "shared:", "request:", "loose:"
REORDER_S = 0.25
MAX_RANKED = 2048
MAX_RUNNING = 8192


@dataclass(slots=True)
class _Entry:
    chunk: Any
    owner: str
    place: int
    """The larger, the later it goes."""
    evictable: bool = False


@dataclass(slots=True)
class _Owner:
    hint: Hint = NO_HINT
    since_s: float = 0.0
    keys: set[bytes] = field(default_factory=set)
    idle: set[bytes] = field(default_factory=set)
    """Those that may go."""


@dataclass(frozen=True, slots=True)
class _Heard:
    session: str
    told: Told


class SessionCachePolicy(compat_offload.CachePolicy):  # type: ignore[misc]
    """Made by vLLM with the number of chunks. `clock` is monotonic."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clock = time.monotonic
        self.refused_hints = 0
        self._entries: dict[bytes, _Entry] = {}
        self._owners: dict[str, _Owner] = {}
        self._coming: OrderedDict[bytes, str] = OrderedDict()
        """Whose chunk it will be, of those that are about to be inserted."""
        self._running: OrderedDict[str, str] = OrderedDict()
        """Sessions by the ids of requests that were heard of and are not finished."""
        self._returns = Returns()
        self._place = 0
        self._order: list[str] = []
        self._ordered_at = -REORDER_S

    # what vLLM asks

    def get(self, key: bytes) -> Any:
        entry = self._entries.get(key)
        return None if entry is None else entry.chunk

    def insert(self, key: bytes, chunk: Any) -> None:
        owner = self._coming.pop(key, LOOSE)
        self._place += 1
        self._entries[key] = entry = _Entry(chunk, owner, self._place)
        self._own(owner).keys.add(key)
        if chunk.ref_cnt == 0:
            self._let_go(key, entry)

    def remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._leave(key, entry)

    def clear(self) -> None:
        self._entries.clear()
        self._owners.clear()
        self._coming.clear()
        self._order = []

    def mark_evictable(self, key: bytes) -> None:
        self._let_go(key, self._entries[key])

    def mark_non_evictable(self, key: bytes) -> None:
        entry = self._entries[key]
        entry.evictable = False
        self._owners[entry.owner].idle.discard(key)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        chosen: list[bytes] = []
        for name in self._ranked():
            if len(chosen) >= n:
                break
            idle = self._owners[name].idle
            free = (key for key in idle if key not in protected)
            chosen += heapq.nsmallest(n - len(chosen), free, key=lambda key: self._entries[key].place)
        if len(chosen) < n:
            return None
        gone = []
        for key in chosen:
            gone.append((key, self._entries[key].chunk))
            self.remove(key)
        return gone

    # what vLLM tells

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        heard = self._heard(req_context)
        for key in keys:
            self._coming.pop(key, None)
            self._coming[key] = heard.session
        while len(self._coming) > 4 * self.cache_capacity:
            self._coming.popitem(last=False)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._use(list(keys), self._heard(req_context).session)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        heard = self._heard(req_context)
        self._use(compat_offload.order_request_keys(key_groups, req_context), heard.session)
        now_s = self.clock()
        self._returns.paused(heard.session, now_s, heard.told.stop or "stopped", heard.told.tools)
        self._running.pop(req_context.req_id, None)
        owner = self._owners.get(heard.session)
        if owner is not None:
            owner.hint, owner.since_s = heard.told.hint, now_s
        self._ordered_at = -REORDER_S

    # the books

    def _heard(self, req_context: Any) -> _Heard:
        """Parsed once for each request, at which its turn begins."""
        heard: _Heard | None = req_context.get_state(_Heard)
        if heard is None:
            try:
                told = parse(req_context.kv_transfer_params)
            except ProtocolError:
                self.refused_hints += 1
                told = Told()
            heard = _Heard(told.session or ALONE + req_context.req_id, told)
            req_context.set_state(heard)
            self._returns.started(heard.session, self.clock())
            self._running[req_context.req_id] = heard.session
            while len(self._running) > MAX_RUNNING:
                self._running.popitem(last=False)
        return heard

    def _use(self, keys: list[bytes], session: str) -> None:
        """The last of a prefix is to go first."""
        known = [key for key in keys if key in self._entries]
        for key in reversed(known):
            entry = self._entries[key]
            self._place += 1
            entry.place = self._place
            if entry.owner != session and not entry.owner.startswith(SHARED):
                loose = entry.owner == LOOSE
                self._move(key, entry, session if loose else SHARED + entry.owner)
            elif entry.owner.startswith(SHARED):
                self._returns.started(entry.owner, self.clock())

    def _own(self, name: str) -> _Owner:
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner(since_s=self.clock())
        return owner

    def _move(self, key: bytes, entry: _Entry, name: str) -> None:
        evictable = entry.evictable
        self._leave(key, entry)
        entry.owner = name
        self._own(name).keys.add(key)
        if evictable:
            self._let_go(key, entry)

    def _leave(self, key: bytes, entry: _Entry) -> None:
        owner = self._owners[entry.owner]
        owner.keys.discard(key)
        owner.idle.discard(key)
        entry.evictable = False
        if not owner.keys:
            del self._owners[entry.owner]

    def _let_go(self, key: bytes, entry: _Entry) -> None:
        entry.evictable = True
        self._owners[entry.owner].idle.add(key)

    def _ranked(self) -> list[str]:
        """Owners, the first to be given up first. Thought over every `REORDER_S`; newer ones go last until then."""
        now_s = self.clock()
        if now_s - self._ordered_at >= REORDER_S:
            self._ordered_at = now_s
            oldest = heapq.nsmallest(MAX_RANKED, self._owners.items(), key=lambda item: item[1].since_s)
            running = set(self._running.values())
            states = [
                State(name, name, len(owner.keys), owner.since_s, awaited=name in running, hint=owner.hint)
                for name, owner in oldest
            ]
            self._order = [give.name for give in order(states, self._returns, now_s)]
        known = [name for name in self._order if name in self._owners]
        return [*known, *(self._owners.keys() - set(known))]

"""Who has how much in the KV pool: a ledger of sessions, kept from what the engine reported for each turn.

Engines say how full the pool is, not whose tokens fill it; idle prefixes even look free. So the ledger keeps, for each
session, the prompt + answer of its last turn, and forgets the longest unused ones when the pool's capacity is passed,
as the
engines' own LRU does. It is a model of the engine's cache, corrected by each turn's `cached_tokens`.

Mutable, no clock: order of use is order of calls. Invariant: the sum of all entries never passes the capacity, except
for one session that is larger alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class Residency:
    """Tokens in the pool by session. `capacity_tokens` None: unlimited."""

    def __init__(self, capacity_tokens: int | None = None, *, max_sessions: int = 100_000) -> None:
        self.capacity_tokens = capacity_tokens
        self._max_sessions = max_sessions
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._total = 0

    @property
    def total_tokens(self) -> int:
        return self._total

    def of(self, session_id: str) -> int:
        return self._tokens.get(session_id, 0)

    def sessions(self) -> Mapping[str, int]:
        """Least recently used first."""
        return dict(self._tokens)

    def touch(self, session_id: str, tokens: int) -> list[str]:
        """A session's turn left `tokens` in the pool. Returns the sessions that this pushes out."""
        self._total += tokens - self._tokens.get(session_id, 0)
        self._tokens[session_id] = tokens
        self._tokens.move_to_end(session_id)
        evicted: list[str] = []
        while len(self._tokens) > 1 and self._over():
            victim, freed = self._tokens.popitem(last=False)
            self._total -= freed
            evicted.append(victim)
        return evicted

    def release(self, session_id: str) -> int:
        """Forgets a session; returns the tokens that it had."""
        freed = self._tokens.pop(session_id, 0)
        self._total -= freed
        return freed

    def _over(self) -> bool:
        too_many = len(self._tokens) > self._max_sessions
        return too_many or (self.capacity_tokens is not None and self._total > self.capacity_tokens)

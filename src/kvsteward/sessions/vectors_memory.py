"""The vectors of a store in memory, beside its logs.

Knows no file. Invariant: as in `vectors`; `holds` says what the store still has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvsteward.sessions.nearest import nearest, packed
from kvsteward.sessions.vectors import MAX_SEARCHED, Near, Space, VectorIndex


class MemoryVectors(VectorIndex):
    """Nothing outlives the process. The store calls `delete`."""

    def __init__(self, holds: Callable[[str, str], bool]) -> None:
        self._holds = holds
        self._lock = threading.Lock()
        self._rows: dict[str, dict[tuple[str, str], tuple[bytes, ...]]] = {}  # session -> (space, entry) -> vectors

    def known(self, session_id: str, space: Space, hashes: Sequence[str]) -> frozenset[str]:
        with self._lock:
            rows = self._rows.get(session_id, {})
            return frozenset(hash_ for hash_ in hashes if (space.key, hash_) in rows)

    def adopt(self, session_id: str, space: Space, hash_: str) -> bool:
        with self._lock:
            found = next((r[space.key, hash_] for r in self._rows.values() if (space.key, hash_) in r), None)
        return found is not None and self._keep(session_id, space, hash_, found)

    def add(self, session_id: str, space: Space, hash_: str, vectors: Sequence[Sequence[float]]) -> bool:
        return self._keep(session_id, space, hash_, tuple(map(packed, vectors)))

    def nearest(self, session_id: str, space: Space, vector: Sequence[float], *, limit: int) -> Sequence[Near]:
        with self._lock:
            rows = list(self._rows.get(session_id, {}).items())
        newest = [(hash_, data) for (key, hash_), held in reversed(rows) if key == space.key for data in held]
        return nearest(newest[:MAX_SEARCHED], vector, limit)

    def forget_others(self, session_id: str, space: Space) -> None:
        with self._lock:
            rows = self._rows.get(session_id, {})
            for where in [where for where in rows if where[0] != space.key]:
                del rows[where]

    def delete(self, session_id: str) -> None:
        """The session has been deleted."""
        with self._lock:
            self._rows.pop(session_id, None)

    def close(self) -> None:
        """Nothing to give back."""

    def _keep(self, session_id: str, space: Space, hash_: str, held: tuple[bytes, ...]) -> bool:
        with self._lock:
            if not self._holds(session_id, hash_):
                return False
            rows = self._rows.setdefault(session_id, {})
            rows.pop((space.key, hash_), None)
            rows[space.key, hash_] = held
            return True

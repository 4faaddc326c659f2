"""Which block of the host pool goes first when room is needed.

An order knows only blocks that may go: a block in use is taken out and comes back when it is let go. A block is worth
nothing without the ones before it, so of blocks that were used together the deepest goes first.

No I/O; called under the pool's lock, so it must not call back. Invariant: `pop` returns each block that was added and
not taken out exactly once.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence


class Order(ABC):
    @abstractmethod
    def add(self, key: bytes, session: str, depth: int, together: int) -> None:
        """`together` is the same number for blocks that were used at once, larger for later ones; `depth` is the
        place in its chain. `session` is the one that used it last, or ""."""

    @abstractmethod
    def discard(self, key: bytes) -> None:
        """The block is in use or gone. Unknown keys are ignored."""

    @abstractmethod
    def pop(self) -> bytes | None:
        """The block to give up now, no longer known to the order; None where there is none."""

    @abstractmethod
    def __len__(self) -> int: ...


class LRU(Order):
    """The least recently used first; of those used at once the deepest."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[int, int, bytes]] = {}
        self._heap: list[tuple[int, int, bytes]] = []

    def add(self, key: bytes, session: str, depth: int, together: int) -> None:
        place = (together, -depth, key)
        self._places[key] = place
        heapq.heappush(self._heap, place)
        if len(self._heap) > 64 + 2 * len(self._places):  # places that were left stay in the heap until here
            self._heap = list(self._places.values())
            heapq.heapify(self._heap)

    def discard(self, key: bytes) -> None:
        self._places.pop(key, None)

    def pop(self) -> bytes | None:
        while self._heap:
            place = heapq.heappop(self._heap)
            if self._places.get(place[2]) is place:
                del self._places[place[2]]
                return place[2]
        return None

    def __len__(self) -> int:
        return len(self._places)


class Ranked(Order):
    """Whole sessions in the order of `rank`, in each session LRU.

    `rank` gets the blocks of each session ("" for those of none) and returns session names, the first to be given up
    first; sessions that it leaves out go last. It is asked again when `stale` was called, after `every` blocks, and
    when the sessions that it named are used up. It is called under the pool's lock: it must be quick.
    """

    def __init__(self, rank: Callable[[Mapping[str, int]], Sequence[str]], every: int = 64) -> None:
        self._rank, self._every = rank, every
        self._groups: dict[str, LRU] = {}
        self._where: dict[bytes, str] = {}
        self._ranking: list[str] = []
        self._left = 0

    def stale(self) -> None:
        """What sessions are worth has changed."""
        self._ranking = []

    def add(self, key: bytes, session: str, depth: int, together: int) -> None:
        self.discard(key)
        self._where[key] = session
        self._groups.setdefault(session, LRU()).add(key, session, depth, together)

    def discard(self, key: bytes) -> None:
        session = self._where.pop(key, None)
        if session is not None:
            group = self._groups[session]
            group.discard(key)
            if not len(group):
                del self._groups[session]

    def pop(self) -> bytes | None:
        if not self._groups:
            return None
        while True:
            while self._ranking and self._left:
                if self._ranking[-1] in self._groups:
                    self._left -= 1
                    return self._pop_of(self._ranking[-1])
                self._ranking.pop()
            sizes = {session: len(group) for session, group in self._groups.items()}
            named = [session for session in dict.fromkeys(self._rank(sizes)) if session in sizes]
            self._ranking = [*named, *(session for session in sizes if session not in set(named))][::-1]
            self._left = self._every

    def _pop_of(self, session: str) -> bytes | None:
        key = self._groups[session].pop()
        if key is not None:
            self.discard(key)
        return key

    def __len__(self) -> int:
        return len(self._where)

"""May the learned order be used, or is plain LRU better here? A shadow of LRU's cache keeps count.

The shadow holds names of blocks alone and is run as LRU would run the pool. Each turn says which blocks it asked for
and how many the real pool had; `margin` grows by blocks that the pool had and LRU would not have had, shrinks by the
opposite, and grows by `RATIO` of what was asked. Below 0 LRU is used, until the margin is a pool's size again. So with
C blocks in the pool and A asked in all, what is reused is at least what LRU reuses - RATIO x A - 2 C - the length of
one prompt: the margin starts at C and is at most `BANK` x C, and after a change to LRU the pool is equal to LRU's
as soon as C other blocks were used. Nothing is assumed of the turns.

Of a large pool only some blocks are followed, by their name (as in SHARDS: Waldspurger et al., FAST 2015); the bound
is then true of those.

Pure. Invariant: the shadow holds at most `size` names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import takewhile

RATIO = 0.002
BANK = 4
FOLLOWED = 2048
"""So many blocks of the pool are followed, about."""


class Guard:
    def __init__(self, pool_blocks: int) -> None:
        self.every = max(1, pool_blocks // FOLLOWED)
        """One block of so many is followed: those whose number (any stable one) is 0 modulo this."""
        self.size = max(1, pool_blocks // self.every)
        self.margin = float(self.size)
        self.lru = False
        self._shadow: OrderedDict[Hashable, None] = OrderedDict()

    def turn(self, names: Sequence[Hashable], hits: int) -> None:
        """A turn over these followed blocks, the head of the prompt first; the pool had the first `hits` of them."""
        by_lru = sum(1 for _ in takewhile(self._shadow.__contains__, names))
        for name in reversed(names):
            self._shadow.pop(name, None)
            self._shadow[name] = None
        while len(self._shadow) > self.size:
            self._shadow.popitem(last=False)
        self.margin = min(BANK * self.size, self.margin + hits - by_lru + RATIO * len(names))
        if self.margin < 0:
            self.lru = True
        elif self.margin >= self.size:
            self.lru = False

    def clear(self) -> None:
        """The cache was reset."""
        self._shadow.clear()

"""What a block store counts. Pure. Invariant: `figures` is a copy, so nobody changes the books through it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvsteward.kv.blocks.host import HostFigures
from kvsteward.kv.blocks.tier import TierFigures


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Counts of blocks since the start, except where said.

    `dropped`: puts that were not kept, by reason. `not_behind`: blocks that stayed in host memory only, by tier,
    since its queue was full. `host_hits`: blocks that a stage found in host memory; `staged`: that it brought, by
    tier; `misses`: that it did not get, by reason (a ticket counts only its first missing one). `writing`, `loading`,
    `tickets`: now.
    """

    host: HostFigures
    tiers: tuple[TierFigures, ...]
    puts: int
    put_again: int
    dropped: dict[str, int]
    not_behind: dict[str, int]
    host_hits: int
    staged: dict[str, int]
    fetches_shared: int
    misses: dict[str, int]
    served: int
    not_served: dict[str, int]
    writing: dict[str, int]
    loading: int
    tickets: int


@dataclass(slots=True)
class Counts:
    """The same while they change, under the store's lock."""

    puts: int = 0
    put_again: int = 0
    host_hits: int = 0
    fetches_shared: int = 0
    served: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    not_behind: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    staged: Counter[str] = field(default_factory=Counter)
    not_served: Counter[str] = field(default_factory=Counter)

    def figures(
        self, host: HostFigures, tiers: tuple[TierFigures, ...], writing: dict[str, int], loading: int, tickets: int
    ) -> StoreFigures:
        return StoreFigures(
            host,
            tiers,
            self.puts,
            self.put_again,
            dict(self.dropped),
            {name: n for name, n in self.not_behind.items() if n},
            self.host_hits,
            dict(self.staged),
            self.fetches_shared,
            dict(self.misses),
            self.served,
            dict(self.not_served),
            writing,
            loading,
            tickets,
        )

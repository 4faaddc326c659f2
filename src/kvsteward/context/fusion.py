"""Several rankings of the same things as one: reciprocal rank fusion.

Pure; knows nothing of what is ranked, nor of the scores that it was ranked by: only places count, so a ranking by words
and one by meaning need no common scale. Invariants: what stands in any ranking stands once in the result; one ranking
alone comes out as it went in.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)

K = 60
"""How much the first places stand out: the larger, the less. The paper's value; it found that little depends on it."""


def fused(rankings: Sequence[Sequence[T]], *, k: int = K) -> list[T]:
    """The union of the rankings by `sum(1 / (k + place))` over those that hold a thing, places from 1, best first.

    Of two that are worth the same, the one with the better place comes first, then the one of the earlier ranking.
    Where a ranking names a thing twice, its first place counts.

    Cormack, Clarke and Buettcher: Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning Methods,
    SIGIR 2009, https://doi.org/10.1145/1571941.1572114.
    """
    places: dict[T, dict[int, int]] = {}
    for number, ranking in enumerate(rankings):
        for place, thing in enumerate(ranking, 1):
            places.setdefault(thing, {}).setdefault(number, place)

    def order(thing: T) -> tuple[float, int, int]:
        held = places[thing]
        worth = math.fsum(1 / (k + place) for place in held.values())  # exact, so that the order of summands is nothing
        place, number = min((place, number) for number, place in held.items())
        return -worth, place, number

    return sorted(places, key=order)

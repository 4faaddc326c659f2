"""Several rankings of the same things as one: their first places in turn, then their second ones.

Pure; knows nothing of what is ranked, nor of the scores that it was ranked by. Invariants: what stands in any ranking
stands once in the result; the first ranking's first thing stays first; the nth thing of a ranking comes at n times the
number of rankings at the latest.

Adding up reciprocal places (reciprocal rank fusion, Cormack, Clarke and Buettcher, SIGIR 2009) has no such bound: in a
log of some dozen messages nearly each stands in both rankings, and a weak one pulls the right message down
(benchmarks/RESULTS.md, "Recall").
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest
from typing import TypeVar

T = TypeVar("T", bound=Hashable)
_NONE = object()


def fused(rankings: Sequence[Sequence[T]]) -> list[T]:
    """The union of the rankings, best first. Of two in the same place, the earlier ranking's comes first."""
    places = (thing for place in zip_longest(*rankings, fillvalue=_NONE) for thing in place if thing is not _NONE)
    return list(dict.fromkeys(places))  # type: ignore[arg-type]  # without the filling

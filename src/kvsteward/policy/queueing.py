"""The order of those who wait: sessions that return before new ones, first come first served among equals.

A returning session has KV in the pool; if it waits, that KV is evicted and must be prefilled again. So it goes first,
but not for ever: after `patience_s` a turn's age counts alone, so that nobody starves.

Pure: the clock comes in as `now`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Waiting(Protocol):
    @property
    def returning(self) -> bool: ...
    @property
    def since(self) -> float: ...


W = TypeVar("W", bound=Waiting)

PATIENCE_S = 10.0


def order(queue: Iterable[W], now: float, patience_s: float = PATIENCE_S) -> list[W]:
    """The queue, the next to be admitted first."""
    return sorted(queue, key=lambda w: (now - w.since < patience_s, not w.returning, w.since))

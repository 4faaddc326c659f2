"""What else tells when a pause ends: traits of a turn and its session tilt the hazard of the turn's class.

    log hazard(bin) = log of the class's hazard(bin) + the sum over traits of tilt[trait][bin]

A trait is a name with a coarse value ("the answer had 2^7 tokens"). Tilts start at 0 and are learned online by
maximum likelihood: returns in a bin of idle time are Poisson with mean hazard x seconds, so the gradient of a tilt is
returns - hazard x seconds; steps are scaled by AdaGrad (Duchi, Hazan, Singer, JMLR 2011). Piecewise-exponential
survival regression, as in Friedman, "Piecewise exponential models for survival data" (1982), one pass, no data kept.

Knows nothing of sessions or clocks. Invariant: at most `max_traits` are held; a tilt stays within `MAX_TILT`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Trait = tuple[str, ...]

STEP = 0.1
MAX_TILT = 3.0
"""One trait changes a hazard by a factor of at most e^3, all of them together by e^(2 x 3)."""
MOST_TAKEN_SQUARES = 100.0
"""Steps of what an earlier process learned begin at a tenth of the first step at least: traffic may have changed."""
MAX_NAMES, MAX_NAME_CHARS = 8, 1024


class Tilts:
    def __init__(self, bins: int, *, max_traits: int = 2048) -> None:
        self._bins, self._max_traits = bins, max_traits
        self._tilts: dict[Trait, list[float]] = {}
        self._steps: dict[Trait, list[float]] = {}

    def __len__(self) -> int:
        return len(self._tilts)

    def hazards(self, base: Sequence[float], traits: Sequence[Trait]) -> tuple[float, ...]:
        """`base` (1/s, by bin) tilted by the traits."""
        rows = [self._tilts[trait] for trait in traits if trait in self._tilts]
        if not rows:
            return tuple(base)
        return tuple(_tilted(h, sum(column)) for h, column in zip(base, zip(*rows, strict=True), strict=True))

    def learn(self, base: Sequence[float], traits: Sequence[Trait], spent_s: Sequence[float], back: int | None) -> None:
        """One pause, or a part of it: seconds idle by bin from bin 0 on, and the bin of the return if there was one."""
        rows = [(self._tilts[t], self._steps[t]) for t in traits if self._held(t)]
        if not rows:
            return
        for b, seconds in enumerate(spent_s):
            if seconds <= 0.0 and b != back:
                continue
            tilt = 0.0
            for tilts, _ in rows:
                tilt += tilts[b]
            slope = max(-1.0, (b == back) - _tilted(base[b], tilt) * seconds)
            for tilts, squares in rows:
                squares[b] = square = squares[b] + slope * slope
                moved = tilts[b] + STEP * slope / math.sqrt(square)
                tilts[b] = moved if -MAX_TILT < moved < MAX_TILT else math.copysign(MAX_TILT, moved)

    def rows(self) -> list[dict[str, Any]]:
        """Copies that JSON can hold, one for each trait."""
        return [{"trait": list(t), "tilt": list(v), "squares": list(self._steps[t])} for t, v in self._tilts.items()]

    def take(self, row: Mapping[str, Any]) -> None:
        """Begins with what a row of an earlier process says of a trait. Raises ValueError if it is none."""
        trait = names_of(row.get("trait"))
        tilts, squares = numbers_of(row.get("tilt"), self._bins), numbers_of(row.get("squares"), self._bins)
        if max(map(abs, tilts)) > MAX_TILT or min(squares) < 1.0:
            raise ValueError(f"a tilt is within {MAX_TILT}, its squares are 1 or more")
        if trait and self._held(trait):
            self._tilts[trait], self._steps[trait] = tilts, [min(MOST_TAKEN_SQUARES, one) for one in squares]

    def _held(self, trait: Trait) -> bool:
        if trait not in self._tilts:
            if len(self._tilts) >= self._max_traits:
                return False
            self._tilts[trait] = [0.0] * self._bins
            self._steps[trait] = [1.0] * self._bins
        return True


def _tilted(hazard: float, tilt: float) -> float:
    return hazard * math.exp(max(-2 * MAX_TILT, min(2 * MAX_TILT, tilt)))


def names_of(value: Any) -> Trait:
    """A class or a trait from JSON. Raises ValueError."""
    if not isinstance(value, list) or len(value) > MAX_NAMES:
        raise ValueError(f"a name is a list of at most {MAX_NAMES} texts")
    if not all(isinstance(one, str) and len(one) <= MAX_NAME_CHARS for one in value):
        raise ValueError(f"a name has texts of at most {MAX_NAME_CHARS} characters")
    return tuple(value)


def numbers_of(value: Any, count: int) -> list[float]:
    """`count` finite numbers from JSON. Raises ValueError."""
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"{count} numbers are needed")
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in value):
        raise ValueError("numbers must be finite")
    return [float(one) for one in value]

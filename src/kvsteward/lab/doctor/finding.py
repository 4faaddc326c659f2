"""What a check may say: found, clear or unknown.

Invariant: a check that lacks a figure is `Unknown` with the reason; it never guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsteward.lab.doctor.observation import Observation


class Severity(IntEnum):
    """How bad it is now."""

    ADVICE = 1
    """Nothing fails; it costs memory or will hurt later."""
    WARNING = 2
    """Turns are slower than they need be, or memory is lost."""
    CRITICAL = 3
    """Work is thrown away or does not move."""


class Lever(StrEnum):
    """What kind of change helps, the cheapest first."""

    TUNE = "tune"
    QUANTISE = "quantise"
    SPLIT = "split"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause that was found. `do` are exact flags or actions, the best first; `cost` is what the cause costs."""

    severity: Severity
    lever: Lever
    what: str
    evidence: tuple[str, ...]
    do: tuple[str, ...]
    cost: str
    gain: str


@dataclass(frozen=True, slots=True)
class Clear:
    """Looked at, and not so."""

    why: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Cannot be judged from what was seen."""

    why: str


Outcome = Finding | Clear | Unknown


class CannotJudge(Exception):
    """Raised inside a check when a figure is missing; the runner makes it `Unknown`. Never leaves this room."""


@dataclass(frozen=True, slots=True)
class Check:
    """One root cause. `signal` and `threshold` say what proves it, `source` where that comes from."""

    name: str
    signal: str
    threshold: str
    source: str
    judge: Callable[[Observation], Finding | Clear]

    def run(self, observation: Observation) -> Judged:
        """Judges. Raises nothing for figures that are missing."""
        try:
            return Judged(self, self.judge(observation))
        except CannotJudge as reason:
            return Judged(self, Unknown(str(reason)))


@dataclass(frozen=True, slots=True)
class Judged:
    """A check and what it said."""

    check: Check
    outcome: Outcome

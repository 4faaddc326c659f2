"""What the sessions ask for: how long their contexts are, how many there are, how they pause.

Knows no engine and no hardware. Invariant: percentiles rise; all tokens of a turn, answer included, are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvsteward.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a recorded session. `pause_s` is the time until the session's next request."""

    session: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Contexts are prompt tokens of a turn at four percentiles; `sessions` are alive at once, pausing or not."""

    context_p50_tokens: int
    context_p90_tokens: int
    context_p95_tokens: int
    context_p99_tokens: int
    output_tokens: int = 1_024
    sessions: int = 1
    turns_per_minute: float = 1.0
    pause_s: float = 10.0
    reused_ratio: float = 0.9

    def __post_init__(self) -> None:
        marks = (self.context_p50_tokens, self.context_p90_tokens, self.context_p95_tokens, self.context_p99_tokens)
        if marks[0] < 1 or list(marks) != sorted(marks):
            raise ConfigError(f"context percentiles must rise from 1 token up, not {marks}")
        if self.sessions < 1 or self.output_tokens < 1:
            raise ConfigError("a workload needs a session and an output of 1 token or more")
        rates = (self.turns_per_minute, self.pause_s, self.reused_ratio)
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates) or self.reused_ratio > 1:
            raise ConfigError("turn rate and pauses must be 0 or more, the reused ratio between 0 and 1")

    @classmethod
    def from_turns(cls, turns: Iterable[Turn], *, sessions: int | None = None) -> Workload:
        """The workload of recorded turns. `sessions` alive at once defaults to the number of recorded ones."""
        listed = list(turns)
        if not listed:
            raise ConfigError("no turn was recorded")
        contexts = sorted(turn.input_tokens for turn in listed)
        outputs = sorted(turn.output_tokens for turn in listed)
        pauses = sorted(turn.pause_s for turn in listed)
        total = sum(contexts)
        pause = percentile(pauses, 50)
        return cls(
            context_p50_tokens=max(1, int(percentile(contexts, 50))),
            context_p90_tokens=max(1, int(percentile(contexts, 90))),
            context_p95_tokens=max(1, int(percentile(contexts, 95))),
            context_p99_tokens=max(1, int(percentile(contexts, 99))),
            output_tokens=max(1, int(percentile(outputs, 95))),
            sessions=sessions or len({turn.session for turn in listed}),
            turns_per_minute=60 / pause if pause else 60.0,
            pause_s=pause,
            reused_ratio=min(1.0, sum(turn.cached_tokens for turn in listed) / total) if total else 0.0,
        )

    @property
    def typical_tokens(self) -> int:
        """A session's tokens for sums over many sessions: the mean of the percentiles, weighted by their span.

        `0.5 p50 + 0.4 (p50 + p90) / 2 + 0.1 (p90 + p99) / 2`: above the true mean for the skewed lengths of agents.
        """
        middle = (self.context_p50_tokens + self.context_p90_tokens) / 2
        upper = (self.context_p90_tokens + self.context_p99_tokens) / 2
        return math.ceil(0.5 * self.context_p50_tokens + 0.4 * middle + 0.1 * upper) + self.output_tokens


def percentile(ordered: list[int] | list[float], percent: float) -> float:
    """The value at `percent` of a sorted list, by the nearest rank."""
    rank = max(0, math.ceil(percent / 100 * len(ordered)) - 1)
    return float(ordered[rank])

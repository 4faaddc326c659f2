"""What the sessions ask for: how long their contexts are, how many there are, how they pause.

Knows no engine and no hardware. Invariant: percentiles rise; all tokens of a turn, answer included, are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

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
    """Contexts are prompt tokens of a turn at four percentiles; `sessions` are alive at once, pausing or not.

    `turns_per_minute` is a session's; without it, it follows from the turn's length and `pause_s`. `reused_ratio` is
    the part of a prompt that the turn before already had.
    """

    context_p50_tokens: int
    context_p90_tokens: int
    context_p95_tokens: int
    context_p99_tokens: int
    output_tokens: int = 1_024
    sessions: int = 1
    turns_per_minute: float | None = None
    pause_s: float = 10.0
    reused_ratio: float = 0.9

    def __post_init__(self) -> None:
        marks = (self.context_p50_tokens, self.context_p90_tokens, self.context_p95_tokens, self.context_p99_tokens)
        if marks[0] < 1 or list(marks) != sorted(marks):
            raise ConfigError(f"context percentiles must rise from 1 token up, not {marks}")
        if self.sessions < 1 or self.output_tokens < 1:
            raise ConfigError("a workload needs a session and an output of 1 token or more")
        rates = (self.turns_per_minute or 0.0, self.pause_s, self.reused_ratio)
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
        return cls(
            context_p50_tokens=max(1, int(percentile(contexts, 50))),
            context_p90_tokens=max(1, int(percentile(contexts, 90))),
            context_p95_tokens=max(1, int(percentile(contexts, 95))),
            context_p99_tokens=max(1, int(percentile(contexts, 99))),
            output_tokens=max(1, int(percentile(outputs, 95))),
            sessions=sessions or len({turn.session for turn in listed}),
            pause_s=percentile(pauses, 50),
            reused_ratio=min(1.0, sum(turn.cached_tokens for turn in listed) / total) if total else 0.0,
        )

    def capped(self, limit_tokens: int) -> Workload:
        """The same sessions, none longer than `limit_tokens` with its answer: what compaction at that mark leaves."""
        most = max(1, limit_tokens - self.output_tokens)
        return replace(
            self,
            context_p50_tokens=min(most, self.context_p50_tokens),
            context_p90_tokens=min(most, self.context_p90_tokens),
            context_p95_tokens=min(most, self.context_p95_tokens),
            context_p99_tokens=min(most, self.context_p99_tokens),
        )

    def running(self, service_s: float) -> float:
        """Sessions in a turn at the same time, by Little's law: sessions x turns a second x seconds a turn."""
        if self.turns_per_minute is None:
            cycle = service_s + self.pause_s
            return self.sessions * service_s / cycle if cycle else float(self.sessions)
        return min(float(self.sessions), self.sessions * self.turns_per_minute / 60 * service_s)

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

"""What a demonstration found, and how it is printed: one JSON object, or a table.

Pure. Invariant: the JSON object's keys are stable; figures that were not measured are null, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from rich.table import Table

from kvsteward.wire.usage import Usage


@dataclass(frozen=True, slots=True)
class TurnCost:
    """One completed turn."""

    turn: int
    usage: Usage
    ttft_s: float | None


@dataclass(slots=True)
class Pass:
    """One mode's run. Mutable while it lasts."""

    completed: list[TurnCost] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def max_resident_tokens(self) -> int | None:
        return max((cost.usage.resident_tokens for cost in self.completed), default=None)

    @property
    def prompt_tokens(self) -> int:
        return sum(cost.usage.prompt_tokens for cost in self.completed)

    @property
    def cached_tokens(self) -> int:
        return sum(cost.usage.cached_tokens for cost in self.completed)

    def ttft_ms(self, percent: int) -> float | None:
        """A percentile of the times to the first token."""
        times = [cost.ttft_s * 1000 for cost in self.completed if cost.ttft_s is not None]
        if len(times) < 2:
            return round(times[0], 1) if times else None
        return round(quantiles(times, n=100, method="inclusive")[percent - 1], 1)


@dataclass(slots=True)
class Facts:
    """How many values that a later turn uses again the model could still have. Mutable while the run lasts."""

    probed: int = 0
    in_view: int = 0
    recallable: int = 0
    lost: int = 0
    by_kind: dict[str, list[int]] = field(default_factory=dict)
    """Kind -> [probed, in view]."""

    def count(self, kind: str, where: str) -> None:
        """`where` is "in_view", "recallable" or "lost"."""
        self.probed += 1
        setattr(self, where, getattr(self, where) + 1)
        row = self.by_kind.setdefault(kind, [0, 0])
        row[0] += 1
        row[1] += where == "in_view"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both runs of one session."""

    source: str
    turns: int
    budget_tokens: int
    passthrough: Pass
    managed: Pass
    compactions: int
    log_tokens: int
    facts: Facts
    again_tokens: int = 0
    """Prefilled again because compactions changed the prompt."""
    summaries: Mapping[str, int] = field(default_factory=dict)
    """What became of the engine's summaries: outcome -> how often."""

    def as_json(self) -> dict[str, Any]:
        through, managed, facts = self.passthrough, self.managed, self.facts
        prompt, cached = managed.prompt_tokens, managed.cached_tokens
        return {
            "source": self.source,
            "turns": self.turns,
            "budget_tokens": self.budget_tokens,
            "passthrough": {
                "completed_turns": len(through.completed),
                "error": through.errors[0] if through.errors else None,
                "max_resident_tokens": through.max_resident_tokens,
                "wall_s": round(through.wall_s, 1),
            },
            "managed": {
                "completed_turns": len(managed.completed),
                "interruptions": len(managed.errors),
                "errors": managed.errors[:5],
                "max_resident_tokens": managed.max_resident_tokens,
                "compactions": self.compactions,
                "compaction_prefill_tokens": self.again_tokens,
                "summaries": dict(self.summaries),
                "prompt_tokens": prompt,
                "cached_tokens": cached,
                "cached_ratio": round(cached / prompt, 4) if prompt else None,
                "log_tokens": self.log_tokens,
                "ttft_ms_p50": managed.ttft_ms(50),
                "ttft_ms_p95": managed.ttft_ms(95),
                "wall_s": round(managed.wall_s, 1),
            },
            "facts": {
                "probed": facts.probed,
                "in_view": facts.in_view,
                "recallable": facts.recallable,
                "lost": facts.lost,
                "in_view_ratio": round(facts.in_view / facts.probed, 4) if facts.probed else None,
                "by_kind": {k: {"probed": a, "in_view": b} for k, (a, b) in sorted(facts.by_kind.items())},
            },
        }

    def table(self) -> Table:
        table = Table(title=f"{self.turns} turns ({self.source}), budget {self.budget_tokens:,} tokens")
        for name in ("", "passed through", "managed"):
            table.add_column(name, justify="left" if not name else "right")
        for row in self._rows():
            table.add_row(*row)
        return table

    def _rows(self) -> Sequence[tuple[str, str, str]]:
        modes, facts = (self.passthrough, self.managed), self.facts

        def row(name: str, *values: object) -> tuple[str, str, str]:
            first, second = (f"{v:,}" if isinstance(v, int) else "-" if v is None else str(v) for v in values)
            return name, first, second

        return [
            row("turns completed", *(len(m.completed) for m in modes)),
            row("interruptions", *(len(m.errors) for m in modes)),
            row("largest number of resident tokens", *(m.max_resident_tokens for m in modes)),
            row("prompt tokens", *(m.prompt_tokens for m in modes)),
            row("of them found in the engine's cache", *(m.cached_tokens for m in modes)),
            row("time to first token, p50 / ms", *(m.ttft_ms(50) for m in modes)),
            row("time to first token, p95 / ms", *(m.ttft_ms(95) for m in modes)),
            row("compactions", None, self.compactions),
            row("tokens that compactions had prefilled again", None, self.again_tokens),
            row("summaries by the engine", None, ", ".join(f"{n} {o}" for o, n in sorted(self.summaries.items())) or 0),
            row("tokens in the log", None, self.log_tokens),
            row("facts used again: in view", None, f"{facts.in_view} of {facts.probed}"),
            row("facts used again: recallable by hash", None, facts.recallable),
            row("facts used again: lost", None, facts.lost),
        ]

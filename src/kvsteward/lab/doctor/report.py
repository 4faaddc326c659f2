"""One diagnosis as plain data: what was seen, what each check said, and the verdict.

Knows no terminal. Invariant: `as_json` holds everything that the terminal shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsteward.lab.doctor.checks import CHECKS
from kvsteward.lab.doctor.finding import CannotJudge, Clear, Judged, Unknown
from kvsteward.lab.doctor.observation import Observation, median, or_none
from kvsteward.lab.doctor.verdict import Verdict, decide, findings


@dataclass(frozen=True, slots=True)
class Report:
    """A diagnosis. `notes` are what limits it: missed scrapes, broken figures, a restart."""

    observation: Observation
    judged: tuple[Judged, ...]
    verdict: Verdict
    notes: tuple[str, ...]
    sessions_tokens: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        o = self.observation
        return {
            "verdict": self.verdict.word,
            "why": self.verdict.why,
            "is_kv": self.verdict.is_kv,
            "engine": engine(o),
            "window_s": None if o.since_start else round(o.window_s, 2),
            "readings": len(o.readings),
            "snapshot": snapshot(o),
            "sessions": sessions(o, self.sessions_tokens),
            "memory": memory(o),
            "findings": [_found(judged) for judged, _ in findings(self.judged)],
            "clear": _said(self.judged, Clear),
            "unknown": _said(self.judged, Unknown),
            "notes": list(self.notes),
        }


def diagnose(observation: Observation, *, missed: int = 0, sessions_tokens: tuple[int, ...] = ()) -> Report:
    """Runs every check. Pure; never raises for figures that are missing."""
    judged = tuple(check.run(observation) for check in CHECKS)
    notes = _notes(observation, missed)
    return Report(observation, judged, decide(observation, judged), notes, sessions_tokens)


def engine(o: Observation) -> dict[str, Any]:
    """What the engine is."""
    s = o.setup
    return {
        "dialect": s.dialect,
        "version": s.version,
        "source": s.source,
        "gateway": s.gateway,
        "context_limit_tokens": s.context_limit_tokens,
        "kv_capacity_tokens": s.kv_capacity_tokens,
        "block_tokens": s.block_tokens,
        "max_running": s.max_running,
        "kv_dtype": s.kv_dtype,
        "kv_bytes_per_token": o.spec.kv_bytes_per_token() if o.spec is not None else None,
    }


def snapshot(o: Observation) -> dict[str, float | None]:
    """The figures of the cache over the window. None: not reported."""
    return {
        "kv_usage_ratio": or_none(lambda: median(o.seen("kv_usage_ratio"))),
        "kv_usage_most_ratio": or_none(lambda: max(o.seen("kv_usage_ratio"))),
        "running": or_none(lambda: median(o.seen("running"))),
        "waiting": or_none(lambda: median(o.seen("waiting"))),
        "waiting_most": or_none(lambda: max(o.seen("waiting"))),
        "preempted": or_none(lambda: o.count("preemptions_total")),
        "prefix_hit_ratio": or_none(lambda: o.hit_ratio()[0]),
        "prompt_tokens": or_none(lambda: o.count("prefix_queried_tokens_total")),
        "generated_tokens": or_none(lambda: o.risen("generation_tokens")),
        "evicted_tokens": or_none(lambda: o.risen("evicted_tokens")),
        "finished": or_none(lambda: o.risen("finished")),
    }


def sessions(o: Observation, sessions_tokens: tuple[int, ...]) -> dict[str, float | None]:
    """How long the prompts of the window were (upper bounds of buckets), or what the gateway's sessions hold."""
    if sessions_tokens:
        held = sorted(sessions_tokens)
        return {
            "resident": len(held),
            "tokens_mean": sum(held) / len(held),
            "tokens_half_up_to": held[(len(held) - 1) // 2],
            "tokens_longest": held[-1],
        }
    lengths = None
    try:
        lengths = o.histogram("prompt_lengths")
    except CannotJudge:
        return {}
    return {
        "requests": lengths.count,
        "tokens_mean": lengths.mean,
        "tokens_half_up_to": lengths.bound_of(0.5),
        "tokens_longest_up_to": _finite(lengths.bound_of(1.0)),
    }


def memory(o: Observation) -> dict[str, Any]:
    """The card and PyTorch's allocator, where they were seen."""
    found: dict[str, Any] = {}
    if o.readings[-1].gpus:
        found["gpus"] = [
            {"index": g.index, "name": g.name, "used_bytes": g.used_bytes, "total_bytes": g.total_bytes}
            for g in o.readings[-1].gpus
        ]
    if o.torch is not None:
        found["torch_reserved_bytes"] = o.torch.reserved_bytes
        found["torch_allocated_bytes"] = o.torch.allocated_bytes
    return found


def _notes(o: Observation, missed: int) -> tuple[str, ...]:
    notes = []
    if o.restarted:
        notes.append("the engine restarted inside the window: counts over the window are left out")
    if missed:
        notes.append(f"{missed} of {missed + len(o.readings)} scrapes failed")
    broken = sorted({name for reading in o.readings for name in reading.page.broken})
    if broken:
        more = f" and {len(broken) - 4} more" if len(broken) > 4 else ""
        notes.append(f"not a number, and left out: {', '.join(broken[:4])}{more}")
    if o.since_start:
        notes.append("one page only: counts are since the engine's start")
    if o.setup.gateway:
        notes.append("seen through the gateway: ask the engine's own URL for all checks")
    return tuple(notes)


def _found(judged: Judged) -> dict[str, Any]:
    _, finding = findings([judged])[0]
    return {
        "check": judged.check.name,
        "severity": finding.severity.name.lower(),
        "lever": finding.lever.value,
        "what": finding.what,
        "evidence": list(finding.evidence),
        "do": list(finding.do),
        "cost": finding.cost,
        "gain": finding.gain,
        "signal": judged.check.signal,
        "threshold": judged.check.threshold,
        "source": judged.check.source,
    }


def _said(judged: tuple[Judged, ...], kind: type[Clear] | type[Unknown]) -> dict[str, str]:
    return {one.check.name: one.outcome.why for one in judged if isinstance(one.outcome, kind)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and value != float("inf") else None

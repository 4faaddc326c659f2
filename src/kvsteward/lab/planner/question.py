"""What `kvsteward plan` was asked, and the workload that this means. Knows flags and traces, no model.

Invariant: what was not said and had to be taken for granted is noted in words.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvsteward.errors import ConfigError
from kvsteward.lab.planner.traces import read_trace
from kvsteward.ledger.plan import Turn, Workload

DEFAULT_OUTPUT_TOKENS = 1_024
DEFAULT_PAUSE_S = 10.0
_Z90, _Z95, _Z99 = 1.2816, 1.6449, 2.3263
_LARGEST = 10**9


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """The flags as given; None where one was not."""

    gpu: str | None = None
    gpu_gib: str | None = None
    context_p50_tokens: int | None = None
    context_p95_tokens: int | None = None
    output_tokens: int | None = None
    sessions: int | None = None
    turn_every_s: float | None = None
    pause_s: float | None = None
    trace: Path | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    engine: str = "vllm"
    kv: str = "auto"
    calibrate: Path | None = None
    load_as: str | None = None
    weights_gib: float | None = None

    def __post_init__(self) -> None:
        _check("--context-p50", self.context_p50_tokens, 1)
        _check("--context-p95", self.context_p95_tokens, 1)
        _check("--output", self.output_tokens, 1)
        _check("--sessions", self.sessions, 1)
        _check("--pause", self.pause_s, 0)
        _check("--weights-gib", self.weights_gib, 0.001)
        for name, value in (
            ("--turn-every", self.turn_every_s),
            ("--ttft-ms", self.ttft_ms),
            ("--tpot-ms", self.tpot_ms),
        ):
            _check(name, value, 0.001)


@dataclass(frozen=True, slots=True)
class Demand:
    """The workload, where it is from, and what was taken for granted."""

    workload: Workload
    source: str
    notes: tuple[str, ...] = ()


def demand(question: PlanQuestion) -> Demand:
    """The workload of a question. ConfigError if it says none, or two."""
    flags = question.context_p50_tokens is not None or question.context_p95_tokens is not None
    if question.trace is not None and flags:
        raise ConfigError("give a --trace or --context-p50 and --context-p95, not both")
    found = _recorded(question, question.trace) if question.trace is not None else _described(question)
    rate = None if question.turn_every_s is None else 60 / question.turn_every_s
    return replace(found, workload=replace(found.workload, turns_per_minute=rate))


def _recorded(question: PlanQuestion, path: Path) -> Demand:
    trace = read_trace(path)
    if trace.sessions is None and question.sessions is None:
        raise ConfigError(f"the {trace.kind} trace does not tell sessions apart", hint="Say how many: --sessions N.")
    notes = []
    sessions = question.sessions or trace.sessions
    if question.sessions is None:
        notes.append(f"all {sessions:,} recorded sessions are taken as alive at once; --sessions N says otherwise")
    load = Workload.from_turns(trace.turns, sessions=sessions)
    pauses = sorted(_pauses(trace.turns))
    pause = question.pause_s
    if pause is None:
        pause = pauses[len(pauses) // 2] if pauses else DEFAULT_PAUSE_S
        if not pauses:
            notes.append(f"the trace tells no pauses: {DEFAULT_PAUSE_S:g} s are assumed")
    load = replace(load, pause_s=pause, output_tokens=question.output_tokens or load.output_tokens)
    return Demand(load, f"{trace.kind} trace, {len(trace.turns):,} turns", tuple(notes))


def _pauses(turns: Sequence[Turn]) -> Iterator[float]:
    """The pauses inside sessions: a session's last turn has none."""
    for _session, group in itertools.groupby(turns, key=lambda turn: turn.session):
        yield from (turn.pause_s for turn in list(group)[:-1])


def _described(question: PlanQuestion) -> Demand:
    p50, p95 = question.context_p50_tokens, question.context_p95_tokens
    if p50 is None and p95 is None:
        raise ConfigError("how long are the sessions?", hint="Give --context-p95 (and --context-p50), or a --trace.")
    if p50 is not None and p95 is not None:
        marks, note = _skewed(p50, p95), "p90 and p99 by a log-normal through p50 and p95"
    else:
        marks, note = _growing(p95 / 0.95 if p95 is not None else (p50 or 0) / 0.5), _EVEN
    load = Workload(
        *marks,
        output_tokens=question.output_tokens or DEFAULT_OUTPUT_TOKENS,
        sessions=question.sessions or 1,
        pause_s=DEFAULT_PAUSE_S if question.pause_s is None else question.pause_s,
    )
    return Demand(load, "the flags", (note,))


_EVEN = "only one percentile was given: sessions are taken to grow evenly up to their longest"


def _growing(longest: float) -> tuple[int, int, int, int]:
    p50, p90, p95, p99 = (max(1, round(share * longest)) for share in (0.5, 0.9, 0.95, 0.99))
    return p50, p90, p95, p99


def _skewed(p50: int, p95: int) -> tuple[int, int, int, int]:
    if p95 < p50:
        raise ConfigError(f"--context-p95 ({p95:,}) is below --context-p50 ({p50:,})")
    spread = math.log(p95 / p50) / _Z95
    return (
        p50,
        max(p50, min(p95, round(p50 * math.exp(_Z90 * spread)))),
        p95,
        max(p95, round(p50 * math.exp(_Z99 * spread))),
    )


def _check(name: str, value: float | None, least: float) -> None:
    if value is not None and not (math.isfinite(value) and least <= value <= _LARGEST):
        raise ConfigError(f"{name} must be {least:g} or more, not {value}", param=name)

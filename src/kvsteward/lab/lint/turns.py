"""Traces that have no text, only lengths and blocks (WEKA's of coding agents): where a prompt leaves the earlier ones.

What changed cannot be said, only where and what it costs. Tokens are as recorded, to a block. Pure but for the reading,
which `lab.planner.traces` does. Invariant: a turn that goes on from all that its session had gives no finding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import orjson

from kvsteward.errors import ConfigError
from kvsteward.lab.lint.report import Finding, Report
from kvsteward.lab.planner.traces import Trace, read_trace
from kvsteward.lab.prompts import ADVICE
from kvsteward.ledger.plan import Turn

REWRITTEN = "a history that is rewritten (compaction)"
ANEW = "a prompt that begins anew"
_ADVICE = {
    REWRITTEN: ADVICE[REWRITTEN],
    ANEW: "the front changed, or another context began: record the requests' bodies to see which",
}
_SLACK_TOKENS = 2 * 64
"""The last block of a prompt is not whole, and an answer may be printed otherwise when it comes back."""
_FRONT_RATIO = 0.02


def is_trace(path: Path) -> bool:
    """True for a folder, a gzip file, or lines that are sessions or block ids in place of messages."""
    if path.is_dir() or path.suffix in {".gz", ".csv"}:
        return True
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")[: 1 << 24]
    except OSError:
        return False
    try:
        row = orjson.loads(first)
    except orjson.JSONDecodeError:
        return False
    return isinstance(row, dict) and "messages" not in row and ("requests" in row or "input_length" in row)


def lint_trace(path: Path) -> Report:
    """Findings of a trace. Raises ConfigError for one that does not tell sessions apart."""
    trace = read_trace(path)
    if trace.sessions is None:
        raise ConfigError(
            f"{path} is a {trace.kind} trace, which does not tell sessions apart",
            hint="Lint reads request bodies, recorded conversations, and WEKA traces.",
        )
    return lint_turns(trace)


def lint_turns(trace: Trace) -> Report:
    """Compares what each turn found of the earlier prompts with what the turn before had."""
    sessions: dict[str, list[Turn]] = {}
    for turn in trace.turns:
        sessions.setdefault(turn.session, []).append(turn)
    total = sum(turn.input_tokens for turn in trace.turns)
    found: dict[str, Finding] = {}
    followed = 0
    for session, turns in sessions.items():
        followed += len(turns) - 1
        for one in _breaks(session, turns):
            known = found.get(one.kind)
            found[one.kind] = one if known is None else _joined(known, one)
    findings = [_shared(one, total) for one in sorted(found.values(), key=lambda f: -f.lost_tokens)]
    lost = sum(one.lost_tokens for one in findings)
    return Report(len(trace.turns), len(sessions), followed, total, lost, tuple(findings))


def _breaks(session: str, turns: list[Turn]) -> Iterable[Finding]:
    for number, (before, now) in enumerate(pairwise(turns), 2):
        lost = min(before.input_tokens, now.input_tokens) - now.cached_tokens
        if lost <= _SLACK_TOKENS:
            continue
        kind = ANEW if now.cached_tokens <= _FRONT_RATIO * before.input_tokens else REWRITTEN
        was, became = f"{before.input_tokens:,} tokens", f"{now.input_tokens:,} tokens"
        yield Finding(
            kind, session, number, number, "prompt", 0, now.cached_tokens, was, became, 1, lost, 0.0, _ADVICE[kind], ""
        )


def _joined(known: Finding, one: Finding) -> Finding:
    return replace(known, times=known.times + 1, lost_tokens=known.lost_tokens + one.lost_tokens)


def _shared(one: Finding, total: int) -> Finding:
    return replace(one, lost_ratio=round(one.lost_tokens / total, 4) if total else 0.0)

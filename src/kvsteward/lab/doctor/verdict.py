"""From findings to one word: healthy, tune, quantise, split or scale, and to whether it is KV at all.

Invariant: the verdict is the lever of the worst finding, of equal ones the cheapest lever; no finding means healthy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsteward.lab.doctor.finding import CannotJudge, Finding, Judged, Lever, Unknown
from kvsteward.lab.doctor.observation import Observation, median, or_none

_ORDER = (Lever.TUNE, Lever.QUANTISE, Lever.SPLIT, Lever.SCALE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`word` is "healthy" or a lever; `why` is one sentence; `is_kv` says whether the cache is the problem."""

    word: str
    why: str
    is_kv: str


def findings(judged: Sequence[Judged]) -> list[tuple[Judged, Finding]]:
    """What was found, the worst first."""
    found = [(one, one.outcome) for one in judged if isinstance(one.outcome, Finding)]
    return sorted(found, key=lambda pair: -pair[1].severity)


def decide(observation: Observation, judged: Sequence[Judged]) -> Verdict:
    """The verdict of one window."""
    found = [finding for _, finding in findings(judged)]
    if not found:
        unknown = sum(isinstance(one.outcome, Unknown) for one in judged)
        why = f"none of {len(judged)} known causes was found; {unknown} could not be judged"
        return Verdict("healthy", _idle(observation) or why, is_kv(observation))
    worst = [finding for finding in found if finding.severity == found[0].severity]
    lever = min((finding.lever for finding in worst), key=_ORDER.index)
    first = next(finding for finding in worst if finding.lever is lever)
    return Verdict(lever.value, first.what, is_kv(observation))


def _idle(o: Observation) -> str | None:
    try:
        if max(o.seen("running")) == 0 and o.risen("generation_tokens") == 0:
            return "nothing ran in the window: only the settings and what the engine did before could be judged"
    except CannotJudge:
        return None
    return None


def is_kv(o: Observation) -> str:
    """Step one: is the cache under pressure at all."""
    signs = []
    try:
        usage = median(o.seen("kv_usage_ratio"))
        signs.append(f"usage {usage:.0%}")
    except CannotJudge:
        usage = None
    waiting = or_none(lambda: max(o.seen("waiting")))
    preempted = or_none(lambda: o.count("preemptions_total"))
    if waiting is not None:
        signs.append(f"{waiting:.0f} waiting")
    if preempted is not None:
        signs.append(f"{preempted:,.0f} preempted")
    told = ", ".join(signs) or "no figure of it is reported"
    if preempted or (usage is not None and usage >= 0.9):
        return f"yes: {told}"
    if waiting and usage is None:
        return f"perhaps: {told}"
    return f"no pressure on the pool: {told}"

"""Short requests wait behind one long prompt: most first tokens are quick, some are very late."""

from __future__ import annotations

import math

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation, tokens

_REQUESTS = 8
_LONGER = 8
_LATER = 8
_LEAST_S = 1.0
_FULL = 0.9


def judge(o: Observation) -> Finding | Clear:
    prompts, first = o.histogram("prompt_lengths"), o.histogram("first_token_s")
    if prompts.count < _REQUESTS or first.count < _REQUESTS:
        raise CannotJudge(f"only {min(prompts.count, first.count):.0f} requests in the window")
    usual, longest = prompts.bound_of(0.5) or 0.0, prompts.bound_of(1.0) or 0.0
    if longest < _LONGER * usual:
        return Clear(f"prompts are of a kind: half up to {tokens(usual)} tokens, the longest up to {tokens(longest)}")
    if max(o.seen("kv_usage_ratio")) >= _FULL:
        return Clear("the pool is full, which is another finding")
    late = _gaps(o) or _late(first.bound_of(0.5), first.bound_of(0.9))
    waited = max(o.seen("waiting")) > 0 or max(o.seen("running")) > 1
    if late is None or not waited:
        return Clear("short requests are not held up")
    evidence = (f"half of the prompts have up to {tokens(usual)} tokens, the longest up to {tokens(longest)}", late)
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        "one long prompt holds up the short requests",
        evidence,
        _remedies(o),
        "first tokens and gaps as long as the long prefill, for everybody",
        "in one report first tokens came after 1.09 s instead of 18.00 s",
    )


def _late(usual: float | None, worst: float | None) -> str | None:
    if not usual or worst is None or worst < max(_LEAST_S, _LATER * usual):
        return None
    more = f"{worst:g} s" if math.isfinite(worst) else "far more"
    return f"half of the first tokens came within {usual:g} s, one in ten took up to {more}"


def _gaps(o: Observation) -> str | None:
    try:
        gaps = o.histogram("token_gap_s")
    except CannotJudge:
        return None
    usual, worst = gaps.bound_of(0.5), gaps.bound_of(0.99)
    if not usual or worst is None or worst < max(_LEAST_S, _LATER * usual):
        return None
    more = f"{worst:g} s" if math.isfinite(worst) else "far more"
    return f"half of the gaps between tokens are under {usual:g} s, one in a hundred up to {more}"


def _remedies(o: Observation) -> tuple[str, ...]:
    wanted = ((Knob.LONG_PREFILL, 2048), (Knob.CHUNK_TOKENS, 2048 if o.setup.dialect == "sglang" else 256))
    return (*o.changes(*wanted), "send long batch prompts to a replica of their own")


CHECK = Check(
    "long-prompt",
    "the longest prompt far above the usual one, and late first tokens or gaps while usage is below 90 %",
    "8 times as long, 8 times as late and over 1 s (no source states one)",
    "club-3090 PR#712; vllm#21495, vllm#21674; sglang#34623",
    judge,
)

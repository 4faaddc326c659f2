"""The pool looks free and is not: usage counts only what running requests hold, idle prefixes fill the rest."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation

_LOOKS_FREE = 0.5
_FULL = 0.9


def judge(o: Observation) -> Finding | Clear:
    usage = max(o.seen("kv_usage_ratio"))
    resident, capacity = _resident(o)
    if capacity <= 0:
        raise CannotJudge("the size of the pool is reported as 0")
    full = resident / capacity
    if usage >= _LOOKS_FREE or full < _FULL:
        return Clear(f"usage {usage:.0%}, with idle prefixes {full:.0%}")
    return Finding(
        Severity.ADVICE,
        Lever.TUNE,
        "the pool looks free and is full of idle prefixes: the next sessions push them out",
        (
            f"usage reads {usage:.0%}: it counts running requests only",
            f"{resident:,.0f} of {capacity:,.0f} tokens are held with idle prefixes ({full:.0%})",
        ),
        (
            "do not plan by the usage figure; count sessions x their context against the pool",
            *o.changes((Knob.OFFLOAD_SIZE, "16")),
        ),
        "sessions that pause lose their cache without a sign in the usage figure",
        "evicted prefixes are loaded again instead of computed",
    )


def _resident(o: Observation) -> tuple[float, float]:
    capacity = o.setup.kv_capacity_tokens or o.level("capacity_tokens")
    used = o.level("used_tokens")
    if o.setup.gateway:
        return used, float(capacity)
    return used + o.level("evictable_tokens"), float(capacity)


CHECK = Check(
    "idle-prefixes",
    "used + evictable tokens (SGLang), or the gateway's account of its sessions, against the usage figure",
    "90 % held while usage reads under 50 % (no source states one)",
    "vllm#5176: kv_cache_usage_perc counts blocks of running requests only",
    judge,
)

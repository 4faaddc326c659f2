"""Sessions push each other's prefixes out of the pool between two turns, without a single preemption.

The usage figure stays low all the while, because blocks of idle sessions do not count as used.
"""

from __future__ import annotations

from kvsteward.lab.doctor.finding import Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation, or_none

_LOW_HITS = 0.5
_FELL_TO = 0.5
_EVICTED_SHARE = 0.5
_REQUESTS = 6


def judge(o: Observation) -> Finding | Clear:
    ratio, queried = o.hit_ratio()
    if ratio >= _LOW_HITS:
        return Clear(f"{ratio:.0%} of the prompt tokens were found in the cache")
    evidence = _evicted(o, ratio, queried) or _fell(o, ratio)
    if evidence is None:
        return Clear("no sign that prefixes are pushed out")
    usage = max(o.seen("kv_usage_ratio"))
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        "sessions push each other's prefixes out of the pool: their next turn computes them again",
        (*evidence, f"KV usage reads {usage:.0%}: idle prefixes are not counted in it"),
        (
            *o.changes((Knob.MAX_RUNNING, max(1, int(max(o.seen("running"))) // 2))),
            *o.changes((Knob.OFFLOAD_SIZE, "16"), (Knob.HOST_CACHE, 8192)),
            "kvsteward serve in front: it keeps each session inside a budget and admits what fits",
        ),
        "prefill of histories that were in the cache a moment ago",
        "retention instead of plain LRU gave 51 % reuse where it was 16 %, and 2.3 times the speed",
    )


def _evicted(o: Observation, ratio: float, queried: float) -> tuple[str, ...] | None:
    """SGLang counts what it evicts: as much as what it computes anew means that the pool is turning over."""
    evicted = or_none(lambda: o.risen("evicted_tokens"))
    computed = queried * (1 - ratio)
    if not evicted or evicted < _EVICTED_SHARE * computed:
        return None
    return (f"{evicted:,.0f} tokens evicted while {computed:,.0f} were computed; {ratio:.0%} found in the cache",)


def _fell(o: Observation, ratio: float) -> tuple[str, ...] | None:
    """Elsewhere: the hit ratio fell to half of what it was before the window, and the pool has been filled since."""
    first = o.readings[0].page.load
    queried, hits = first.prefix_queried_tokens_total, first.prefix_hit_tokens_total
    capacity = o.setup.kv_capacity_tokens
    if o.since_start or not queried or hits is None or capacity is None or queried < capacity:
        return None
    before = hits / queried
    if (
        before < _LOW_HITS
        or ratio > _FELL_TO * before
        or (or_none(lambda: o.histogram("prompt_lengths").count) or 0) < _REQUESTS
    ):
        return None
    return (f"{ratio:.0%} of the prompt tokens found in the cache; before the window it was {before:.0%}",)


CHECK = Check(
    "prefix-thrash",
    "evicted tokens keep pace with computed ones; or the hit ratio falls while preemptions stay 0",
    "hits under 50 % and evictions over half of what is computed; or hits at half of their earlier share",
    "vllm#48435, vllm#43447, vllm#52216; a ratio that fell from 63.8 % to 23.2 % in one report",
    judge,
)

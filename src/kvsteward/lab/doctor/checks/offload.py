"""Loading KV from the offload tier takes longer than computing it again would."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation

_ENOUGH_TOKENS = 1024


def judge(o: Observation) -> Finding | Clear:
    loaded = o.risen("offload_tokens")
    if loaded <= 0:
        return Clear("nothing was loaded from an offload tier")
    if loaded < _ENOUGH_TOKENS:
        raise CannotJudge(f"only {loaded:,.0f} tokens were loaded from the tier in the window")
    seconds = o.risen("offload_seconds")
    computed, spent = _computed(o)
    if seconds <= 0 or computed < _ENOUGH_TOKENS or spent <= 0:
        raise CannotJudge("too little was loaded or computed in the window to compare the two")
    load_rate, compute_rate = loaded / seconds, computed / spent
    if load_rate >= compute_rate:
        return Clear(f"the tier loads {load_rate:,.0f} tokens/s, prefill computes {compute_rate:,.0f}")
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        "the offload tier is slower than computing the tokens again",
        (f"it loads {load_rate:,.0f} tokens/s; prefill computes {compute_rate:,.0f} tokens/s",),
        (
            *o.changes((Knob.OFFLOAD_IO, "kernel")),
            "a faster tier (host memory in place of disk or network), or none",
        ),
        f"{loaded * (1 / load_rate - 1 / compute_rate):,.1f} s of waiting in the window",
        "first tokens of returning sessions come sooner",
    )


def _computed(o: Observation) -> tuple[float, float]:
    """Prefilled tokens and seconds. For SGLang the seconds are those to the first token, an upper bound."""
    if o.metrics.compute_seconds:
        return o.risen("computed_tokens"), o.risen("compute_seconds")
    first = o.histogram("first_token_s")
    return o.risen("prompt_tokens") - o.count("prefix_hit_tokens_total"), first.total


CHECK = Check(
    "offload-slow",
    "tokens per second loaded from the tier against those that prefill computes",
    "slower, over 1,024 tokens of each",
    "vllm kv_connector offloading metrics; SGLang HiCache metrics (load_back)",
    judge,
)

"""The context limit is far above what requests use.

In llama-server each slot reserves it. Elsewhere it sizes worst cases (profiling, scheduling, state) and lets one
runaway request take the pool.
"""

from __future__ import annotations

import math

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation

_TIMES = 8
_REQUESTS = 10
_ROOM = 2
_STEP = 1024


def judge(o: Observation) -> Finding | Clear:
    limit = o.known(o.setup.context_limit_tokens, "the context limit")
    longest = _longest(o)
    if limit < _TIMES * longest:
        return Clear(f"a limit of {limit:,} tokens, of which up to {longest:,.0f} are used")
    enough = -(-_ROOM * int(longest) // _STEP) * _STEP
    slots = o.setup.max_running if o.setup.dialect == "llama-server" else None
    evidence = [f"context limit {limit:,} tokens; no request so far was longer than {longest:,.0f}"]
    gain = "a runaway request ends early instead of taking the pool; the worst case that must fit at start is smaller"
    if slots:
        evidence.append(f"{slots} slots reserve {slots * limit:,} tokens")
        gain = f"{slots * (limit - enough):,} tokens of KV memory are free for other use"
    elif o.setup.kv_capacity_tokens:
        evidence.append(f"the pool holds {o.setup.kv_capacity_tokens / limit:.1f} requests of that length")
    return Finding(
        Severity.ADVICE,
        Lever.TUNE,
        "the context limit is far above what requests use",
        tuple(evidence),
        o.changes((Knob.CONTEXT, enough * (slots or 1))),
        "reserved memory" if slots else "room for runaways and an inflated worst case",
        gain,
    )


def _longest(o: Observation) -> float:
    """The longest prompt + answer since the engine's start, from above. Raises CannotJudge."""
    if o.metrics.longest_tokens:
        longest = o.level("longest_tokens")
        seen = sum(v or 0.0 for v in (o.last.value(o.metrics.prompt_tokens), o.last.value(o.metrics.generation_tokens)))
        hits = o.last.load.prefix_hit_tokens_total or 0
        if longest <= 0 or seen + hits < 3 * longest:
            raise CannotJudge("too few requests so far")
        return longest
    prompts = o.lifetime("prompt_lengths")
    if prompts.count < _REQUESTS:
        raise CannotJudge(f"only {prompts.count:.0f} requests so far")
    longest = (prompts.bound_of(1.0) or 0.0) + (o.lifetime("answer_lengths").bound_of(1.0) or 0.0)
    if math.isinf(longest):
        raise CannotJudge("the longest request is beyond the last bucket of the engine's histogram")
    return longest


CHECK = Check(
    "context-limit",
    "the context limit against the longest prompt + answer since the start",
    "8 times as high, over 10 requests or more (no source states one)",
    "vllm#16118, vllm#44376; eugr/spark-vllm-docker#396; llama.cpp#23652",
    judge,
)

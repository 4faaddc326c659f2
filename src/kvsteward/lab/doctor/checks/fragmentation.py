"""Short, ragged sequences in large blocks: half a block of each is lost to rounding."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation

_WASTE = 0.15
_TIGHT = 0.7
_REQUESTS = 10


def judge(o: Observation) -> Finding | Clear:
    if o.setup.dialect == "llama-server":
        raise CannotJudge("llama-server has no blocks; see context-limit for slots that reserve too much")
    block = o.known(o.setup.block_tokens, "the block size")
    usage = max(o.seen("kv_usage_ratio"))
    if usage < _TIGHT:
        return Clear(f"the pool has room (usage {usage:.0%}), so rounding does no harm")
    prompts = o.lifetime("prompt_lengths")
    if prompts.count < _REQUESTS:
        raise CannotJudge(f"only {prompts.count:.0f} requests so far")
    mean = (prompts.mean or 0.0) + (o.lifetime("answer_lengths").mean or 0.0)
    lost = (block / 2) / (mean + block / 2)
    if block == 1 or lost < _WASTE:
        return Clear(f"rounding to blocks of {block} loses about {lost:.0%}")
    return Finding(
        Severity.ADVICE,
        Lever.TUNE,
        "blocks are large for such short requests: rounding loses a part of the pool",
        (
            f"blocks of {block} tokens, {mean:,.0f} tokens a request on average",
            f"about {lost:.0%} of the pool is padding",
        ),
        o.changes((Knob.BLOCK, 16 if o.setup.dialect == "vllm" else 1)),
        f"{lost:.0%} of the pool",
        "that part holds tokens",
    )


CHECK = Check(
    "fragmentation",
    "half a block per request against its mean length, while the pool is tight",
    "15 % lost at a usage of 70 % or more (no source states one)",
    "PagedAttention paper (arXiv 2309.06180), section 4: internal fragmentation",
    judge,
)

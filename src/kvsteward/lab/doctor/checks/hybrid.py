"""A model with recurrent or windowed layers, whose past cannot be found again: each turn is computed from its start."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation
from kvsteward.ledger import Kind

_LOW = 0.1
_ENOUGH_TOKENS = 2048


def judge(o: Observation) -> Finding | Clear:
    kind = _kind(o)
    if kind is None:
        return Clear("all layers keep their whole past")
    off = o.setup.state_mode == "none" or o.flag(Knob.STATE_MODE) == "none"
    evidence = [f"the model has {kind} layers"]
    if off:
        evidence.append("mamba_cache_mode is none: states are not kept for reuse")
    else:
        ratio, queried = o.hit_ratio()
        if ratio >= _LOW:
            return Clear(f"{kind} layers, and {ratio:.0%} of the prompt tokens were found in the cache")
        if queried < _ENOUGH_TOKENS:
            raise CannotJudge("too few prompts in the window to tell")
        evidence.append(f"{ratio:.1%} of {queried:,.0f} prompt tokens found in the cache")
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        "a hybrid model without reuse: each turn is computed from its start",
        tuple(evidence),
        _remedies(o, kind),
        "the whole history is prefilled each turn, whatever is cached for the other layers",
        "turns prefill only what is new, at the price of some state copies",
    )


def _kind(o: Observation) -> str | None:
    """The sort of layer that cannot go back; None for a plain model. Raises CannotJudge if nothing tells."""
    if o.setup.state_mode is not None or o.last.value(o.metrics.state_usage):
        return "recurrent"
    if o.spec is None:
        if o.setup.dialect == "vllm" and o.last.labels("vllm:cache_config_info").get("mamba_block_size") == "None":
            return None
        raise CannotJudge("the model's layers are not known; give its config with --config")
    if o.spec.state_bytes() > 0:
        return "recurrent"
    windowed = o.spec.count(Kind.SLIDING) + o.spec.count(Kind.CHUNKED)
    return "sliding-window" if windowed and o.setup.dialect == "llama-server" else None


def _remedies(o: Observation, kind: str) -> tuple[str, ...]:
    if o.setup.dialect == "llama-server":
        flags = ((Knob.FULL_WINDOW, None),) if kind == "sliding-window" else ((Knob.CHECKPOINTS, 32),)
        return (*o.changes(*flags), "keep the front of the prompt as it is; do not branch")
    if o.setup.dialect == "sglang":
        return (f"remove {o.change(Knob.PREFIX_OFF)}", *o.changes((Knob.STATE_RATIO, 1.5)))
    return o.changes((Knob.STATE_MODE, "align"))


CHECK = Check(
    "hybrid-no-reuse",
    "recurrent or windowed layers, and state caching off or hits near 0",
    "mode none, or under 10 % of 2,048 tokens",
    "llama.cpp#13194, llama.cpp#21831, llama.cpp#22940; vllm#54458",
    judge,
)

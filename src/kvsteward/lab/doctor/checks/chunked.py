"""Chunked prefill is off: a long prompt stops every other request until it is computed."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation


def judge(o: Observation) -> Finding | Clear:
    if o.setup.dialect == "llama-server":
        return Clear("llama-server always prefills in batches of --batch-size")
    on = _is_on(o)
    if o.known(on, "whether prefill is chunked"):
        return Clear("prefill is chunked")
    off = o.change(Knob.CHUNKED_OFF)
    do = (*o.changes((Knob.CHUNKED_ON, None)), f"remove {off}") if off else o.changes((Knob.CHUNK_TOKENS, 4096))
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        "chunked prefill is off: one long prompt stops all others while it is computed",
        ("the engine's settings say so" if o.setup.chunked_prefill is False else "--flags says so",),
        do,
        "gaps in every stream as long as the longest prefill",
        "decoding goes on between the chunks",
    )


def _is_on(o: Observation) -> bool | None:
    if o.flag(Knob.CHUNKED_OFF) is not None:
        return False
    size = o.flag(Knob.CHUNK_TOKENS)
    if size is not None:
        return size.strip() != "-1"
    if o.setup.chunked_prefill is not None:
        return o.setup.chunked_prefill
    return True if o.flags_given else None  # it is the default of vLLM (V1) and SGLang


CHECK = Check(
    "chunked-prefill",
    "the engine's settings or its command line",
    "off",
    "docs.vllm.ai/en/stable/configuration/optimization (chunked prefill)",
    judge,
)

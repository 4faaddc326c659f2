"""Prefix caching is switched off, so that each turn of an agent computes its whole history again."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation, or_none

_ENOUGH_TOKENS = 1024


def judge(o: Observation) -> Finding | Clear:
    evidence = _says_so(o) or _shows_so(o)
    if evidence is None:
        return Clear("prefix caching is on")
    busy = or_none(lambda: o.risen("prompt_tokens"))
    if busy:
        evidence += f"; {busy:,.0f} prompt tokens came in the window and none was looked up"
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        "prefix caching is off: every turn computes its whole history again",
        (evidence,),
        _remedies(o),
        "an agent of n turns prefills about n / 2 times its final history",
        "turns prefill only what is new; time to first token falls with the length of the history",
    )


def _says_so(o: Observation) -> str | None:
    if o.flag(Knob.PREFIX_OFF) is not None:
        return f"--flags has {o.change(Knob.PREFIX_OFF)}"
    if o.setup.prefix_caching is False:
        return "the engine itself reports that prefix caching is off"
    return None


def _shows_so(o: Observation) -> str | None:
    """For engines that do not say: prompts came, and the cache was never asked (vLLM) or never had any (llama.cpp)."""
    if o.setup.prefix_caching is True or o.flag(Knob.PREFIX_ON) is not None:
        return None
    if o.setup.dialect != "vllm":
        raise CannotJudge("the engine does not report whether prefix caching is on and --flags does not say")
    prompted, queried = o.risen("prompt_tokens"), o.count("prefix_queried_tokens_total")
    if prompted < _ENOUGH_TOKENS:
        raise CannotJudge("too few prompts came in the window to tell")
    return "prompts come and the prefix cache is never asked" if queried == 0 else None


def _remedies(o: Observation) -> tuple[str, ...]:
    lines = o.changes((Knob.PREFIX_ON, None))
    off = o.change(Knob.PREFIX_OFF)
    return (*lines, f"remove {off}") if off is not None else lines


CHECK = Check(
    "prefix-off",
    "the engine's own settings, or prompt tokens that rise while prefix_cache_queries stays 0",
    "1,024 prompt tokens without a query",
    "docs.vllm.ai/en/stable/features/automatic_prefix_caching",
    judge,
)

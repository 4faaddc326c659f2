"""Prefix caching is on and finds next to nothing: something at the front of the prompt changes every turn.

Metrics alone cannot tell an edited front from prompts that have nothing in common; requests from --requests can, and
then the place and the kind of the change are named.
"""

from __future__ import annotations

from collections import Counter

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.observation import Observation
from kvsteward.lab.prompts import ADVICE, Break, PromptReport

_NEAR_NOTHING = 0.1
_REQUESTS = 6
_BLOCKS = 2
_DEFAULT_BLOCK = 16
_EARLY = 0.5
_BROKEN_SHARE = 0.2

_KVSTEWARD = "kvsteward serve in front: it keeps what was sent append-only and normalises such lines"


def judge(o: Observation) -> Finding | Clear:
    if o.setup.prefix_caching is False:
        return Clear("prefix caching is off, which is another finding")
    if o.prompts is not None and o.prompts.followed:
        return _from_requests(o, o.prompts)
    ratio, queried = o.hit_ratio()
    if ratio >= _NEAR_NOTHING:
        return Clear(f"{ratio:.0%} of the prompt tokens were found in the cache")
    count, mean = _arrived(o, queried)
    block = o.setup.block_tokens or _DEFAULT_BLOCK
    if count < _REQUESTS:
        raise CannotJudge(f"only {count:.0f} requests in the window: the first of each session finds nothing")
    if mean < _BLOCKS * block:
        return Clear(f"prompts of {mean:,.0f} tokens are too short for blocks of {block}")
    evidence = (
        f"{ratio:.1%} of {queried:,.0f} prompt tokens found in the cache",
        f"{count:,.0f} requests of {mean:,.0f} tokens on average: long enough to share blocks of {block}",
    )
    advice = ("give some requests with --requests FILE.jsonl: the first differing character is shown", _KVSTEWARD)
    return _finding("the prefix cache finds almost nothing: the front of the prompts changes", evidence, advice)


def _arrived(o: Observation, queried: float) -> tuple[float, float]:
    """Requests of the window and their mean prompt. Slots count what a server without histograms does not."""
    try:
        lengths = o.histogram("prompt_lengths")
        return lengths.count, queried / lengths.count
    except CannotJudge:
        tasks = {s.task for r in o.readings for s in r.slots or () if s.task is not None and s.prompt_tokens}
        if not tasks:
            raise
        return float(len(tasks)), queried / len(tasks)


def _from_requests(o: Observation, prompts: PromptReport) -> Finding | Clear:
    early = [found for found in prompts.breaks if found.reusable_ratio < _EARLY]
    if len(early) < max(1, _BROKEN_SHARE * prompts.followed):
        return Clear(f"{prompts.followed - len(early)} of {prompts.followed} requests go on from their predecessor")
    kind, times = Counter(found.kind for found in early).most_common(1)[0]
    first = next(found for found in early if found.kind == kind)
    evidence = [
        f"{len(early)} of {prompts.followed} follow-up requests change an early part; {times} times it is {kind}",
        _shown(first),
    ]
    try:
        evidence.append(f"{o.hit_ratio()[0]:.1%} of the prompt tokens of the window were found in the cache")
    except CannotJudge:
        evidence.append("the engine itself was not asked for prefixes in the window")
    return _finding(
        f"{kind} at the front of the prompt breaks the prefix cache", tuple(evidence), (ADVICE[kind], _KVSTEWARD)
    )


def _shown(found: Break) -> str:
    where = f"request {found.request + 1}, {found.part}, character {found.position}"
    return f"{where}: {found.before!r} became {found.after!r}; {found.reusable_ratio:.0%} of the prompt stays reusable"


def _finding(what: str, evidence: tuple[str, ...], advice: tuple[str, ...]) -> Finding:
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        what,
        evidence,
        advice,
        "each turn prefills its whole history; time to first token grows with it",
        "as reported for one such line: 50 s to 3.65 s for the first token",
    )


CHECK = Check(
    "prefix-broken",
    "prefix_cache_hits / queries near 0 though prompts are long; or the first differing character of given requests",
    "under 10 % over 6 requests of 2 blocks or more",
    "vllm PR#36829; ollama PR#14918; vllm-mlx PR#277; claude-code-router#1220",
    judge,
)

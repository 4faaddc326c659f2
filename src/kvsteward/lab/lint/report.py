"""From recorded requests to findings: what breaks the prefix, where, how often, at what cost, and what mends it.

Pure. Tokens are estimates (`context.tokens`). A break costs what the engine must compute again although it had it: the
tokens of the earlier prompt after the place where the two differ, as far as the new prompt is that long. Invariant:
requests that only grow give no finding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson

from kvsteward.context.hygiene import volatile
from kvsteward.context.tokens import MESSAGE_OVERHEAD_TOKENS, Estimator
from kvsteward.lab.lint.read import Recorded
from kvsteward.lab.prompts import ADVICE, Break, Prompt, compare_prompts, parts_of

OPTION = "an option that changes the prompt"
FIELD = "a field that no template prints"
_ADVICE = {
    **ADVICE,
    OPTION: "keep it the same for the whole session: each value is another prompt",
    FIELD: "harmless to the engine's cache; a router that hashes bodies may miss, so leave it out or keep it the same",
}
_MENDED = {
    "the order of the tools": "hygiene.tools",
    "the order of keys in the tools": "hygiene.tools",
    "call arguments written anew": "the fingerprint of the history: the first form stays",
    "an image that was encoded anew": "",
}
_SYSTEM = re.compile(r"message \d+ \((?:system|developer)\)")
_OPTIONS = ("model", "chat_template_kwargs", "chat_template", "reasoning_effort", "documents", "cache_salt")
_PRINTED = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "function_call"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of break in one place, as often as it happened. `request` (from 1, in its session), `character` and
    `token` are of the first time; lost tokens of all times."""

    kind: str
    session: str
    request: int
    line: int
    part: str
    character: int
    token: int
    before: str
    after: str
    times: int
    lost_tokens: int
    lost_ratio: float
    advice: str
    mended_by: str
    """What of `kvsteward serve` mends it, "" if nothing does; or a rule for a policy that would."""
    rule: str = ""
    """A rule for the `hygiene` of a policy, where none of the default ones finds the text."""
    behind: tuple[str, ...] = ()
    """What else changes in the same part, by the names of the hygiene rules that find it: it is next to break."""


@dataclass(frozen=True, slots=True)
class Report:
    """`followed`: requests that go on from an earlier one. Tokens are those of all prompts together. `left_out`: what
    was not read."""

    requests: int
    sessions: int
    followed: int
    prompt_tokens: int
    lost_tokens: int
    findings: tuple[Finding, ...]
    left_out: str = ""

    @property
    def lost_ratio(self) -> float:
        return self.lost_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "lost_ratio": round(self.lost_ratio, 4), "findings": [asdict(f) for f in self.findings]}


def lint(recorded: Sequence[Recorded], estimator: Estimator | None = None) -> Report:
    """Compares the requests of each session. Where no session is named, each request is compared with the earlier one
    that it has most in common with."""
    ruler = _Ruler(estimator or Estimator())
    groups: dict[str, list[Recorded]] = {}
    for one in recorded:
        groups.setdefault(one.session, []).append(one)
    breaks: list[tuple[str, str, int, Finding]] = []
    followed = total = 0
    for session, requests in groups.items():
        prompts = [parts_of(one.body) for one in requests]
        total += sum(ruler.prompt(prompt) for prompt in prompts)
        report = compare_prompts([one.body for one in requests], one_session=bool(session))
        followed += report.followed
        found = {one.request: one for one in report.breaks}
        for index in range(len(requests)):
            option = _option(requests, index) if session else None
            if option is not None:
                breaks.append(_optional(option, requests, prompts, index, session, ruler))
            elif index in found:
                breaks.append(_broken(found[index], requests, prompts, session, ruler))
        breaks += _fields(requests, session)
    grouped = _grouped(breaks, total)
    lost = sum(one.lost_tokens for one in grouped)
    return Report(len(recorded), len(groups), followed, total, lost, tuple(grouped))


class _Ruler:
    """Lengths of prompts in tokens, each text measured once."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._known: dict[str, int] = {}

    def text(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = self._estimator.text(text)
        return self._known[text]

    def prompt(self, prompt: Prompt) -> int:
        return sum(MESSAGE_OVERHEAD_TOKENS + self.text(text) for _, text in prompt)


def _broken(
    found: Break, requests: Sequence[Recorded], prompts: Sequence[Prompt], session: str, ruler: _Ruler
) -> tuple[str, str, int, Finding]:
    earlier, now = prompts[found.earlier], prompts[found.request]
    here = earlier[found.place]
    token = ruler.prompt(earlier[: found.place]) + (ruler.text(here[1][: found.position]) if found.position else 0)
    lost = max(0, min(ruler.prompt(earlier), ruler.prompt(now)) - token)
    mended, rule = _mend(found, here)
    after = now[found.place][1] if found.place < len(now) else ""
    behind = _behind(here[1], after, found.position) if _SYSTEM.match(found.part) else ()
    finding = Finding(
        found.kind, session, found.request + 1, requests[found.request].line, found.part, found.position, token,
        found.before, found.after, 1, lost, 0.0, _ADVICE[found.kind], mended, rule, behind,
    )  # fmt: skip
    return found.kind, found.part, lost, finding


def _behind(old: str, new: str, position: int) -> tuple[str, ...]:
    """The volatile texts after a position that are others in the new prompt."""
    still = {new[start:end] for start, end, _ in volatile(new)}
    spans = ((start, old[start:end], rule.name) for start, end, rule in volatile(old))
    return tuple(dict.fromkeys(name for start, text, name in spans if start > position and text not in still))


def _mend(found: Break, part: tuple[str, str]) -> tuple[str, str]:
    """What of the gateway mends a break; else a rule that would."""
    if found.kind in _MENDED:
        return _MENDED[found.kind], ""
    if found.kind.startswith("a history that is rewritten"):
        return "", ""
    if not (_SYSTEM.match(found.part) or found.part.startswith("tool ")):
        return "", ""
    text = part[1]
    for start, end, rule in volatile(text):
        if start <= found.position < end:
            return f"hygiene rule '{rule.name}'", ""
    if part[0] == "tools" or len(text) < 2:
        return "", ""
    start = text.rfind("\n", 0, found.position) + 1
    label = re.match(r"[^\d]{3,60}", text[start : found.position])
    if label is None:
        return "", ""
    return "", orjson.dumps({"name": "own", "match": "^" + re.escape(label.group().rstrip())}).decode()


def _option(requests: Sequence[Recorded], index: int) -> str | None:
    """The first option that differs from the request before."""
    if not index:
        return None
    before, now = requests[index - 1].body, requests[index].body
    return next((name for name in _OPTIONS if before.get(name) != now.get(name)), None)


def _optional(
    name: str, requests: Sequence[Recorded], prompts: Sequence[Prompt], index: int, session: str, ruler: _Ruler
) -> tuple[str, str, int, Finding]:
    lost = min(ruler.prompt(prompts[index - 1]), ruler.prompt(prompts[index]))
    before, now = (_brief(requests[n].body.get(name)) for n in (index - 1, index))
    finding = Finding(
        OPTION, session, index + 1, requests[index].line, name, 0, 0, before, now, 1, lost, 0.0, _ADVICE[OPTION], ""
    )
    return OPTION, name, lost, finding


def _fields(requests: Sequence[Recorded], session: str) -> Iterator[tuple[str, str, int, Finding]]:
    """Fields of messages that change although nothing of them is printed: ids, cache marks, thoughts."""
    if not session:
        return
    for index in range(1, len(requests)):
        pairs = zip(requests[index - 1].body["messages"], requests[index].body["messages"], strict=False)
        for place, (old, new) in enumerate(pairs, 1):
            if not isinstance(old, Mapping) or not isinstance(new, Mapping) or _printed(old) != _printed(new):
                break
            names = [key for key in {**old, **new} if key not in _PRINTED and old.get(key) != new.get(key)]
            names += ["a part's fields"] if not names and _parts_differ(old, new) else []
            for name in names[:1]:
                yield FIELD, name, 0, Finding(
                    FIELD, session, index + 1, requests[index].line, f"message {place}: {name}", 0, 0,
                    _brief(old.get(name)), _brief(new.get(name)), 1, 0, 0.0, _ADVICE[FIELD], "canonical hashing",
                )  # fmt: skip


def _parts_differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return isinstance(old.get("content"), list) and old.get("content") != new.get("content")


def _printed(message: Mapping[str, Any]) -> Prompt:
    return parts_of({"messages": [message]})


def _brief(value: Any) -> str:
    text = "(none)" if value is None else value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= 48 else f"{text[:45]}..."


def _grouped(breaks: Sequence[tuple[str, str, int, Finding]], total: int) -> list[Finding]:
    """One finding for each kind and place, dearest first."""
    times: Counter[tuple[str, str]] = Counter()
    lost: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], Finding] = {}
    for kind, part, tokens, finding in breaks:
        # A history grows, so the place of a rewritten one differs each time: it is one finding all the same.
        key = (kind, part if kind in {OPTION, FIELD} or part.startswith("tool ") or _SYSTEM.match(part) else "")
        times[key] += 1
        lost[key] += tokens
        first.setdefault(key, finding)
    found = [_with(first[key], times[key], lost[key], lost[key] / total if total else 0.0) for key in first]
    return sorted(found, key=lambda f: (-f.lost_tokens, f.line))


def _with(finding: Finding, times: int, lost: int, ratio: float) -> Finding:
    return replace(finding, times=times, lost_tokens=lost, lost_ratio=round(ratio, 4))

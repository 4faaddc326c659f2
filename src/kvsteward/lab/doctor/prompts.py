"""Finds where consecutive prompts of one session first differ, and what kind of text it is that changes there.

Pure, over request bodies of chat completions. Invariant: a prompt that only grows at its end has no break, whatever
it contains.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kvsteward.errors import ConfigError

_LOOKED_BACK = 64
_SHOWN = 24
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("a billing line", re.compile(r"billing|attribution|\bcch=", re.I)),
    ("a date or time", re.compile(r"\d{4}-\d\d-\d\d|\d\d?:\d\d|\b1\d{9}(\d{3})?\b|\b\d\d?[./]\d\d?[./]\d{2,4}\b")),
    ("an id", re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\b[a-z]+[_-](?=\w*\d)\w{4,}", re.I)),
    ("a number", re.compile(r"\d")),
)


@dataclass(frozen=True, slots=True)
class Break:
    """`request` (0-based) shares its prompt with an earlier one only up to `position` characters of `part`."""

    request: int
    part: str
    position: int
    kind: str
    before: str
    after: str
    reusable_ratio: float
    """How much of the earlier prompt could still be reused, by characters."""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """`followed`: requests that go on from an earlier one. `breaks`: those of them that changed it."""

    requests: int
    followed: int
    breaks: tuple[Break, ...]


_Part = tuple[str, str]
_Prompt = tuple[_Part, ...]


def compare_prompts(bodies: Sequence[Mapping[str, Any]]) -> PromptReport:
    """Compares each request with the earlier one (of the last 64) that it has most text in common with."""
    prompts = [_parts(body) for body in bodies]
    followed, breaks = 0, []
    for index, prompt in enumerate(prompts):
        earlier = _predecessor(prompt, prompts[max(0, index - _LOOKED_BACK) : index])
        if earlier is None:
            continue
        followed += 1
        found = _first_break(index, earlier, prompt)
        if found is not None:
            breaks.append(found)
    return PromptReport(len(prompts), followed, tuple(breaks))


def read_requests(text: str) -> list[Mapping[str, Any]]:
    """One chat request a line; ConfigError names the line that is none."""
    bodies: list[Mapping[str, Any]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            body = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"line {number} of the requests is not JSON: {error}", param="requests") from error
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise ConfigError(f"line {number} of the requests is no chat request: it has no messages", param="requests")
        bodies.append(body)
    return bodies


def _parts(body: Mapping[str, Any]) -> _Prompt:
    # Chat templates put the tools in front of the conversation.
    tools = body.get("tools") or []
    parts = [("tools", _text(tool)) for tool in tools] if isinstance(tools, list) else []
    for message in body["messages"]:
        role = message.get("role", "?") if isinstance(message, dict) else "?"
        parts.append((str(role), _text(message)))
    return tuple(parts)


def _text(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("content"), str) and not value.get("tool_calls"):
        return str(value["content"])
    return orjson.dumps(value).decode()


def _predecessor(prompt: _Prompt, earlier: Sequence[_Prompt]) -> _Prompt | None:
    """The newest of those that have most characters in common, if that is half of the earlier one or of its front."""
    best, best_score = None, 0
    mine = Counter(prompt)
    for other in reversed(earlier):
        score = sum(len(text) * n for (_, text), n in (mine & Counter(other)).items()) + _front(prompt, other)
        if score > best_score:
            best, best_score = other, score
    if best is None:
        return None
    return best if 2 * best_score >= sum(len(text) for _, text in best) else None


def _front(prompt: _Prompt, other: _Prompt) -> int:
    """Characters that the first parts that differ share at both ends: an edited part is still the same part."""
    for (_, mine), (_, theirs) in zip(prompt, other, strict=False):
        if mine != theirs:
            head = _shared(mine, theirs)
            tail = _shared(mine[head:][::-1], theirs[head:][::-1])
            return head + tail
    return 0


def _first_break(index: int, earlier: _Prompt, prompt: _Prompt) -> Break | None:
    same = 0
    for place, part in enumerate(earlier):
        now = prompt[place] if place < len(prompt) else ("end", "")
        if now != part:
            position = _shared(part[1], now[1]) if part[0] == now[0] else 0
            whole = sum(len(text) for _, text in earlier)
            before, after = _around(part[1], position), _around(now[1], position)
            kind = _kind(earlier, prompt, place, before, after)
            return Break(index, _name(earlier, place), position, kind, before, after, (same + position) / max(1, whole))
        same += len(part[1])
    return None


def _name(prompt: _Prompt, place: int) -> str:
    tools = sum(role == "tools" for role, _ in prompt)
    role = prompt[place][0]
    return f"tool {place + 1}" if role == "tools" else f"message {place - tools + 1} ({role})"


def _around(text: str, position: int) -> str:
    """The words around a position."""
    start = max(text.rfind("\n", 0, position) + 1, position - _SHOWN)
    end = text.find("\n", position)
    return text[start : min(position + _SHOWN, end if end >= 0 else len(text))]


def _kind(earlier: _Prompt, prompt: _Prompt, place: int, before: str, after: str) -> str:
    if earlier[place][0] == "tools":
        old, new = ([text for role, text in p if role == "tools"] for p in (earlier, prompt))
        return "the order of the tools" if Counter(old) == Counter(new) else "the tools themselves"
    if _rewritten(earlier, prompt, place):
        return "a history that is rewritten (compaction)"
    for kind, pattern in _KINDS:
        if pattern.search(before) and pattern.search(after):
            return kind
    return "text that changes"


def _rewritten(earlier: _Prompt, prompt: _Prompt, place: int) -> bool:
    """The prompt became shorter by messages, or a message in the middle became another one."""
    if len(prompt) < len(earlier):
        return True
    old, new = earlier[place][1], prompt[place][1]
    alike = _shared(old, new) + _shared(old[::-1], new[::-1])
    return prompt[place][0] != "system" and place > 0 and 2 * alike < len(old)


def _shared(one: str, other: str) -> int:
    """How many characters both begin with: by halving, so that long texts are compared at C's speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

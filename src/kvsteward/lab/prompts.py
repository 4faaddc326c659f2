"""Finds where consecutive prompts of one session first differ, and what kind of text it is that changes there.

Pure, over request bodies of chat completions. A prompt is compared as a template prints it: tools, then for each
message its role, text, calls and images; other fields of a message cost nothing. Invariant: a prompt that only grows at
its end has no break, whatever it contains.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kvsteward.errors import ConfigError
from kvsteward.wire.chat import PINNED_ROLES, image_marks, text_of

_LOOKED_BACK = 64
_SHOWN = 24
_IMAGE = re.compile(r"\[image [0-9a-f]{10}\]")
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
    earlier: int = 0
    """The request that it goes on from."""
    place: int = 0
    """The index of `part` among the parts of the earlier prompt."""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """`followed`: requests that go on from an earlier one. `breaks`: those of them that changed it."""

    requests: int
    followed: int
    breaks: tuple[Break, ...]


Part = tuple[str, str]
"""The role ("tools" for a tool) and the text of a piece of a prompt."""
Prompt = tuple[Part, ...]

ADVICE = {
    "a billing line": "remove or fix the line; for Claude Code set CLAUDE_CODE_ATTRIBUTION_HEADER=0",
    "a date or time": "move the time out of the front: into the newest user message, or round it to the day",
    "an id": "move the id out of the front: into the newest message, a header or `user`",
    "a number": "move the number out of the front, into the newest message",
    "the order of the tools": "send the tools in one order (sort them by name)",
    "the order of keys in the tools": "serialise the tools with one order of keys",
    "the tools themselves": "send one set of tools for the whole session",
    "a history that is rewritten (compaction)": "compact seldom and in big steps, not a little each turn",
    "a tool result that was changed": "leave a result as it was sent first; shorten it before the first time",
    "an answer that came back changed": "send answers back as they came, blanks and all",
    "call arguments written anew": "send the arguments of calls back as text, as they came",
    "an image that was encoded anew": "encode an image once and send the same bytes again",
    "text that changes": "move what changes to the end of the prompt",
}
"""What to do about each kind."""


def compare_prompts(bodies: Sequence[Mapping[str, Any]], *, one_session: bool = False) -> PromptReport:
    """Compares each request with the earlier one (of the last 64) that it has most text in common with. Those of
    `one_session` go on from the newest with nearly the same system prompt, however little else is left of it."""
    prompts = [parts_of(body) for body in bodies]
    followed, breaks = 0, []
    for index, prompt in enumerate(prompts):
        first = max(0, index - _LOOKED_BACK)
        earlier = _predecessor(prompt, prompts[first:index])
        if earlier is None and one_session:
            earlier = _same_front(prompt, prompts[first:index])
        if earlier is None:
            continue
        followed += 1
        found = _first_break(index, first + earlier, prompts[first + earlier], prompt)
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


def parts_of(body: Mapping[str, Any]) -> Prompt:
    """A prompt in the order in which templates print it: the tools, then the messages."""
    tools = body.get("tools") or []
    parts = [("tools", _json(tool)) for tool in tools] if isinstance(tools, list) else []
    for message in body["messages"]:
        role = message.get("role", "?") if isinstance(message, dict) else "?"
        parts.append((str(role), _text(message)))
    return tuple(parts)


def _text(message: Any) -> str:
    """What a template prints of a message: text, a mark for each image, calls."""
    if not isinstance(message, dict):
        return _json(message)
    texts = [text_of(message), *image_marks(message)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        named = function if isinstance(function, dict) else {}
        arguments = named.get("arguments")
        texts.append(f"{named.get('name')}({arguments if isinstance(arguments, str) else _json(arguments)})")
    return "\n".join(text for text in texts if text)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _predecessor(prompt: Prompt, earlier: Sequence[Prompt]) -> int | None:
    """The index of the newest of those that have most characters in common, if that is half of the earlier one or of
    its front."""
    best, best_score = None, 0
    mine = Counter(prompt)
    for index in range(len(earlier) - 1, -1, -1):
        other = earlier[index]
        score = sum(len(text) * n for (_, text), n in (mine & Counter(other)).items()) + _front(prompt, other)
        if score > best_score:
            best, best_score = index, score
    if best is None:
        return None
    return best if 2 * best_score >= sum(len(text) for _, text in earlier[best]) else None


def _same_front(prompt: Prompt, earlier: Sequence[Prompt]) -> int | None:
    """The newest of those whose system prompt is for the most part the same."""
    own = _system(prompt)
    same = (n for n in range(len(earlier) - 1, -1, -1) if own and _alike(own, _system(earlier[n])))
    return next(same, None)


def _system(prompt: Prompt) -> str:
    first = next((part for part in prompt if part[0] != "tools"), ("", ""))
    return first[1] if first[0] in PINNED_ROLES else ""


def _alike(one: str, other: str) -> bool:
    """At least half of the longer one is the beginning and the end of both."""
    head = _shared(one, other)
    tail = _shared(one[head:][::-1], other[head:][::-1])
    return 2 * (head + tail) >= max(len(one), len(other))


def _front(prompt: Prompt, other: Prompt) -> int:
    """Characters that the first parts that differ share at both ends: an edited part is still the same part."""
    for (_, mine), (_, theirs) in zip(prompt, other, strict=False):
        if mine != theirs:
            head = _shared(mine, theirs)
            tail = _shared(mine[head:][::-1], theirs[head:][::-1])
            return head + tail
    return 0


def _first_break(index: int, before_index: int, earlier: Prompt, prompt: Prompt) -> Break | None:
    same = 0
    for place, part in enumerate(earlier):
        now = prompt[place] if place < len(prompt) else ("end", "")
        if now != part:
            position = _shared(part[1], now[1]) if part[0] == now[0] else 0
            whole = sum(len(text) for _, text in earlier)
            before, after = _around(part[1], position), _around(now[1], position)
            kind = _kind(earlier, prompt, place, before, after)
            ratio = (same + position) / max(1, whole)
            return Break(index, _name(earlier, place), position, kind, before, after, ratio, before_index, place)
        same += len(part[1])
    return None


def _name(prompt: Prompt, place: int) -> str:
    tools = sum(role == "tools" for role, _ in prompt)
    role = prompt[place][0]
    return f"tool {place + 1}" if role == "tools" else f"message {place - tools + 1} ({role})"


def _around(text: str, position: int) -> str:
    """The words around a position."""
    start = max(text.rfind("\n", 0, position) + 1, position - _SHOWN)
    end = text.find("\n", position)
    return text[start : min(position + _SHOWN, end if end >= 0 else len(text))]


def _kind(earlier: Prompt, prompt: Prompt, place: int, before: str, after: str) -> str:
    if earlier[place][0] == "tools":
        old, new = ([text for role, text in p if role == "tools"] for p in (earlier, prompt))
        if Counter(old) == Counter(new):
            return "the order of the tools"
        same = sorted(map(_sorted_keys, old)) == sorted(map(_sorted_keys, new))
        return "the order of keys in the tools" if same else "the tools themselves"
    particular = _history_kind(earlier, prompt, place)
    if particular:
        return particular
    if _rewritten(earlier, prompt, place):
        return "a history that is rewritten (compaction)"
    for kind, pattern in _KINDS:
        if pattern.search(before) and pattern.search(after):
            return kind
    return "text that changes"


def _history_kind(earlier: Prompt, prompt: Prompt, place: int) -> str | None:
    """What changed in a message that stayed in its place among the others; None where that is not the case."""
    if len(prompt) < len(earlier) or prompt[place][0] != earlier[place][0]:
        return None
    (role, old), (_, new) = earlier[place], prompt[place]
    if _IMAGE.sub("", old) == _IMAGE.sub("", new):
        return "an image that was encoded anew"
    following = earlier[place + 1 : place + 3]
    if following and following != prompt[place + 1 : place + 3]:
        return None
    if role == "tool":
        return "a tool result that was changed"
    if role == "assistant":
        head, tail = old.partition("(")[::2], new.partition("(")[::2]
        if head[0] == tail[0] and _same_json(head[1][:-1], tail[1][:-1]):
            return "call arguments written anew"
        return "an answer that came back changed"
    return None


def _same_json(one: str, other: str) -> bool:
    try:
        return bool(orjson.loads(one) == orjson.loads(other))
    except orjson.JSONDecodeError:
        return False


def _sorted_keys(tool: str) -> bytes:
    return orjson.dumps(orjson.loads(tool), option=orjson.OPT_SORT_KEYS)


def _rewritten(earlier: Prompt, prompt: Prompt, place: int) -> bool:
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

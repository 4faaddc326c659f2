"""Prefix hygiene: what changes from turn to turn leaves the front of the prompt, so that the engine's cache holds.

A system prompt with a clock in it, or a billing header that counts, makes every prompt new from its first line on. So
lines that rules find volatile are taken out of the leading system messages and the tools' descriptions *before* the
history is hashed. What matters of them (a date, a working directory) is shown after the newest message as a note, once
and again whenever it changes; what does not matter (a request id) is not shown. All of it is recorded, so that the
original can be put together again (`restored`). Tools get one order and one order of keys.

Pure. Invariants: `restored` of what `clean` returns is what `clean` was given; two prompts that differ only in lines
that rules find are the same prompt afterwards; a text is read up to `MAX_CHARS`, a line up to `MAX_LINE_CHARS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from kvsteward.context.patterns import compiled
from kvsteward.errors import ConfigError
from kvsteward.wire.chat import PINNED_ROLES

Message = dict[str, Any]

MAX_CHARS, MAX_LINE_CHARS, MAX_BLOCK_LINES = 200_000, 2_000, 200
MAX_NOTE_CHARS = 8_000
_SHORT_LINE_CHARS = 240
_CACHED_LINES, _CACHED_TOOLS_BYTES = 4_096, 256 << 10
_SENTENCES = re.compile(r"(?<=[.!?])\s+")
NOTE = "[kvsteward: moved here from the system prompt, valid from now on]"

_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*"
_DAY = r"(?:mon|tues|wednes|thurs|fri|satur|sun)day"
_WHEN = (
    r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}|\d{1,2}:\d{2}"
    rf"|{_MONTH}\.?\s+\d{{1,2}}|\d{{1,2}}(?:st|nd|rd|th)?\.?\s+{_MONTH}|\b1[6-9]\d{{8}}(?:\d{{3}})?\b|\b{_DAY}\b)"
)
# "If the current time is after 18:00, ..." is a rule of the house, not a clock.
_CONDITION = r"\b(?:if|when(?:ever)?|unless|until|before|after|between|later|earlier|past|than|exceed\w*)\b"
_LEAD = rf"(?:^|[.!?]\s+)(?:(?!{_CONDITION})(?:[^.!?]|[.!?](?!\s)))*?"
_OF = r"(?:\s*(?:and|&|/)\s*(?:date|time|day))?(?:\s+(?:now|today|here|in\s+\S{1,40}))?(?:\s*\([^)]{0,40}\))?"
_GAP = rf"(?:(?!{_CONDITION}).){{0,60}}?"


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of volatile text. A line that `match` finds is taken out (of a long line, the sentence). With `until`
    everything up to the line that it finds goes along; with `going_on` all lines that it finds. `note`: shown again."""

    name: str
    match: str
    until: str = ""
    going_on: str = ""
    note: bool = True

    def __post_init__(self) -> None:
        for field in ("match", "until", "going_on"):
            if getattr(self, field):
                compiled(getattr(self, field), f"hygiene.rules.{self.name}.{field}")
        if not self.match or compiled(self.match, self.name).search(""):
            raise ConfigError(
                f"hygiene.rules.{self.name}.match must not match an empty line", param=f"hygiene.rules.{self.name}"
            )


RULES = (
    Rule("billing", r"^\s*x-[\w-]*(?:billing|attribution)[\w-]*\s*:|\bcch=[0-9a-f]{3,}", note=False),
    Rule(
        "request id",
        r"^\W*(?:x-)?(?:request|trace|correlation|message|span)[-_ ]?id\W{0,3}\s*[:=]\s*\S+\W*$",
        note=False,
    ),
    Rule("session id", r"^\W*(?:x-)?(?:session|conversation|thread|run)[-_ ]?id\W{0,3}\s*[:=]\s*\S+\W*$"),
    Rule(
        "environment",
        r"^\s*<(?:env|environment|environment_context|environment_details|system_information)>\s*$",
        until=r"^\s*</(?:env|environment|environment_context|environment_details|system_information)>",
    ),
    Rule(
        "git status",
        r"^\W*git\s?status\s*:|^\s*<git_?status>",
        going_on=r"^\s*$|^\s*(?:current branch|main branch|git user|status|recent commits|on branch|changes not staged"
        r"|untracked files|nothing to commit|your branch)\b|^\s*\(clean\)|^\s*[MADRCU?! ]{1,2}\s\S|^\s*[0-9a-f]{7,40}\s"
        r"|^\s*</git_?status>",
    ),
    Rule("working directory", r"^\W*(?:current\s+)?(?:working\s+dir(?:ectory)?|cwd|pwd)\W{0,3}\s*(?:is\s*)?[:=]\s*\S"),
    Rule(
        "date or time",
        rf"{_LEAD}(?P<at>\b(?:current|today'?s?|present|local|server|system)\s+(?:local\s+|system\s+|utc\s+)?"
        rf"(?:date|time|datetime|timestamp|day)\b{_OF}\s*(?:\bis\b|[:=-])|\b(?:today|now|it)\s+is\b){_GAP}{_WHEN}"
        rf"|^\W*(?:date|time|datetime|timestamp|now|as\s+of)\W{{0,3}}\s*[:=]\s*.{{0,40}}?{_WHEN}"
        r"|^\W*\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?\S*\W*$",
    ),
)


@dataclass(frozen=True, slots=True)
class Hygiene:
    """What is kept out of the front of the prompt. `tools`: they get one order and one order of keys."""

    enabled: bool = True
    tools: bool = True
    rules: tuple[Rule, ...] = RULES


@dataclass(frozen=True, slots=True)
class Moved:
    """A text that was taken out: from which message or tool, at which character of the original."""

    where: str
    at: int
    text: str
    rule: str
    note: bool


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Messages and tools without what changes, and that apart."""

    messages: tuple[Message, ...]
    tools: Any
    moved: tuple[Moved, ...]


def clean(messages: Sequence[Message], tools: Any, hygiene: Hygiene) -> Cleaned:
    """Takes volatile text out of the leading system messages and the tools' descriptions."""
    if not hygiene.enabled:
        return Cleaned(tuple(messages), tools, ())
    moved: list[Moved] = []
    cleaned = list(messages)
    for index, message in enumerate(messages):
        if message.get("role") not in PINNED_ROLES:
            break
        cleaned[index] = _clean_message(message, f"messages[{index}]", hygiene.rules, moved)
    if hygiene.tools and isinstance(tools, list):
        raw = orjson.dumps(tools)
        made = _clean_tools if len(raw) <= _CACHED_TOOLS_BYTES else _clean_tools.__wrapped__
        tools, of_tools = made(raw, hygiene.rules)
        moved += of_tools
    return Cleaned(tuple(cleaned), tools, tuple(moved))


@lru_cache(maxsize=64)
def _clean_tools(raw: bytes, rules: tuple[Rule, ...]) -> tuple[Any, tuple[Moved, ...]]:
    """Canonical tools and what left them. A client sends the same ones each turn: they are read once, and the same
    value is returned, which nobody changes."""
    moved: list[Moved] = []
    tools = _each_description(orjson.loads(raw), lambda where, text: _cut(text, where, rules, moved))
    return canonical_tools(tools), tuple(moved)


def restored(messages: Sequence[Message], tools: Any, moved: Iterable[Moved]) -> tuple[tuple[Message, ...], Any]:
    """The messages and tools as they came, but for the tools' order."""
    at: dict[str, list[Moved]] = {}
    for one in moved:
        at.setdefault(one.where, []).append(one)
    whole = [
        _each_text(message, f"messages[{index}]", lambda where, text: _put_back(text, at.get(where, ())))
        for index, message in enumerate(messages)
    ]
    return tuple(whole), _each_description(tools, lambda where, text: _put_back(text, at.get(where, ())))


def note_of(moved: Iterable[Moved], known: Iterable[Moved] = ()) -> str:
    """What is shown after the newest message: the texts that matter and that `known` does not have. May be empty."""
    before = {one.text.strip() for one in known if one.note}
    lines = list(dict.fromkeys(m.text.strip("\n") for m in moved if m.note and m.text.strip() not in before))
    text = "\n".join(line for line in lines if line.strip())
    if len(text) > MAX_NOTE_CHARS:
        text = f"{text[: MAX_NOTE_CHARS * 2 // 3]}\n… {text[-MAX_NOTE_CHARS // 3 :]}"
    return f"{NOTE}\n{text}" if text else ""


def volatile(text: str, rules: Sequence[Rule] = RULES) -> list[tuple[int, int, Rule]]:
    """Where rules find volatile text: start, end, rule; in order, without overlap."""
    found: list[tuple[int, int, Rule]] = []
    lines = text[:MAX_CHARS].splitlines(keepends=True)
    finder = _finder(tuple(rules))
    place = number = 0
    while number < len(lines):
        line = lines[number]
        hit = finder(line[:MAX_LINE_CHARS])
        if hit is None:
            place, number = place + len(line), number + 1
            continue
        rule, position = hit
        count = _block(lines, number, rule)
        start, end = place, place + sum(map(len, lines[number : number + count]))
        if count == 1 and len(line) > _SHORT_LINE_CHARS:
            first, last = _sentence(line, position)
            start, end = place + first, place + last
        found.append((start, end, rule))
        place, number = place + sum(map(len, lines[number : number + count])), number + count
    return found


@lru_cache(maxsize=16)
def _finder(rules: tuple[Rule, ...]) -> Callable[[str], tuple[Rule, int] | None]:
    """The first rule that finds a line, and where in it. Lines are remembered: a prompt comes again with each turn."""
    patterns = [(rule, compiled(rule.match, rule.name)) for rule in rules]

    @lru_cache(maxsize=_CACHED_LINES)
    def find(line: str) -> tuple[Rule, int] | None:
        found = ((rule, _place(match)) for rule, pattern in patterns if (match := pattern.search(line)))
        return next(found, None)

    return find


def _place(match: re.Match[str]) -> int:
    """Where what changes begins: at the group `at` of a pattern that has one."""
    return max(match.start(), match.start("at")) if "at" in match.re.groupindex else match.start()


def _block(lines: Sequence[str], first: int, rule: Rule) -> int:
    """How many lines go with the one that matched. A block that does not end is that line alone."""
    rest = lines[first + 1 : first + 1 + MAX_BLOCK_LINES]
    if rule.until:
        ends = compiled(rule.until, rule.name)
        return next((n + 2 for n, line in enumerate(rest) if ends.search(line[:MAX_LINE_CHARS])), 1)
    if not rule.going_on:
        return 1
    goes_on = compiled(rule.going_on, rule.name)
    return 1 + next((n for n, line in enumerate(rest) if not goes_on.search(line[:MAX_LINE_CHARS])), len(rest))


def _sentence(line: str, position: int) -> tuple[int, int]:
    start = 0
    for gap in _SENTENCES.finditer(line):
        if gap.end() > position:
            return start, gap.end()
        start = gap.end()
    return start, len(line)


def _cut(text: str, where: str, rules: Sequence[Rule], moved: list[Moved]) -> str:
    spans = volatile(text, rules)
    if not spans:
        return text
    kept, place = [], 0
    for start, end, rule in spans:
        kept.append(text[place:start])
        moved.append(Moved(where, start, text[start:end], rule.name, rule.note))
        place = end
    return "".join([*kept, text[place:]])


def _put_back(text: str, moved: Iterable[Moved]) -> str:
    for one in sorted(moved, key=lambda m: m.at):
        text = text[: one.at] + one.text + text[one.at :]
    return text


def _clean_message(message: Message, where: str, rules: Sequence[Rule], moved: list[Moved]) -> Message:
    before = len(moved)
    cleaned = _each_text(message, where, lambda place, text: _cut(text, place, rules, moved))
    return cleaned if len(moved) > before else message


def _each_text(message: Message, where: str, change: Any) -> Message:
    """The message with each of its texts changed."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(where, content)}
    if isinstance(content, list):
        parts = [
            {**part, "text": change(f"{where}[{n}]", part["text"])} if isinstance(part.get("text"), str) else part
            for n, part in enumerate(content)
        ]
        return {**message, "content": parts}
    return message


def _each_description(tools: Any, change: Any) -> Any:
    """The tools with their descriptions changed. What is no list of tools stays as it is."""
    if not isinstance(tools, list):
        return tools
    made = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("description"), str):
            description = change(f"tools[{function.get('name')}]", function["description"])
            if description != function["description"]:
                tool = {**tool, "function": {**function, "description": description}}
        made.append(tool)
    return made


# -- tools ----------------------------------------------------------------------------------------------------------

_FIRST = ("type", "function", "name", "description", "strict", "parameters", "properties", "items", "enum", "required")
_PLACE = {name: place for place, name in enumerate(_FIRST)}


def canonical_tools(tools: Any) -> Any:
    """Tools in the order of their names, keys in the customary order. The properties of a schema keep theirs: a model
    fills them in that order. What is no list of tools stays as it is."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return tools
    return sorted((_ordered(tool) for tool in tools), key=_name)


def same_tools(known: Any, tools: Any) -> Any:
    """`known` if it means the same as `tools` (the order of keys aside), else `tools`. So a client that shuffles the
    keys of a schema changes nothing."""
    if known is tools or known is None or tools is None:
        return tools
    return known if meaning_of(known) == meaning_of(tools) else tools


def meaning_of(tools: Any) -> bytes:
    """Equal for tools that differ in their order and that of their keys alone."""
    ordered = sorted(tools, key=_name) if isinstance(tools, list) else tools
    return orjson.dumps(ordered, option=orjson.OPT_SORT_KEYS)


def _name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    named = function if isinstance(function, dict) else tool if isinstance(tool, dict) else {}
    return str(named.get("name") or named.get("type") or "")


def _ordered(value: Any, depth: int = 0, *, free: bool = False) -> Any:
    """`free`: the keys are names that the author chose."""
    if depth > 64:
        return value
    if isinstance(value, list):
        return [_ordered(one, depth + 1) for one in value]
    if not isinstance(value, Mapping):
        return value
    keys = list(value) if free else sorted(value, key=lambda key: (_PLACE.get(key, len(_PLACE)), key))
    return {
        key: _ordered(value[key], depth + 1, free=not free and key in {"properties", "$defs", "definitions"})
        for key in keys
    }

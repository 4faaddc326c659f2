"""Facts: the values of messages that leave the view and that later turns are likely to use again.

A value is an id, a number, a path, a date, an address, a name with a digit, an underscore or a capital inside, or a
short quoted string. Values are scored by who used them (one that the user said or that the agent put into a call is
worth more than one that only a tool printed), by how many others stand beside them, and by age.

Pure and bounded: at most `MAX_VALUES` values of a message, every pattern linear in the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson

from kvsteward.context.distill.salience import GROUPED_NUMBER
from kvsteward.context.layout import Fact, Item
from kvsteward.context.patterns import compiled
from kvsteward.wire.chat import class_of, text_of

MAX_VALUES = 400
MAX_TEXT_CHARS = 200_000
_WORD = re.compile(rf"{GROUPED_NUMBER}|[^\s\"'`,;()\[\]{{}}<>|=]{{2,120}}")
_QUOTED = re.compile(r"(?<!\w)([\"'`])((?:(?!\1)[^\n]){1,60})\1(?!\w)(\s{0,4}:)?")
_TRIM = ".:!?*…-"
_FIELD = re.compile(
    r"^ *[A-Za-z_][\w.]{0,40}: (\S[^\n|]{2,39})$|(?:^|(?<=\|))([^|\n]{3,60})(?=\|)|(?<=\|)([^|\n]{3,60})$", re.M
)
"""What stands alone in a line after a name, or in a cell between bars: JSON as it is laid out on entry."""
_FIELD_NAMES = re.compile(r"^ *([A-Za-z_][\w.]{0,60})(?::(?= |$)|\[\d+\] ([^\n:]{1,1000}):$)", re.M)
"""The names in it: of a line, and of a table and its columns."""
_NO_START, _NO_END = ",:;)]}|", ",:;([{|"
_CAMEL = re.compile(r"[a-z][A-Z]")
_DIGITS = re.compile(r"\d")

CALLED, SAID, PRINTED, REPEATED = 3.0, 2.0, 1.0, 0.5
"""What a value is worth by who used it: an agent's call (for each one more), the user, a tool; and on top of it where
the agent's text repeats it."""
_CLOCK = re.compile(r"\d{1,2}:\d{2}")
_CLOCK_RATIO = 0.3
"""A time of day or a time stamp is seldom asked for by itself."""
_AGEING = 0.85


def values(text: str) -> list[str]:
    """The values of a text, each once: words first, then what is quoted. The names of fields are not values, unless
    they have a digit: then they are ids."""
    text = text[:MAX_TEXT_CHARS]
    keys: set[str] = set()
    quoted: dict[str, None] = {}
    for match in _QUOTED.finditer(text):
        inside = match.group(2).strip()
        if match.group(3) and not _DIGITS.search(inside):
            keys.add(inside)
        elif len(inside) >= 3 and inside[0] not in _NO_START and inside[-1] not in _NO_END:
            quoted.setdefault(inside)
            if len(quoted) >= MAX_VALUES:
                break
    for match in _FIELD_NAMES.finditer(text):
        names = (match.group(1), match.group().strip().partition("|")[0], *(match.group(2) or "").split("|"))
        keys.update(name for name in names if not _DIGITS.search(name) or "[" in name)
    for match in _FIELD.finditer(text):
        if len(quoted) >= MAX_VALUES:
            break
        inside = (match.group(1) or match.group(2) or match.group(3)).strip()
        if (
            len(inside) >= 3
            and inside not in keys
            and inside[0] not in _NO_START + "[{\"'"
            and inside[-1] not in _NO_END
        ):
            quoted.setdefault(inside)
    found: dict[str, None] = {}
    for match in _WORD.finditer(text):
        word = match.group().strip(_TRIM)
        if word not in keys and _is_value(word):
            found.setdefault(word)
            if len(found) >= MAX_VALUES:
                return list(found)
    for inside in quoted:
        found.setdefault(inside)
    return list(found)[:MAX_VALUES]


def _is_value(word: str) -> bool:
    if len(word) < 3:
        return False
    digits = len(_DIGITS.findall(word))
    if digits == len(word) or (digits and not any(c.isalpha() for c in word)):
        return digits >= 3
    if "@" in word or "/" in word.strip("/"):
        return len(word) >= 5
    if len(word) < 4:
        return False
    return bool(digits) or "_" in word.strip("_") or bool(_CAMEL.search(word)) or _is_file(word)


def stands_in(value: str, text: str) -> bool:
    """True if the value stands in the text as a whole word."""
    before, after = _wordy(value[0]), _wordy(value[-1])
    at = text.find(value)
    while at >= 0:
        end = at + len(value)
        if not (before and at and _wordy(text[at - 1])) and not (after and end < len(text) and _wordy(text[end])):
            return True
        at = text.find(value, at + 1)
    return False


def _wordy(char: str) -> bool:
    return char.isalnum() or char == "_"


def _is_file(word: str) -> bool:
    stem, dot, extension = word.rpartition(".")
    return bool(dot) and len(stem) >= 2 and 1 <= len(extension) <= 5 and extension.isalnum()


def argument_values(message: Mapping[str, Any]) -> list[str]:
    """The leaf values of a message's calls, and the values inside them."""
    found: dict[str, None] = {}
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        for leaf in _leaves(function.get("arguments")):
            leaf = leaf.strip()
            if 3 <= len(leaf) <= 60 and "\n" not in leaf and not _is_statement(leaf):
                found.setdefault(leaf)
            for value in values(leaf):
                if not _is_statement(value):
                    found.setdefault(value)
    return list(found)[:MAX_VALUES]


def _is_statement(text: str) -> bool:
    """A query or a command: the values in it are facts, it is not. (It would cost as much as five of them.)"""
    return len(text) > 24 and " " in text


def _leaves(arguments: Any) -> Iterable[str]:
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            yield arguments
            return
    stack = [arguments]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, str):
            yield value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield orjson.dumps(value).decode()


FIRM, MAX_FIRM = 100.0, 200
"""The score of a value that the caller or the policy wants kept, and how many of them there may be."""


def firm(dropped: Sequence[Item], earlier: Iterable[Fact], patterns: Sequence[str]) -> list[Fact]:
    """The values that stay whatever else does: those of messages that the caller marked as facts, and those that a
    policy's patterns find; with those from before, newest last."""
    found = {fact.value: fact for fact in earlier if fact.score >= FIRM}
    wanted = [compiled(pattern, "fact.keep") for pattern in patterns]
    for item in dropped:
        text = text_of(item.said)[:MAX_TEXT_CHARS]
        marked = values(text) if class_of(item.said) == "fact" else []
        matched = [m.group() for pattern in wanted for m in islice(pattern.finditer(text), MAX_FIRM)]
        for value in (*marked, *matched):
            if 0 < len(value) <= 120 and "\n" not in value:
                found.setdefault(value, Fact(value, item.hash, item.depth, FIRM))
    return list(found.values())[-MAX_FIRM:]


def collect(dropped: Sequence[Item], earlier: Iterable[Fact], recent: Sequence[Item]) -> list[Fact]:
    """The facts of a dropped span and those carried from before, best first. `recent` (what stays in view) only tells
    which values are still in use."""
    used = Counter(v for item in (*dropped, *recent) for v in argument_values(item.message))
    said = {v for item in dropped if item.role == "user" for v in values(item.text)}
    sure = {v for item in dropped for c in item.classes if c.given == "fact" for v in values(c.text)}
    repeated = {v for item in (*dropped, *recent) if item.role == "assistant" for v in values(item.text)}
    facts: dict[str, Fact] = {}
    for fact in earlier:
        kept = fact.score * _AGEING ** (len(dropped) / 8) + (CALLED if used[fact.value] else 0)
        facts[fact.value] = Fact(fact.value, fact.source, fact.depth, kept)
    newest = dropped[-1].depth if dropped else 0
    answers = {str(item.message.get("tool_call_id")): item for item in dropped if item.role == "tool"}
    for item in dropped:
        called = argument_values(item.message)
        found = list(dict.fromkeys([*called, *values(item.text)]))
        crowd = max(1.0, len(found) / 8) ** 0.5
        result = next((answers[i] for i in item.call_ids if i in answers), item)
        for value in found:
            base = CALLED + used[value] if used[value] else SAID if value in said else PRINTED / crowd
            base = max(base, CALLED) if value in sure else base
            base += REPEATED if value in repeated else 0.0
            base *= _CLOCK_RATIO if _CLOCK.search(value) else 1.0
            score = base * _AGEING ** ((newest - item.depth) / 8)
            before = facts.get(value)
            if before is None or score > before.score:
                source = result if value in called else item
                facts[value] = Fact(value, source.hash, source.depth, score)
    return sorted(facts.values(), key=lambda f: (-f.score, -f.depth, f.value))

"""The rolling summary: how the engine is asked for it, how its answer is read, and what of it a view may show.

A small model invents ids, breaks off, repeats itself, answers in another language or obeys a tool's text. So no answer
is shown before `verify` has looked at it: what names a value that stands in no source is cut, what is missing is added,
and what is beyond repair is refused, with the reason; the extractive summary then takes its place.

Pure, linear in the texts. It knows no engine. Invariant: every number and every id in a text that `verify`
lets through stands in the sources, or in the plan or the facts that it added itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from kvsteward.context.layout import Verdict
from kvsteward.context.memory import values
from kvsteward.context.tokens import Estimator

SECTIONS: Mapping[str, str] = {
    "intent": "User intent",
    "decisions": "Decisions",
    "open": "Open items",
    "facts": "Facts",
}
MAX_ITEMS, MAX_ITEM_CHARS, MAX_ANSWER_CHARS = 40, 600, 100_000
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        name: {"type": "array", "maxItems": 12, "items": {"type": "string", "maxLength": 240}} for name in SECTIONS
    },
    "required": list(SECTIONS),
    "additionalProperties": False,
}
"""What an engine that can constrain its answer is held to."""
INSTRUCTION = (
    "Summarise our conversation so far for your own later use, in at most {words} words: what the user wants, what was "
    "decided and done, what is open, and results with their exact ids, numbers, names and paths. Invent nothing. {form}"
)
SINCE = (
    "The first message holds what was condensed before: leave out what it says, and tell what is new or has changed. "
)
FORM_JSON = 'JSON: {"intent": [...], "decisions": [...], "open": [...], "facts": [...]}, short lines.'
FORM_PLAIN = 'Use the headings "User intent:", "Decisions:", "Open items:", "Facts:", short lines under each.'

_FENCE = re.compile(r"^\s*```[a-z]*\s*|\s*```\s*$", re.IGNORECASE)
_HEADING = re.compile(
    r"^[\s#*_>-]*(user intent|intent|decisions?|open(?: items?)?|facts?)[\s*_]*:?[\s*_]*$", re.IGNORECASE
)
_INLINE = re.compile(
    r"^[\s#*_>-]*(user intent|intent|decisions?|open(?: items?)?|facts?)[*_]*\s*:[*_]*\s+(\S.*)$", re.IGNORECASE
)
_BULLET = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s+")
_CALL = re.compile(r"^\s*(?:<tool_call|<function|<\|python_tag\|>|\[TOOL_CALLS?\]|<\|tool)", re.IGNORECASE)
_ORDER = re.compile(
    r"\b(?:ignore|disregard|forget|override)\b.{0,40}\b(?:instructions?|prompts?|rules?|messages?|above|previous|prior)\b"
    r"|\byou are now\b|\bnew instructions?\b|\bsystem prompt\b|<\|[a-z_]+\|>|</?(?:system|assistant|tool_call)>",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
_WORD = re.compile(r"[^\W\d_]{4,}")
_LONGEST_RATIO = 4
"""An answer over so many times its room is no summary."""
_KEPT_RATIO = 0.5
"""Where less than this share of the lines can be trusted, the rest is not trusted either."""
_KNOWN_WORDS_RATIO = 0.3
"""Share of a summary's words (four letters or more) that must stand in the sources. Of a summary in another language,
or of another conversation, next to none do."""


_FOREIGN_RATIO = 0.3
"""How much larger the share of letters beyond ASCII may be than in the sources."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The engine's answer, asked for before it is needed. `epoch` and `through` are depths: the compaction after which
    it was asked, and the newest message that it covers, whose hash is `at`."""

    epoch: int
    through: int
    at: str
    answer: str
    finished: bool = True
    """False: the engine stopped at its limit of tokens."""


@dataclass(frozen=True, slots=True)
class Summary:
    """An answer, read: the lines of each section."""

    lines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    whole: bool = True
    """False: the answer broke off."""

    def __len__(self) -> int:
        return sum(len(lines) for lines in self.lines.values())

    def render(self) -> str:
        parts = []
        for name, title in SECTIONS.items():
            if self.lines.get(name):
                parts += [f"{title}:", *(f"- {line}" for line in self.lines[name])]
        return "\n".join(parts)


def ask(words: int, *, structured: bool, since: bool = False) -> str:
    """The question. Asked by appending it to what the engine has cached. `since`: the conversation begins with what was
    condensed before."""
    form = FORM_JSON if structured else FORM_PLAIN
    return INSTRUCTION.format(words=words, form=f"{SINCE}{form}" if since else form)


def parse(answer: str, *, finished: bool = True) -> Summary:
    """Reads JSON as `SCHEMA` has it, whole or broken off, else plain text with headings; lines under no heading count
    as facts. Bounded: `MAX_ITEMS` lines a section, `MAX_ITEM_CHARS` a line."""
    text = _FENCE.sub("", answer[:MAX_ANSWER_CHARS]).strip()
    start = text.find("{")
    if start >= 0 and text[:start].strip(" \n`:") in {"", "json"}:
        found, whole = _json_object(text[start:])
        if found is not None:
            return _bounded({name: _strings(found.get(name)) for name in SECTIONS}, whole and finished)
    return _headed(text, finished)


def _json_object(text: str) -> tuple[dict[str, Any] | None, bool]:
    """The object and whether it came to its end. One that broke off is closed after its last whole string."""
    try:
        found = orjson.loads(text[: text.rfind("}") + 1])
        return (found, True) if isinstance(found, dict) else (None, True)
    except orjson.JSONDecodeError:
        pass
    for end in (m.end() for m in reversed(list(re.finditer(r'"\s*(?=[,\]])', text))[-8:])):
        for close in ("]}", "}"):
            try:
                found = orjson.loads(text[:end] + close)
            except orjson.JSONDecodeError:
                continue
            if isinstance(found, dict):
                return found, False
    return None, False


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [f"{key}: {item}" for key, item in value.items() if isinstance(item, str | int | float)]
    if isinstance(value, list):
        return [
            line for item in value[: 2 * MAX_ITEMS] for line in ([item] if isinstance(item, str) else _strings(item))
        ]
    return []


def _headed(text: str, finished: bool) -> Summary:
    lines: dict[str, list[str]] = {name: [] for name in SECTIONS}
    section = "facts"
    for line in text.splitlines():
        heading, inline = _HEADING.match(line), _INLINE.match(line)
        if heading or inline:
            word = (heading or inline).group(1).lower()  # type: ignore[union-attr]
            section = next(n for n, t in SECTIONS.items() if word[:4] in {n[:4], t.lower()[:4]})
        if inline:
            lines[section].append(inline.group(2))
        elif not heading and line.strip():
            lines[section].append(line)
    return _bounded(lines, finished)


def _bounded(lines: Mapping[str, Iterable[str]], whole: bool) -> Summary:
    """One line each, none twice. The last line of an answer that broke off is half a line."""
    seen: set[str] = set()
    kept: dict[str, tuple[str, ...]] = {}
    for name in SECTIONS:
        section: list[str] = []
        for line in lines.get(name, ()):
            line = " ".join(_BULLET.sub("", line).split())[:MAX_ITEM_CHARS]
            if line and line.lower() not in seen and len(section) < MAX_ITEMS:
                seen.add(line.lower())
                section.append(line)
        kept[name] = tuple(section)
    return Summary(kept, whole)


class Checked:
    """A draft and what it is held against: `sources`, all that the engine was shown. Each line is looked up once, in
    however many forms of the condensed part the draft is tried. Remembers what it was asked."""

    def __init__(self, draft: Draft, sources: str) -> None:
        self.draft, self._sources = draft, sources
        self._standing: dict[str, bool] = {}

    @cached_property
    def summary(self) -> Summary:
        return parse(self.draft.answer, finished=self.draft.finished)

    @cached_property
    def speaks_like(self) -> bool:
        return self._known.speaks_like(self.summary.render())

    @cached_property
    def _known(self) -> Sources:
        return Sources(self._sources)

    def stands(self, line: str) -> bool:
        """Whether every number and every id in a line is in the sources."""
        if line not in self._standing:
            self._standing[line] = self._known.has_all_of(line)
        return self._standing[line]


def verify(
    checked: Checked,
    *,
    plan: Sequence[str],
    shown: str,
    facts: Mapping[str, str],
    table: Set[str],
    room_tokens: int,
    estimator: Estimator,
    earlier: str = "",
) -> Verdict:
    """What of an engine's answer may stand in the view, in at most about `room_tokens`.

    `plan`: what must stand in the view verbatim, in `shown` (the rest of the view) or here. `facts`: the values of the
    span that leaves, each with a line that says it; each must be here or in the `table` of facts. `earlier`: the
    summary that this one goes on from; its lines follow, as far as they fit. A line that stands in `shown` is left
    out."""
    refused = _refusal(checked.draft.answer, room_tokens, estimator)
    if refused:
        return Verdict("replaced", refused, facts=len(facts))
    summary = checked.summary
    written = len(summary)
    if not written:
        return Verdict("replaced", "empty", facts=len(facts))
    if not checked.speaks_like:
        return Verdict("replaced", "not about this conversation, or in another language", written, facts=len(facts))
    orders, invented = 0, 0
    kept: dict[str, tuple[str, ...]] = {}
    told = {line.removeprefix("- ") for line in shown.splitlines()}
    before = parse(earlier)
    for name, lines in summary.lines.items():
        section = []
        for line in lines:
            if line in told:
                continue
            if gives_orders(line):
                orders += 1
            elif not checked.stands(line):
                invented += 1
            else:
                section.append(line)
        older = (line for line in before.lines[name] if line not in told and checked.stands(line))
        kept[name] = tuple(dict.fromkeys([*section, *older]))[:MAX_ITEMS]
    cut = orders + invented
    if written - cut < written * _KEPT_RATIO or written == cut:
        why = "it gives orders" if orders > invented else "most of it stands in no source"
        return Verdict("replaced", why, written, invented, orders, facts=len(facts))
    text, shortened = _fitted(Summary(kept), room_tokens, estimator)
    if not text:
        why = "no line of it fits the room" if any(kept.values()) else "it says nothing new"
        return Verdict("replaced", why, written, invented, orders, facts=len(facts))
    text, plan_added = _with_plan(text, plan, shown)
    text, added, left = _with_facts(text, facts, table, room_tokens, estimator)
    reasons = [
        *([f"{invented} lines named values that stand in no source"] if invented else []),
        *([f"{orders} lines gave orders"] if orders else []),
        *(["it broke off"] if not summary.whole else []),
        *(["it was too long"] if shortened else []),
        *([f"{plan_added} items of the plan were missing"] if plan_added else []),
        *([f"{added} facts were missing"] if added else []),
    ]
    return Verdict(
        "repaired" if reasons else "used",
        "; ".join(reasons),
        *(written, invented, orders, plan_added, len(facts), added, left),
        text=text,
    )


def _refusal(draft: str, room_tokens: int, estimator: Estimator) -> str:
    """Why an answer is not even read; empty if it is."""
    if not draft.strip():
        return "empty"
    if is_tool_call(draft):
        return "a tool call"
    if estimator.text(draft) > _LONGEST_RATIO * room_tokens:
        return "too long for a summary"
    return ""


def gives_orders(text: str) -> bool:
    """Whether a text tries to be an instruction to a model, or has marks of a role."""
    return bool(_ORDER.search(text))


def is_tool_call(draft: str) -> bool:
    """A call written as text: in a model's own marks, or one object, or a list of them, with a name and arguments."""
    if _CALL.match(draft):
        return True
    text = _FENCE.sub("", draft).strip()
    if text[:1] not in {"{", "["}:
        return False
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    first = found[0] if isinstance(found, list) and found else found
    return isinstance(first, dict) and bool({"arguments", "parameters", "function"} & first.keys())


class Sources:
    """What the engine was shown, as something to look values up in."""

    def __init__(self, text: str) -> None:
        self._text = text.lower()
        self._words = frozenset(_WORD.findall(self._text))
        self._numbers: set[str] = set()
        for number in set(_NUMBER.findall(self._text)):
            self._numbers |= _forms(number)

    def speaks_like(self, text: str) -> bool:
        """False for a text in another script, or of other words than ours. A text of values alone has none to tell
        by."""
        if _foreign(text) - _foreign(self._text) > _FOREIGN_RATIO:
            return False
        words = set(_WORD.findall(text.lower())) - _TITLE_WORDS
        return len(words) < 4 or len(words & self._words) >= _KNOWN_WORDS_RATIO * len(words)

    def has_all_of(self, line: str) -> bool:
        """Whether every number and every id in a line stands here."""
        line = line.lower()
        numbers = _NUMBER.findall(line)
        if not all(n in self._numbers or n.replace(",", "") in self._numbers or self._has(n) for n in numbers):
            return False
        ids = (v for v in values(line) if " " not in v and not v.isalpha() and any(c.isalpha() for c in v))
        return all(self._has(v) or self._is_prose(v) for v in ids)

    def _has(self, value: str) -> bool:
        """As a whole: part of a longer id is another id."""
        at = self._text.find(value)
        while at >= 0:
            end = at + len(value)
            before, after = self._text[at - 1 : at], self._text[end : end + 1]
            if not (before.isalnum() and value[0].isalnum()) and not (after.isalnum() and value[-1].isalnum()):
                return True
            at = self._text.find(value, at + 1)
        return False

    def _is_prose(self, value: str) -> bool:
        """ "and/or" is no path: each part is a word that stands here."""
        parts = value.split("/")
        return len(parts) > 1 and all(part in self._words or (part.isalpha() and len(part) < 4) for part in parts)


_TITLE_WORDS = frozenset(_WORD.findall(" ".join(SECTIONS.values()).lower()))


def _foreign(text: str) -> float:
    """Share of the letters that are not ASCII."""
    letters = sum(c.isalpha() for c in text)
    return sum(c.isalpha() and not c.isascii() for c in text) / letters if letters else 0.0


def _forms(number: str) -> set[str]:
    """A number and what may be made of it without inventing: without commas, its parts, without leading zeros."""
    parts = {number, number.replace(",", ""), *re.split(r"[.,:/-]", number)}
    return parts | {part.lstrip("0") or "0" for part in parts if part.isdigit()}


def _fitted(summary: Summary, room_tokens: int, estimator: Estimator) -> tuple[str, bool]:
    """The lines that fit, taken in turn from each section, so that a long list does not push out the others."""
    kept: dict[str, list[str]] = {name: [] for name in SECTIONS}
    room = room_tokens - sum(estimator.text(t) for n, t in SECTIONS.items() if summary.lines.get(n))
    for row in range(MAX_ITEMS):
        for name in SECTIONS:
            lines = summary.lines.get(name, ())
            if row < len(lines):
                room -= estimator.text(f"- {lines[row]}")
                if room < 0:
                    return Summary({n: tuple(v) for n, v in kept.items()}).render(), True
                kept[name].append(lines[row])
    return summary.render(), False


def _with_plan(text: str, plan: Sequence[str], shown: str) -> tuple[str, int]:
    missing = [item for item in plan if item and item not in shown and item not in text]
    return ("\n".join([*missing, text]) if missing else text), len(missing)


def _with_facts(
    text: str, facts: Mapping[str, str], table: Set[str], room_tokens: int, estimator: Estimator
) -> tuple[str, int, int]:
    """The text with a line for each fact that is nowhere, as far as the room goes; how many got one, how many not."""
    missing = [line for value, line in facts.items() if value not in table and value not in text]
    room = room_tokens - estimator.text(text)
    added: list[str] = []
    for line in missing:
        room -= estimator.text(line)
        if room < 0:
            break
        added.append(line)
    return "\n".join([text, *added]), len(added), len(missing) - len(added)

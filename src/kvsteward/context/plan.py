"""Plan: what must stay word for word - the goal, rules, steps, the to-do list, open promises.

System messages are Plan as a whole and are pinned. Of the others, a caller may say the class of a message
(`"kvsteward": {"class": "plan" | "fact" | "trace"}`); for the rest rules decide, and they take only what they are
sure of: the first user message, sentences of the user that order or forbid, a numbered plan under a heading, a
checklist or the call of a to-do tool (the newest replaces the older one), and what the assistant promised when it
handed back to the user (until it reports it done, and only the newest few).

Where rules are unsure, the engine's model may be asked (`context.unsure`); what it raises to Plan comes after what
rules find, in the same room, and never takes the place of it.

Rules read the head and the tail of a long message, not pasted documents in its middle. What rules find is bounded: one
text by `Room.item_tokens`, all of it by `Room.total_tokens`, oldest out first. What a caller marks is not bounded: if
it does not fit, the turn is refused.

Pure. Invariants: an item's text stands in its message as it is; `after` gives the same for one span or for its parts
in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsteward.context.layout import Item, PlanItem
from kvsteward.context.patterns import compiled
from kvsteward.context.tokens import Estimator
from kvsteward.errors import ConfigError
from kvsteward.wire.chat import class_of, text_of

PLAN, FACT, TRACE = "plan", "fact", "trace"
SUPERSEDED = frozenset({"steps", "todo"})
"""Kinds of which only the newest counts."""
LASTING = frozenset({"goal", "given"})
"""Kinds that never make room for others."""
RAISED = "raised"
"""The kind of what the engine's model raised: the first to make room."""

_LONG_CHARS, _END_CHARS = 8_000, 2_000
_SENTENCE_CHARS, _LIST_CHARS = (8, 600), 4_000
_MAX_SENTENCES = 400
_MIN_GOAL_TOKENS = 24

_RULE = re.compile(
    r"^\W{0,4}(?:please\s+|and\s+|but\s+|so\s+|also\s+)?"
    r"(?:do\s+not|don'?t\s+(?!have|know|think|see|remember|want|need|like|understand|recall|mind|care|believe)"
    r"|never|always|only|make\s+sure|ensure|avoid|remember|keep\s+in\s+mind|under\s+no|from\s+now\s+on|no\s+matter"
    r"|important)\b"
    r"|\b(?:must(?:n'?t)?|shall(?:\s+not)?|should\s+(?:never|always|not)|never|always|under\s+no\s+circumstances|at\s+most"
    r"|no\s+more\s+than|not\s+allowed|not\s+permitted|required\s+to|forbidden|by\s+all\s+means|from\s+now\s+on)\b",
    re.I,
)
_PROMISE = re.compile(
    r"\b(?:I|we)(?:['’]ll|\s+will|\s+am\s+going\s+to|['’]m\s+going\s+to|['’]re\s+going\s+to)\s+\w", re.I
)
_ASKS = re.compile(r"\b(?:please|if|unless|would\s+you|let\s+me\s+know|need)\b", re.I)
_DONE = re.compile(
    r"\b(?:done|completed?|finished|all\s+set|(?:has|have|had)\s+(?:now\s+)?(?:been\s+)?\w+(?:ed|nt|id|ut|ne)\b|is\s+now)",
    re.I,
)
_BREAK = re.compile(r"(?<=[.!?;:])\s+(?=[A-Z0-9\"'“(*-])")
_NUMBERED = re.compile(r"^\s{0,8}(?:\d{1,3}[.)]|step\s+\d{1,3}\W)\s*\S", re.I)
_HEADING = re.compile(r"\b(?:plan|steps?|to-?do|tasks?|approach|next)\b", re.I)
_CHECK = re.compile(r"^\s{0,8}(?:[-*+]|\d{1,3}[.)])\s+\[[ xX~-]\]\s+\S")
_TODO_TOOL = re.compile(r"todo|to_do|update_?plan|task_?list|write_?plan", re.I)
_WORD = re.compile(r"[a-z0-9]{4,}")


@dataclass(frozen=True, slots=True)
class PlanRules:
    """What counts as Plan besides what the caller marks. `patterns` are regular expressions for sentences of users."""

    by_rules: bool = True
    patterns: tuple[str, ...] = ()
    goal: bool = True
    promises: int = 4
    """Open promises that are kept, newest first; 0: none."""
    unsure: str = "rules"
    """"engine": its model is asked about sentences of users of which rules are unsure. "rules": nobody is."""

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            compiled(pattern, "plan.patterns")
        if not 0 <= self.promises <= 100:
            raise ConfigError(f"plan.promises must be between 0 and 100, not {self.promises}", param="plan.promises")
        if self.unsure not in {"rules", "engine"}:
            raise ConfigError(f"plan.unsure must be 'rules' or 'engine', not {self.unsure!r}", param="plan.unsure")
        if self.unsure == "engine" and not self.by_rules:
            raise ConfigError(
                "plan.unsure: engine asks where rules are unsure, and plan.by_rules: false has no rules",
                hint="Leave out one of the two.",
                param="plan.unsure",
            )


@dataclass(frozen=True, slots=True)
class Room:
    """How much of the view rules may claim, in tokens of the uncalibrated estimate: it must not drift, or a message
    would change its class."""

    item_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, budget_tokens: int) -> Room:
        """An eighth of the budget for one text (512 at the most), a quarter for all."""
        return cls(min(512, budget_tokens // 8), budget_tokens // 4)


_MEASURE = Estimator()


def tokens_of(text: str) -> int:
    """Length by the uncalibrated estimate."""
    return _MEASURE.text(text)


def plan_of(message: Mapping[str, Any], *, first: bool, room: Room, rules: PlanRules) -> list[tuple[str, str]]:
    """(kind, text) of what is Plan in one message. `first`: no user message came before it."""
    role, text = str(message.get("role")), text_of(message)
    given = class_of(message)
    if given == PLAN:
        return [("given", text)] if text.strip() else []
    if given is not None or not rules.by_rules:
        return []
    if role in {"system", "developer"}:
        return [("given", text)] if text.strip() else []
    found: list[tuple[str, str]] = []
    if role == "user":
        if first and rules.goal:
            found.append(("goal", _goal(text, room)))
        found += [("rule", s) for s in sentences_of(text) if orders(s, rules)]
        found += _lists(text)
    elif role == "assistant":
        calls = message.get("tool_calls") or ()
        found += _lists(text) + _todo_calls(calls)
        if rules.promises and not calls:
            found += [("promise", s) for s in sentences_of(text) if _promises(s)]
    return [(kind, t) for kind, t in found if t.strip() and (kind == "goal" or tokens_of(t) <= room.item_tokens)]


def raised(item: Item, room: Room, rules: PlanRules) -> list[tuple[str, str]]:
    """(kind, text) of what the engine's model raised to Plan in one message: a user's own words, where no caller has
    said the class."""
    if rules.unsure != "engine" or item.role != "user" or class_of(item.said) is not None:
        return []
    said = text_of(item.said)
    wanted = (c.text for c in item.classes if c.given == PLAN)
    return [(RAISED, text) for text in wanted if text in said and tokens_of(text) <= room.item_tokens]


def after(
    earlier: Sequence[PlanItem], items: Iterable[Item], *, spoken: bool, room: Room, rules: PlanRules
) -> tuple[PlanItem, ...]:
    """The Plan once `items` have been said. `spoken`: a user message came before them."""
    plan = list(earlier)
    for item in items:
        if item.role == "assistant" and not item.message.get("tool_calls"):
            said = text_of(item.said)
            plan = [p for p in plan if p.kind != "promise" or not _reported(p.text, said)]
        first = not spoken and item.role == "user"
        for kind, text in (*plan_of(item.said, first=first, room=room, rules=rules), *raised(item, room, rules)):
            if kind == RAISED and any(p.text == text for p in plan):
                continue
            plan = [p for p in plan if p.text != text and not (kind in SUPERSEDED and p.kind == kind)]
            plan.append(PlanItem(text, kind, item.hash, item.depth, item.role))
        spoken = spoken or item.role == "user"
        plan = _bounded(plan, room, rules)
    return tuple(plan)


def outdated(earlier: Iterable[PlanItem], now: Iterable[PlanItem], items: Sequence[Item]) -> list[PlanItem]:
    """Of the Plan of before, what `items` replaced by a newer one or reported done. (What left for want of room is not
    outdated.)"""
    standing = list(now)
    texts, kinds = {p.text for p in standing}, {p.kind for p in standing}
    said = [text_of(i.said) for i in items if i.role == "assistant" and not i.message.get("tool_calls")]

    def left(item: PlanItem) -> bool:
        if item.kind == "promise":
            return any(_reported(item.text, text) for text in said)
        return item.kind in SUPERSEDED and item.kind in kinds

    return [item for item in earlier if item.text not in texts and left(item)]


def kept_words(text: str, plan: Iterable[str]) -> list[str]:
    """Of the Plan's texts, those that a shortened text no longer has."""
    return [item for item in dict.fromkeys(plan) if item not in text]


def _bounded(plan: list[PlanItem], room: Room, rules: PlanRules) -> list[PlanItem]:
    promises = [p for p in plan if p.kind == "promise"]
    gone = set(map(id, promises[: max(0, len(promises) - rules.promises)]))
    left = room.total_tokens
    newest = plan[::-1]
    for item in (*(p for p in newest if p.kind != RAISED), *(p for p in newest if p.kind == RAISED)):
        if item.kind in LASTING or id(item) in gone:
            continue
        left -= tokens_of(item.text)
        if left < 0:
            gone.add(id(item))
    return [p for p in plan if id(p) not in gone] if gone else plan


def _goal(text: str, room: Room) -> str:
    """The whole first request if it is short, else its beginning up to the end of a line or sentence."""
    limit = max(_MIN_GOAL_TOKENS, room.item_tokens)
    if len(text) <= limit * 8 and tokens_of(text) <= limit:
        return text.strip()
    head = text.strip()[: limit * 4]
    while tokens_of(head) > limit:
        head = head[: int(len(head) * 0.8)]
    ends = [head.rfind(mark) for mark in ("\n", ". ", "? ", "! ")]
    return head[: max(ends) + 1].strip() if max(ends) > len(head) // 3 else head.strip()


def _ends(text: str) -> str:
    """The head and the tail of a long text: what stands between is material, not instruction."""
    return text if len(text) <= _LONG_CHARS else f"{text[:_END_CHARS]}\n{text[-_END_CHARS:]}"


def sentences_of(text: str) -> list[str]:
    """The sentences of a message that rules look at, each as it stands in the text; bounded."""
    low, high = _SENTENCE_CHARS
    found: list[str] = []
    for line in _ends(text).splitlines():
        for part in _BREAK.split(line.strip()):
            sentence = part.strip()
            if low <= len(sentence) <= high and sentence in text:
                found.append(sentence)
                if len(found) >= _MAX_SENTENCES:
                    return found
    return found


def _promises(sentence: str) -> bool:
    """A promise without a condition: "if you confirm, I will" is a question."""
    return bool(_PROMISE.search(sentence)) and not sentence.endswith("?") and not _ASKS.search(sentence)


def orders(sentence: str, rules: PlanRules) -> bool:
    """Whether rules are sure that a user's sentence is one to keep."""
    return (not sentence.endswith((":", "?")) and bool(_RULE.search(sentence))) or _extra(sentence, rules)


def _extra(sentence: str, rules: PlanRules) -> bool:
    return any(compiled(pattern, "plan.patterns").search(sentence) for pattern in rules.patterns)


def _lists(text: str) -> list[tuple[str, str]]:
    """The last checklist, and the last numbered list under a heading that calls it a plan."""
    if len(text) > 16 * _LONG_CHARS:
        return []
    lines = text.split("\n")
    last = {kind: lines[start:end] for kind, start, end in _places(lines)}
    bodies = ((kind, "\n".join(body).strip()) for kind, body in last.items())
    return [(kind, body) for kind, body in bodies if len(body) <= _LIST_CHARS]


def without_lists(text: str) -> str:
    """A text without what the Plan takes as a whole or not at all: its checklists, and numbered lists that a heading
    calls a plan, each with the line that introduces it. Of a long text only the head is left."""
    lines = text[: 16 * _LONG_CHARS].split("\n")
    gone: set[int] = set()
    for _, start, end in _places(lines):
        before = _line_before(lines, start)
        if before is not None and is_list_item(lines[start]) and lines[before].rstrip().endswith(":"):
            start = before
        gone.update(range(start, end))
    return "\n".join(line for number, line in enumerate(lines) if number not in gone)


def _places(lines: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Checklists, and numbered lists under a heading that calls them a plan: kind, first line, the line behind the
    last. A heading that does so is their first line."""
    for kind, pattern, least in (("todo", _CHECK, 1), ("steps", _NUMBERED, 2)):
        for start, end in _runs(lines, pattern, least):
            before = _line_before(lines, start)
            named = before is not None and len(lines[before]) <= 200 and bool(_HEADING.search(lines[before]))
            if kind == "todo" or named:
                yield kind, before if named and before is not None else start, end


def _line_before(lines: Sequence[str], start: int) -> int | None:
    """The line that stands before a list, at most one blank line between them."""
    return next((n for n in range(start - 1, max(-1, start - 3), -1) if lines[n].strip()), None)


def is_list_item(line: str) -> bool:
    """Whether a line is one of a checklist."""
    return bool(_CHECK.match(line[:400]))


def _runs(lines: Sequence[str], pattern: re.Pattern[str], least: int) -> list[tuple[int, int]]:
    """Stretches of lines that match, with indented lines between them."""
    runs: list[tuple[int, int]] = []
    start: int | None = None
    count = last = 0
    for number, line in enumerate([*lines, "."]):
        if pattern.match(line[:400]):
            start, count, last = (number, 1, number) if start is None else (start, count + 1, number)
        elif start is not None and not (line.startswith((" ", "\t")) and line.strip()):
            if count >= least:
                runs.append((start, last + 1))
            start = None
    return runs


def _todo_calls(calls: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The arguments of a call to a to-do tool, as they were written."""
    found = []
    for call in calls:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if not isinstance(arguments, str) or not 8 <= len(arguments) <= _LIST_CHARS:
            continue
        if _TODO_TOOL.search(str(function.get("name"))[:80]):
            found.append(("todo", arguments))
    return found[-1:]


def _reported(promise: str, said: str) -> bool:
    """The assistant says that it has done what it promised: a word of completion, and half of the promise's words."""
    said = said[:_LONG_CHARS]
    if promise in said or not _DONE.search(said):
        return False
    words = {w[:5] for w in _WORD.findall(promise.lower())}
    return bool(words) and 2 * len(words & {w[:5] for w in _WORD.findall(said.lower())}) >= len(words)


def carried(plan: Iterable[PlanItem], kept: Iterable[Item]) -> list[PlanItem]:
    """The items whose message is not among those kept, oldest first; and what was raised in one that had been shortened
    before."""
    shown = {item.hash: item.text for item in kept}
    return [p for p in plan if p.source not in shown or (p.kind == RAISED and p.text not in shown[p.source])]


def shown_texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message in which an item may stand: its content, and the arguments of its calls as written."""
    calls = (call.get("function") or {} for call in message.get("tool_calls") or ())
    return [text_of(message), *(str(call.get("arguments") or "") for call in calls)]

"""Recall: how the model asks for what left its view, and what it is given back.

One tool, `kvsteward_recall`, is offered beside the client's own. The gateway finds the messages; this module says what
the tool looks like, what a call means, and how the answer is shortened.

Pure. Invariants: an answer has at most `limit_tokens` by the estimate, whatever was found; a call that makes no sense
gets an answer that says why, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from kvsteward.context.distill.base import Hints
from kvsteward.context.distill.registry import distil
from kvsteward.context.layout import HASH_CHARS, Message, View
from kvsteward.context.marks import Marks
from kvsteward.context.memory import values
from kvsteward.context.tokens import Estimator
from kvsteward.wire.chat import image_marks, text_of

TOOL_NAME = "kvsteward_recall"
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": (
            "Returns earlier messages of this conversation that were condensed or shortened. Give either the hash "
            "that stands beside a condensed message, or words to search for. Use it before you guess."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "hash": {"type": "string", "description": "Hash of a message or image, as printed."},
                "query": {"type": "string", "description": "Words, ids or values to look for."},
                "range": {"type": "string", "description": "With hash: lines to return, such as '120-180'."},
            },
        },
    },
}

MAX_HITS = 5
MAX_CALLS = 4
"""Calls of one message that are answered; the others are told to wait."""
MIN_ROOM_TOKENS = 48
_HASH = re.compile(r"[0-9a-f]{8,32}")
_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:[-:…]|\.\.|to)?\s*(\d{1,9})?\s*")


@dataclass(frozen=True, slots=True)
class Ask:
    """What a call asks for. One of `hash` and `query` is set; `lines` counts from 1, both ends included."""

    hash: str = ""
    query: str = ""
    lines: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that was found."""

    hash: str
    depth: int
    message: Message


def with_tool(tools: Any) -> list[Any]:
    """The client's tools and ours after them."""
    return [*(tools if isinstance(tools, list) else ()), TOOL]


def with_room(marks: Marks) -> Marks:
    """Marks that leave room for one recalled text besides the answer."""
    high = max(1, min(marks.high, marks.hard - marks.tool_limit))
    return replace(marks, high=high, low=min(marks.low, int(high * 0.75)))


def parse_ask(arguments: str) -> Ask | str:
    """The question in a call's arguments, or a sentence that says what is wrong with them."""
    try:
        given = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return "The arguments are not valid JSON."
    if not isinstance(given, Mapping):
        return "The arguments must be an object with 'hash' or 'query'."
    return make_ask(*(str(given.get(name) or "") for name in ("hash", "query", "range")))


def make_ask(hash_: str, query: str, range_: str) -> Ask | str:
    """As `parse_ask`, from the three values."""
    found = _HASH.search(hash_.lower())
    if hash_.strip() and not found and not query.strip():
        query = hash_  # a model that puts words where the hash belongs means a search
    if not found and not query.strip():
        return "Give 'hash' (8 or more hex digits, as printed beside a condensed message) or 'query'."
    lines = _RANGE.fullmatch(range_) if range_.strip() else None
    if range_.strip() and not lines:
        return f"'range' must be two line numbers such as '120-180', not '{range_[:40]}'."
    first = max(1, int(lines.group(1))) if lines else 1
    last = int(lines.group(2) or lines.group(1)) if lines else 1
    span = (first, max(first, last)) if lines else None
    return Ask(found.group() if found else "", query.strip(), span)


def shown_whole(view: View) -> frozenset[str]:
    """Hashes of the messages that stand in the view as they were said: no need to find them."""
    return frozenset(i.hash for i in (*view.pinned, *view.items) if i.tokens >= i.log_tokens)


def compose(ask: Ask, hits: Sequence[Hit], labels: Mapping[str, str], limit_tokens: int, estimator: Estimator) -> str:
    """The tool's answer: each hit under a line that names it, shortened with the query as a hint. `labels` name
    messages by hash where more is known than their role."""
    if not hits:
        return "Nothing in this conversation's log matches. Try other words, or a hash as printed."
    chosen: list[str] = []
    room = limit_tokens
    for number, hit in enumerate(hits[:MAX_HITS]):
        share = room // min(2, len(hits[:MAX_HITS]) - number)
        if share < MIN_ROOM_TOKENS and chosen:
            break
        text = _one(ask, hit, labels, share, estimator)
        room -= estimator.text(text) + 1
        chosen.append(text)
    text = "\n\n".join(chosen)
    return text if estimator.text(text) <= limit_tokens else _cut(text, limit_tokens, estimator)


def _one(ask: Ask, hit: Hit, labels: Mapping[str, str], room: int, estimator: Estimator) -> str:
    text = _whole(hit.message)
    lines = text.splitlines()
    part = f"{len(lines)} lines"
    if ask.lines:
        first, last = ask.lines
        text = "\n".join(lines[first - 1 : last])
        part = f"lines {first}-{min(last, len(lines))} of {len(lines)}"
        if not text.strip():
            text = f"(there are no such lines; the message has {len(lines)})"
    label = labels.get(hit.hash) or hit.message.get("name") or hit.message.get("role")
    head = f"[{hit.hash[:HASH_CHARS]} {label}, message {hit.depth}, {part}]"
    hints = Hints(ask.query, frozenset(values(ask.query)) | frozenset(ask.query.split()))
    result = distil(text, max(16, room - estimator.text(head) - 24), hints, estimator.text)
    note = "" if result.kind == "whole" else f"\n[shortened: {result.note}; ask for a range of lines to see more]"
    return f"{head}\n{result.text}{note}"


def _whole(message: Message) -> str:
    """Text, calls and image marks of a message."""
    parts = [text_of(message), *image_marks(message)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    return "\n".join(part for part in parts if part)


def _cut(text: str, limit: int, estimator: Estimator) -> str:
    while text and estimator.text(text) > limit:
        text = text[: int(len(text) * 0.8)]
    return text

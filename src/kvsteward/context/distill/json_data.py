"""JSON, JSON lines, Python literals and rows in one line, whole or cut off: tables, lists and leaves instead of syntax.

It does not know which API a document came from. Invariants: bounded nodes are visited; every key path
that is shown is a path of the source.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.literal import MAX_CHARS, parse
from kvsteward.context.distill.meter import calibrated
from kvsteward.context.distill.tree import Shown, show

_HEAD_CHARS = 4_000
_MAX_QUERY_CHARS = 4_000
_SELECT = re.compile(r"\bselect\s+(?:distinct\s+)?", re.IGNORECASE)
_FROM = re.compile(r"\sfrom\s", re.IGNORECASE)


class JsonData(Distiller):
    """One JSON document or Python literal, possibly after a short line of other text."""

    kind = "json"

    def matches(self, text: str) -> bool:
        head = text[:_HEAD_CHARS].lstrip()
        return bool(head) and head[0] in "[{(" and not head.startswith(("[ ", "(base)")) and len(head) > 1

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        value, cut = read(text)
        if value is None:
            return None
        value = with_names(value, selected_names(hints.arguments))
        shown = show(value, limit_tokens, hints, calibrated(text, count))
        return _distillate(self.kind, shown, cut)


class JsonLines(Distiller):
    """One JSON document a line."""

    kind = "jsonl"

    def matches(self, text: str) -> bool:
        lines = [line for line in text[:_HEAD_CHARS].split("\n")[:6] if line.strip()]
        return (
            len(lines) >= 2 and all(line.lstrip()[0] in "{[" for line in lines[:-1]) and lines[0].rstrip()[-1] in "]}"
        )

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        documents: list[Any] = []
        failed = 0
        for line in text[:MAX_CHARS].split("\n"):
            if not line.strip():
                continue
            try:
                documents.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                failed += 1
        if failed > 1 + len(documents) // 20:
            return None
        unread = text.count("\n", MAX_CHARS)
        shown = show(documents, limit_tokens, hints, calibrated(text, count))
        return _distillate(self.kind, shown, f"{unread + failed} lines not read" if unread + failed else "")


def read(text: str) -> tuple[Any, str]:
    """The value of a JSON document or Python literal and what could not be read of it; (None, "") if it is neither."""
    try:
        return orjson.loads(text), ""
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        pass
    start = len(text) - len(text.lstrip())
    parsed = parse(text[start : start + MAX_CHARS])
    if parsed is None or not parsed.value:
        return None, ""
    rest = len(text) - start - parsed.end
    if parsed.complete and len(text[start + parsed.end :][:200].strip()) and rest > parsed.end:
        return None, ""
    if not parsed.complete and parsed.end < 0.9 * min(MAX_CHARS, len(text) - start):
        return None, ""
    if parsed.complete and not text[start + parsed.end :].strip():
        return parsed.value, ""
    return parsed.value, f"{rest} chars after it not read" if rest > 3 else "source cut off"


def selected_names(arguments: str) -> list[str]:
    """The column names of a SELECT in a call's arguments, as far as they are plain; empty if there is none or a `*`."""
    found = _SELECT.search(arguments[:_MAX_QUERY_CHARS])
    if found is None:
        return []
    parts, depth, start = [], 0, found.end()
    stop = _FROM.search(arguments[:_MAX_QUERY_CHARS], start)
    listed = arguments[start : stop.start() if stop else start]
    at = 0
    for i, sign in enumerate(listed):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            parts.append(listed[at:i])
            at = i + 1
    parts.append(listed[at:])
    return ["" if "*" in part and "(" not in part else part.strip() for part in parts]


def with_names(value: Any, names: list[str]) -> Any:
    """Rows of tuples as rows by name, if the names are as many as the columns."""
    if not names or not all(names) or not isinstance(value, list) or len(set(names)) != len(names):
        return value
    if len(value) < 2 or not all(isinstance(row, list) and len(row) == len(names) for row in value):
        return value
    labels = [name.split()[-1].rsplit(".", 1)[-1].strip("`\"';\\") if "(" not in name else name for name in names]
    if len(set(labels)) != len(labels) or not all(labels):
        labels = names
    return [dict(zip(labels, row, strict=True)) for row in value]


def _distillate(kind: str, shown: Shown, cut: str) -> Distillate:
    note = "; ".join(part for part in (shown.note, cut) if part) or "nothing"
    text = f"{shown.text}\n({cut})" if cut else shown.text
    return Distillate(kind, text, note)

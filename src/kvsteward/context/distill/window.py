"""A bounded view of a huge text: its head, its tail, and lines of the middle that hold an error or a named value.

Invariant: linear with a small constant (plain searches over the middle); the result is at most about MAX_CHARS.
"""

from __future__ import annotations

import re

from kvsteward.context.distill.base import Hints
from kvsteward.context.distill.salience import focus_of

MAX_CHARS = 400_000
_HEAD_CHARS = 240_000
_TAIL_CHARS = 100_000
_MIDDLE_CHARS = 60_000
_AROUND_CHARS = 300
_MAX_NAMED = 40
_TROUBLE = ("ERROR", "FATAL", "Error:", "Exception", "FAILED", "Traceback", "CRITICAL", "panic", "error:")


def windowed(text: str, hints: Hints) -> tuple[str, str]:
    """The view and what it leaves out ("" if nothing)."""
    if len(text) <= MAX_CHARS:
        return text, ""
    start, end = _line_after(text, _HEAD_CHARS), _line_after(text, len(text) - _TAIL_CHARS)
    spans = _spans(text, start, end, hints)
    parts = [text[:start]]
    at, unread = start, 0
    for low, high in spans:
        unread += low - at
        parts.append(text[low:high])
        at = high
    unread += end - at
    parts.append(text[end:])
    return "\n".join(part.rstrip("\n") for part in parts), f"{unread} chars of the middle not read"


def _line_after(text: str, at: int) -> int:
    found = text.find("\n", at, at + 2_000)
    return found + 1 if found >= 0 else at


def _spans(text: str, start: int, end: int, hints: Hints) -> list[tuple[int, int]]:
    """Merged stretches of the middle around what is named and what went wrong, within a bound."""
    named = sorted(focus_of(hints).exact, key=lambda word: (-len(word), word))[:_MAX_NAMED]
    found: list[tuple[int, int]] = []
    room = _MIDDLE_CHARS
    words = [re.escape(word) for word in (*named, *_TROUBLE)]
    for match in re.compile("|".join(words)).finditer(text, start, end):
        low = max(
            start, text.rfind("\n", match.start() - _AROUND_CHARS, match.start()) + 1 or match.start() - _AROUND_CHARS
        )
        high = text.find("\n", match.end(), match.end() + _AROUND_CHARS)
        high = min(end, high if high >= 0 else match.end() + _AROUND_CHARS)
        if found and low <= found[-1][1]:
            low = found[-1][1]
        if high <= low:
            continue
        room -= high - low
        if room < 0:
            break
        found.append((low, high))
    return found

"""A tolerant reader of JSON and Python literals, whole or cut off; it also reads calls like Decimal('1').

It does not evaluate anything. Invariants: linear in the text; nesting deeper than a limit and text past a limit
are left unread; whatever was open at the end is closed and `complete` says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

MAX_CHARS = 600_000
MAX_DEPTH = 60
_TOKEN = re.compile(
    r"\s+"
    r"|(?P<punct>[\[\]{}(),:])"
    r"|(?P<string>[bBrRuUfF]{0,2}(?:\"(?:[^\"\\]|\\.)*(?:\"|\\?\Z)|'(?:[^'\\]|\\.)*(?:'|\\?\Z)))"
    r"|(?P<word>[^\s\[\]{}(),:\"']+)",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_CLOSE = {"[": "]", "{": "}", "(": ")"}
_MAX_DATE_PARTS = 7


class _Sign(Enum):
    COLON = ":"


_COLON = _Sign.COLON


@dataclass(frozen=True, slots=True)
class Raw:
    """A literal that is kept as it was written: a number, a name, a call."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Parsed:
    """`value` is built of dict, list, str and Raw; `end` is where reading stopped; `complete`: nothing was open."""

    value: Any
    end: int
    complete: bool


@dataclass(slots=True)
class _Frame:
    kind: str
    items: list[Any]
    call: str = ""


def parse(text: str) -> Parsed | None:
    """Read one literal from the start of the text; None if it is no container or breaks its syntax."""
    stack: list[_Frame] = [_Frame("", [])]
    end = 0
    for match in _TOKEN.finditer(text, 0, MAX_CHARS):
        if match.start() != end:
            break
        end = match.end()
        if not _take(match, stack):
            return None
        if len(stack) == 1 and stack[0].items and isinstance(stack[0].items[-1], dict | list):
            return Parsed(stack[0].items[-1], end, True)
    while len(stack) > 1:
        _close(stack)
    items = stack[0].items
    return Parsed(items[-1], end, False) if items and isinstance(items[-1], dict | list) else None


def _take(match: re.Match[str], stack: list[_Frame]) -> bool:
    kind = match.lastgroup
    frame = stack[-1]
    if kind == "string":
        frame.items.append(_unquote(match.group()))
    elif kind == "word":
        frame.items.append(Raw(match.group()))
    elif kind == "punct":
        return _punctuate(match.group(), stack)
    return True


def _punctuate(sign: str, stack: list[_Frame]) -> bool:
    frame = stack[-1]
    if sign in _CLOSE:
        if len(stack) > MAX_DEPTH:
            return False
        call = ""
        if sign == "(" and frame.items and isinstance(frame.items[-1], Raw):
            call = frame.items.pop().text
        stack.append(_Frame(sign, [], call))
        return True
    if sign == ":":
        frame.items.append(_COLON)
        return True
    if sign == ",":
        return True
    if len(stack) == 1 or _CLOSE[frame.kind] != sign:
        return False
    _close(stack)
    return True


def _close(stack: list[_Frame]) -> None:
    frame = stack.pop()
    value: Any
    if frame.call:
        value = Raw(_called(frame))
    elif frame.kind == "{" and (not frame.items or _COLON in frame.items):
        value = _pairs(frame.items)
    else:
        value = [item for item in frame.items if item is not _COLON]
    stack[-1].items.append(value)


def _pairs(items: list[Any]) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    i = 0
    while i < len(items):
        key = items[i]
        if i + 1 < len(items) and items[i + 1] is _COLON:
            has_value = i + 2 < len(items) and items[i + 2] is not _COLON
            pairs[str(key)] = items[i + 2] if has_value else Raw("…")
            i += 3 if has_value else 2
        else:
            pairs[str(key)] = Raw("…")
            i += 1
    return pairs


def _called(frame: _Frame) -> str:
    """`Decimal('1.5')` reads as 1.5, a date or time in ISO form, any other call as it was."""
    name = frame.call.rsplit(".", 1)[-1]
    parts = [item if isinstance(item, str) else str(item) for item in frame.items if item is not _COLON]
    if name in ("date", "datetime") and 3 <= len(parts) <= _MAX_DATE_PARTS and all(part.isdigit() for part in parts):
        day = "-".join(part.zfill(2) for part in parts[:3])
        return day if len(parts) == 3 else f"{day} {':'.join(part.zfill(2) for part in parts[3:6])}"
    if len(parts) == 1 and name in ("Decimal", "UUID", "ObjectId", "OrderedDict", "PosixPath"):
        return parts[0]
    return f"{frame.call}({', '.join(parts)})"


def _unquote(token: str) -> str:
    quote = token.find('"') if "'" not in token else min(i for i in (token.find('"'), token.find("'")) if i >= 0)
    body = token[quote + 1 :]
    if body.endswith(token[quote]):
        body = body[:-1]
    if "\\" not in body or "r" in token[:quote].lower():
        return body
    return _ESCAPE.sub(_unescape, body)


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _PLAIN_ESCAPES.get(code, code)

"""JSON in fewer tokens and with nothing left out: one line for each field, arrays of like objects as tables.

    {"id": "K67", "legs": [{"from": "MSP", "price": 100}, {"from": "EWR", "price": 53}]}

    id: K67
    legs[2] from|price:
    MSP|100
    EWR|53

Strings lose their quotes where they cannot be taken for anything else; what fits neither a line nor a table stays JSON.
It is meant for the answers of an API, which come in one line: what has lines may be a file whose exact text is needed.

Invariant: the value can be read back from the text (the tests do); None where that saves little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

MAX_CHARS = 200_000
_MAX_DEPTH = 8
_MAX_COLUMNS = 40
_PLAIN_KEY = re.compile(r"[^\s:|\"\[\]{}](?:[^:|\"\[\]{}\n\r]*[^\s:|\"\[\]{}])?")
_NO_CELL = re.compile(
    r"[|\n\r\x00-\x08\x0b-\x1f\x85\u2028\u2029]|^[\s\"\[{]|\s$"
    r"|^(?:true|false|null|NaN|-?Infinity|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)$"  # many readers of JSON know NaN too
)

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NUMBER = re.compile(r"-?\d[\d.eE+-]*")


def laid_out(text: str) -> str | None:
    """The JSON of a one-line text in lines and tables. None if it is not an object or an array of objects that are
    alike, if it has lines or is too long, or if something in it could not be written as it stands."""
    text = text.strip()
    if not text or text[0] not in "[{" or len(text) > MAX_CHARS or "\n" in text:
        return None
    try:
        value = orjson.loads(text)
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        return None
    if not _exact(text, value):
        return None
    lines: list[str] = []
    if isinstance(value, dict) and value:
        _fields(value, 0, lines)
    elif (columns := _columns(value)) is not None:
        _table("", value, columns, 0, lines)
    else:
        return None
    return "\n".join(lines)


def _exact(text: str, value: Any) -> bool:
    """True if reading lost nothing: no key stood twice in its object, and each number is written as it would be again
    (integers over 64 bits and figures such as 1.50 are not)."""
    bare = _STRING.sub("", text)
    keys, stack = 0, [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            keys += len(node)
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return keys == bare.count(":") and all(_json(orjson.loads(n)) == n for n in set(_NUMBER.findall(bare)))


def _fields(value: Mapping[str, Any], depth: int, lines: list[str]) -> None:
    indent = " " * depth
    for key, child in value.items():
        name = indent + (key if _PLAIN_KEY.fullmatch(key) else _json(key))
        if (columns := _columns(child)) is not None:
            _table(name, child, columns, depth, lines)
        elif isinstance(child, dict) and child and depth < _MAX_DEPTH:
            lines.append(f"{name}:")
            _fields(child, depth + 1, lines)
        else:
            lines.append(f"{name}: {_cell(child)}")


def _table(name: str, rows: list[dict[str, Any]], columns: list[str], depth: int, lines: list[str]) -> None:
    lines.append(f"{name}[{len(rows)}] {'|'.join(columns)}:")
    lines.extend("|".join(_cell(row[column]) for column in columns) for row in rows)


def _columns(value: Any) -> list[str] | None:
    """The columns of an array of objects that all have the same plain fields; None for anything else."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return None
    columns = list(value[0])
    if not columns or len(columns) > _MAX_COLUMNS or not all(_PLAIN_KEY.fullmatch(column) for column in columns):
        return None
    names = set(columns)
    if not all(isinstance(row, dict) and row.keys() == names for row in value):
        return None
    return columns


def _cell(value: Any) -> str:
    """A value in a line: a string bare where nothing else could be meant, the rest as JSON without the bar."""
    if isinstance(value, str) and value and not _NO_CELL.search(value):
        return value
    return _json(value)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode().replace("|", "\\u007c")

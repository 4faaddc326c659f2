"""Data URLs kept once: what lies beside a message instead of in it.

An image that a client sends again in every turn is megabytes each time. The stored bytes of a message leave its long
data URLs out and say where they belong; each URL is kept once for each session, under its content hash.

Knows no storage. Invariant: `mend(*cut(raw))` is `raw`, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import orjson

from kvsteward.wire.fingerprint import body_hash

_DATA_URL = re.compile(rb"data:[\w/+.-]{1,100};base64,[A-Za-z0-9+/=]{256,}")

Place = tuple[int, str]
"""Offset in the bytes that are left, and the hash of what belongs there."""


def cut(raw: bytes) -> tuple[bytes, tuple[Place, ...], Mapping[str, bytes]]:
    """What is left, the places in order, and what was taken out by its hash."""
    left: list[bytes] = []
    places: list[Place] = []
    taken: dict[str, bytes] = {}
    end = size = 0
    for match in _DATA_URL.finditer(raw):
        left.append(raw[end : match.start()])
        size += match.start() - end
        end = match.end()
        hash_ = body_hash(match.group())
        places.append((size, hash_))
        taken[hash_] = match.group()
    return b"".join([*left, raw[end:]]), tuple(places), taken


def mend(left: bytes, places: Sequence[Place], blob_of: Callable[[str], bytes | None]) -> bytes:
    """The bytes as they were. What is missing stays out: the hash of the whole will tell."""
    parts: list[bytes] = []
    start = 0
    for offset, hash_ in places:
        parts += [left[start:offset], blob_of(hash_) or b""]
        start = offset
    return b"".join([*parts, left[start:]])


def encode_places(places: Sequence[Place]) -> str | None:
    return orjson.dumps(places).decode() if places else None


def decode_places(text: str | None) -> list[Place]:
    """The places of a row. None of them where the column was tampered with: the hash of the whole will tell."""
    try:
        found = orjson.loads(text) if text else []
        return [(int(offset), str(hash_)) for offset, hash_ in found]
    except (orjson.JSONDecodeError, TypeError, ValueError):
        return []

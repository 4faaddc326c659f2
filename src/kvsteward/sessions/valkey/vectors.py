"""The vectors of a Valkey store: one hash beside each session's log, which is wiped in the same step as its texts.

A field is a space's digest and an entry, its value a byte 1 and the packed vectors one after the other; so one command
puts an entry there with all of its vectors, and its length tells whether it is there.

Knows the layout of `rows`. Invariant: as in `sessions.vectors`; every answer of the server is bounded by a page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from kvsteward.sessions.nearest import HALF_BYTES, nearest, packed
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey.link import Link, Script
from kvsteward.sessions.valkey.reader import Reader, pages
from kvsteward.sessions.valkey.rows import Keys
from kvsteward.sessions.vectors import MAX_SEARCHED, Near, Space, VectorIndex

_PAGE = 64
_HERE = b"\1"

_KEEP = Script("""#!lua
-- KEYS: row, entries, vectors. ARGV: entry, field, vectors. 1: kept; 0: there is no such session or entry any more.
if redis.call('HEXISTS', KEYS[1], 's') == 0 or redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
return 1
""")


class ValkeyVectors(VectorIndex):
    """On the store's own line to the server."""

    def __init__(self, link: Link, reader: Reader) -> None:
        self._link, self._reader = link, reader

    def known(self, session_id: str, space: Space, hashes: Sequence[str]) -> frozenset[str]:
        key = Keys(session_id)[rows.VECTORS]
        found: list[str] = []
        for page in pages(hashes):
            lengths = self._link.ask_all([("HSTRLEN", key, _field(space, hash_)) for hash_ in page])
            found += [hash_ for hash_, length in zip(page, lengths, strict=True) if length]
        return frozenset(found)

    def adopt(self, session_id: str, space: Space, hash_: str) -> bool:
        for found in self._reader.find_all([hash_])[:_PAGE]:
            value = self._link.ask("HGET", Keys(found.session_id)[rows.VECTORS], _field(space, hash_))
            if value:
                return self._keep(session_id, space, hash_, value)
        return False

    def add(self, session_id: str, space: Space, hash_: str, vectors: Sequence[Sequence[float]]) -> bool:
        return self._keep(session_id, space, hash_, _HERE + b"".join(map(packed, vectors)))

    def nearest(self, session_id: str, space: Space, vector: Sequence[float], *, limit: int) -> Sequence[Near]:
        return nearest(islice(self._newest(session_id, space), MAX_SEARCHED), vector, limit)

    def forget_others(self, session_id: str, space: Space) -> None:
        key, own = Keys(session_id)[rows.VECTORS], _digest(space)
        cursor: Any = 0
        while True:
            cursor, members = self._link.ask("HSCAN", key, cursor, "COUNT", _PAGE)
            others = [name for name in _pairs(members) if not name.startswith(own)]
            if others:
                self._link.ask("HDEL", key, *others)
            if not int(cursor):
                return

    def close(self) -> None:
        """The line is the store's."""

    def _newest(self, session_id: str, space: Space) -> Iterator[tuple[str, bytes]]:
        """Each vector of the session in this space, the newest entry's first."""
        keys, size = Keys(session_id), space.dimensions * HALF_BYTES
        last = -1
        while names := self._link.ask("LRANGE", keys[rows.ORDER], last - _PAGE + 1, last):
            last -= len(names)
            hashes = [rows.string(name) for name in reversed(names)]
            values = self._link.ask("HMGET", keys[rows.VECTORS], *(_field(space, hash_) for hash_ in hashes))
            for hash_, value in zip(hashes, values, strict=True):
                held = (value or b"")[len(_HERE) :]
                yield from ((hash_, held[at : at + size]) for at in range(0, len(held), size))

    def _keep(self, session_id: str, space: Space, hash_: str, value: bytes) -> bool:
        keys = Keys(session_id)
        three = [keys[rows.ROW], keys[rows.ENTRIES], keys[rows.VECTORS]]
        return bool(self._link.run(_KEEP, three, [rows.text(hash_), _field(space, hash_), value]))


def _pairs(members: Any) -> Sequence[bytes]:
    """The names of what HSCAN answers: a flat list, or a mapping."""
    return list(members) if isinstance(members, Mapping) else list(members[::2])


def _digest(space: Space) -> bytes:
    return hashlib.blake2b(space.key.encode(), digest_size=8).hexdigest().encode()


def _field(space: Space, hash_: str) -> bytes:
    return _digest(space) + b":" + rows.text(hash_)

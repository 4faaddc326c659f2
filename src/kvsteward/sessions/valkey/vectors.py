"""The vectors of a Valkey store, beside the logs: in the slot of their session, so that what wipes it wipes them.

Has a link of its own: it waits for no turn. Knows the layout of `rows`. Invariant: as in `sessions.vectors`; one
script keeps the vectors of an entry, after it has looked whether the entry is still there.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from kvsteward.sessions.nearest import nearest, packed
from kvsteward.sessions.valkey import rows, scripts
from kvsteward.sessions.valkey.link import Link
from kvsteward.sessions.valkey.reader import pages
from kvsteward.sessions.valkey.rows import Keys
from kvsteward.sessions.vectors import MAX_SEARCHED, Near, Space, VectorIndex

_PAGE = 128
"""Entries whose vectors are read at once."""
_LENGTH = struct.Struct(">I")


class ValkeyVectors(VectorIndex):
    """In the server of `link`, which it closes."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def known(self, session_id: str, space: Space, hashes: Sequence[str]) -> frozenset[str]:
        key = Keys(session_id)[rows.VECTORS]
        found: set[str] = set()
        for page in pages(hashes):
            held = self._link.ask_all([("HEXISTS", key, _field(space, hash_)) for hash_ in page])
            found |= {hash_ for hash_, is_held in zip(page, held, strict=True) if is_held}
        return frozenset(found)

    def adopt(self, session_id: str, space: Space, hash_: str) -> bool:
        cursor = 0
        while True:
            cursor, members = self._link.ask("SSCAN", rows.entry_key(hash_), cursor, "COUNT", _PAGE)
            holders = [holder for member in members if (holder := rows.holder_of(member))]
            others = [holder.session_id for holder in holders if holder.session_id != session_id]
            field = _field(space, hash_)
            found = self._link.ask_all([("HGET", Keys(other)[rows.VECTORS], field) for other in others])
            value = next((value for value in found if value is not None), None)
            if value is not None:
                return self._keep(session_id, space, hash_, value)
            if not cursor:
                return False

    def add(self, session_id: str, space: Space, hash_: str, vectors: Sequence[Sequence[float]]) -> bool:
        parts = [packed(vector) for vector in vectors]
        value = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
        return self._keep(session_id, space, hash_, value)

    def _keep(self, session_id: str, space: Space, hash_: str, value: bytes) -> bool:
        keys = Keys(session_id)
        where = [keys[key] for key in (rows.ROW, rows.ENTRIES, rows.VECTORS, rows.VECTOR_ORDER)]
        return bool(self._link.run(scripts.VECTORS, where, [rows.text(hash_), _field(space, hash_), value]))

    def nearest(self, session_id: str, space: Space, vector: Sequence[float], *, limit: int) -> Sequence[Near]:
        return nearest(self._newest(Keys(session_id), space), vector, limit)

    def _newest(self, keys: Keys, space: Space) -> Iterator[tuple[str, bytes]]:
        """Vectors of a space, newest first."""
        count, prefix = 0, _field(space, "")
        for fields in self._fields(keys, newest_first=True):
            own = [field for field in fields if field.startswith(prefix)]
            values = self._link.ask("HMGET", keys[rows.VECTORS], *own) if own else ()
            for field, value in zip(own, values, strict=True):
                for part in _parts(value or b""):
                    yield rows.string(field[len(prefix) :]), part
                    count += 1
                    if count >= MAX_SEARCHED:
                        return

    def _fields(self, keys: Keys, *, newest_first: bool = False) -> Iterator[list[bytes]]:
        at, order = 0, ("REV",) if newest_first else ()
        while page := self._link.ask("ZRANGE", keys[rows.VECTOR_ORDER], at, at + _PAGE - 1, *order):
            yield page
            at += len(page)

    def forget_others(self, session_id: str, space: Space) -> None:
        keys, prefix = Keys(session_id), _field(space, "")
        others = [field for fields in self._fields(keys) for field in fields if not field.startswith(prefix)]
        for page in pages(others, _PAGE):
            self._link.ask_all([("HDEL", keys[rows.VECTORS], *page), ("ZREM", keys[rows.VECTOR_ORDER], *page)])

    def close(self) -> None:
        self._link.close()


def _field(space: Space, hash_: str) -> bytes:
    digest = hashlib.blake2b(rows.text(space.key), digest_size=8).hexdigest()
    return f"{digest}:".encode() + rows.text(hash_)


def _parts(value: bytes) -> Iterator[bytes]:
    """The vectors of an entry. What was cut is passed over."""
    at = 0
    while at + _LENGTH.size <= len(value):
        (length,) = _LENGTH.unpack_from(value, at)
        at += _LENGTH.size
        if at + length <= len(value):
            yield value[at : at + length]
        at += length

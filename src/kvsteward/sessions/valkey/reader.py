"""Reads what stands in the server: rows of sessions, their lists and hashes in pages.

Knows the layout of `rows`. It writes nothing. Invariant: every answer of the server is bounded by a page, in entries
and in bytes (one message may be longer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvsteward.errors import NotFoundError
from kvsteward.sessions.base import Session
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey.link import Command, Link
from kvsteward.sessions.valkey.rows import Keys, Meta

T = TypeVar("T")

PAGE = 500
_LIST_PAGE = 100
"""Of decisions, which may be long."""
_PAGE_BYTES = 8 * 2**20
_BLOB_BYTES = 2**20
"""What a data URL is taken for when a page is planned: its length is known to the server alone."""


@dataclass(frozen=True, slots=True)
class Life:
    """A session's row as it stands. `session` None: there is none; `version` is empty where nothing of it is left."""

    session: Session | None
    version: bytes = b""
    uid: str = ""
    opener: str = ""
    entries: int = 0
    decisions: int = 0


class Depths:
    """Depths of entries: those that were asked for at once, and others as they come up."""

    def __init__(self, link: Link, keys: Keys, known: dict[str, int | None]) -> None:
        self._link, self._keys, self._known = link, keys, known

    def __call__(self, hash_: str) -> int | None:
        if hash_ not in self._known:
            self._known[hash_] = _depth(hash_, self._link.ask("HGET", self._keys[rows.ENTRIES], rows.text(hash_)))
        return self._known[hash_]


class Reader:
    """Of one link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def session(self, session_id: str) -> Session:
        """Raises NotFoundError if there is none."""
        session = self.life(Keys(session_id), session_id).session
        if session is None:
            raise NotFoundError(f"no session {session_id!r}")
        return session

    def life(self, keys: Keys, session_id: str) -> Life:
        return life_of(session_id, self._link.ask(*life_command(keys)))

    def lives(self, session_ids: Sequence[str]) -> list[Life]:
        answers = self._link.ask_all([life_command(Keys(id_)) for id_ in session_ids])
        return [life_of(id_, answer) for id_, answer in zip(session_ids, answers, strict=True)]

    def read(self, keys: Keys, session_id: str, needed: Sequence[str]) -> tuple[Life, Depths]:
        """The row and the depths of some entries, in one round trip."""
        unique = list(dict.fromkeys(needed))
        batches = list(pages(unique))
        asks = [("HMGET", keys[rows.ENTRIES], *map(rows.text, page)) for page in batches]
        row, *found = self._link.ask_all([life_command(keys), *asks])
        known = {
            hash_: _depth(hash_, value)
            for page, values in zip(batches, found, strict=True)
            for hash_, value in zip(page, values, strict=True)
        }
        return life_of(session_id, row), Depths(self._link, keys, known)

    def scanned(self, name: str, key: bytes) -> Iterator[Sequence[Any]]:
        cursor: Any = 0
        while True:
            cursor, members = self._link.ask(name, key, cursor, "COUNT", PAGE)
            yield members
            if not int(cursor):
                return

    def orders(self, keys: Keys) -> Iterator[Sequence[bytes]]:
        """The names of all entries as they came, in pages."""
        yield from _full_pages(lambda at: self._link.ask("LRANGE", keys[rows.ORDER], at, at + PAGE - 1))

    def lists(self, key: bytes) -> Iterator[Sequence[bytes]]:
        """The elements of a list in pages."""
        yield from _full_pages(lambda at: self._link.ask("LRANGE", key, at, at + _LIST_PAGE - 1))

    def all_of(self, key: bytes) -> Iterator[bytes]:
        for page in self.lists(key):
            yield from page

    def values(self, key: bytes, names: Sequence[bytes]) -> Sequence[bytes | None]:
        return self._link.ask("HMGET", key, *names) if names else ()

    def metas(self, keys: Keys, names: Sequence[bytes]) -> list[Meta]:
        values = zip(names, self.values(keys[rows.ENTRIES], names), strict=True)
        return [rows.decode_meta(rows.string(name), value) for name, value in values if value is not None]

    def lefts(self, keys: Keys, session_id: str, metas: Sequence[Meta]) -> list[bytes]:
        """The stored bytes of a page. Raises NotFoundError if the session was wiped meanwhile."""
        return self.bodies(keys, session_id, metas, blobs=False)[0]

    def bodies(
        self, keys: Keys, session_id: str, metas: Sequence[Meta], *, blobs: bool = True
    ) -> tuple[list[bytes], dict[str, bytes]]:
        """As `lefts`, and the data URLs that belong there by their hashes, in one round trip."""
        names = list(dict.fromkeys(hash_ for meta in metas for _, hash_ in meta.places)) if blobs else []
        commands: list[Command] = [("HMGET", keys[rows.RAW], *(rows.text(meta.hash) for meta in metas))]
        if names:
            commands.append(("HMGET", keys[rows.BLOBS], *map(rows.text, names)))
        lefts, *found = self._link.ask_all(commands)
        if None in lefts:
            self.session(session_id)
        return [left or b"" for left in lefts], {
            name: value for name, value in zip(names, found[0] if found else (), strict=True) if value is not None
        }

    def drafts(self, keys: Keys, session_id: str) -> Iterator[rows.Draft]:
        names = self._link.ask("HKEYS", keys[rows.DRAFTS])
        for page in pages(names, 16):
            for name, value in zip(page, self.values(keys[rows.DRAFTS], page), strict=True):
                if value is not None:
                    yield rows.decode_draft(session_id, name, value)


def life_command(keys: Keys) -> Command:
    return ("HMGET", keys[rows.ROW], "s", "v", "u", "o", "n", "d")


def life_of(session_id: str, row: Sequence[bytes | None]) -> Life:
    session, version, uid, opener, entries, decisions = row
    return Life(
        None if session is None else rows.decode_session(session_id, session),
        version or b"",
        rows.string(uid or b""),
        rows.string(opener or b""),
        *(int(count) if count and count.isdigit() else 0 for count in (entries, decisions)),
    )


def _depth(hash_: str, value: bytes | None) -> int | None:
    return None if value is None else rows.decode_meta(hash_, value).depth


def pages(items: Sequence[T], size: int = PAGE) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _full_pages(page_at: Callable[[int], Sequence[bytes]]) -> Iterator[Sequence[bytes]]:
    at = 0
    while page := page_at(at):
        yield page
        at += len(page)


def sized(metas: Sequence[Meta]) -> Iterator[Sequence[Meta]]:
    """Pages that are bounded in bytes, too; a message alone may be longer."""
    page: list[Meta] = []
    size = 0
    for meta in metas:
        its = meta.size_bytes + _BLOB_BYTES * len(meta.places)
        if page and (size + its > _PAGE_BYTES or len(page) >= PAGE):
            yield page
            page, size = [], 0
        page.append(meta)
        size += its
    if page:
        yield page

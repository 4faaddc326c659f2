"""Reads what stands in the server: rows, pages of logs, and what the indexes say, checked at the sessions.

Knows the layout of `rows`. It writes nothing, but that it takes out of an index who holds an entry no more. Invariant:
every answer of the server is bounded by a page, in entries and in bytes (one message may be longer).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvsteward.errors import CorruptLogError, NotFoundError
from kvsteward.sessions import chain
from kvsteward.sessions.base import Entry, Found, Session
from kvsteward.sessions.blobs import mend
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey import scripts as scripts
from kvsteward.sessions.valkey.link import Command, Link
from kvsteward.sessions.valkey.rows import Holder, Keys, Meta

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

    def members(self, names: Sequence[bytes]) -> Iterator[list[tuple[bytes, bytes]]]:
        """Pages of members of sets, each with the name of its set."""
        left: list[tuple[bytes, Any]] = [(name, 0) for name in names]
        while left:
            answers = self._link.ask_all([("SSCAN", name, cursor, "COUNT", PAGE) for name, cursor in left])
            yield [(name, m) for (name, _), (_, members) in zip(left, answers, strict=True) for m in members]
            left = [(name, cursor) for (name, _), (cursor, _) in zip(left, answers, strict=True) if int(cursor)]

    def find_all(self, hashes: Sequence[str]) -> list[Found]:
        found: list[Found] = []
        for members in self.members([rows.entry_key(hash_) for hash_ in hashes]):
            holders = [
                (name, holder)
                for name, member in members
                if (holder := rows.holder_of(member)) and rows.entry_key(holder.hash) == name
            ]
            for page in pages(holders):
                found += self.held(page)
        return list({(one.hash, one.session_id): one for one in found}.values())

    def held(self, holders: Sequence[tuple[bytes, Holder]], tenant: str | None = None) -> list[Found]:
        """Those of an index's holders that do hold the entry. Those of a session that is no more leave the index."""
        ids = {holder.session_id: Keys(holder.session_id) for _, holder in holders}
        commands: list[Command] = [life_command(keys) for keys in ids.values()]
        for _, holder in holders:
            commands.append(("HEXISTS", ids[holder.session_id][rows.ENTRIES], rows.text(holder.hash)))
        answers = self._link.ask_all(commands)
        lives = {id_: life_of(id_, row) for id_, row in zip(ids, answers, strict=False)}
        found: list[Found] = []
        gone: list[Command] = []
        for (name, holder), holds in zip(holders, answers[len(ids) :], strict=True):
            life = lives[holder.session_id]
            if life.uid != holder.uid:  # a uid stands before its first holder, and never comes back
                gone.append(("SREM", name, holder.member()))
            elif life.session is not None and holds and tenant in {None, life.session.tenant}:
                session = life.session
                found.append(Found(session.id, holder.hash, session.head == holder.hash, session.last_used_s))
        self._link.ask_all(gone)
        return found

    def find_in(self, session_id: str, hashes: Sequence[str]) -> list[Found]:
        life, depths = self.read(Keys(session_id), session_id, hashes)
        session = life.session
        if session is None:
            return []
        return [
            Found(session_id, hash_, session.head == hash_, session.last_used_s)
            for hash_ in hashes
            if depths(hash_) is not None
        ]

    def walk(self, keys: Keys, session: Session, head: str, *, unknown_is_empty: bool = False) -> list[Meta]:
        """From the first message to `head`. Raises NotFoundError for an unknown head, CorruptLogError where the chain
        does not reach its first message."""
        path: list[Meta] = []
        at = head
        while not chain.is_start(session, at):
            found = self._link.run(scripts.WALK, [keys[rows.ENTRIES]], [rows.text(at), PAGE])
            if not found and not path:
                if unknown_is_empty:
                    return []
                raise NotFoundError(f"session {session.id!r} has no entry {head!r}")
            for name, value in zip(found[::2], found[1::2], strict=True):
                meta = rows.decode_meta(rows.string(name), value)
                if path and meta.depth != path[-1].depth - 1:  # it falls by one at each step, so the walk ends
                    raise _broken(session, head)
                path.append(meta)
            if not found:
                raise _broken(session, head)
            at = path[-1].parent
        if path and path[-1].depth != 1:
            raise _broken(session, head)
        path.reverse()
        return path

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

    def lefts(self, keys: Keys, session: Session, metas: Sequence[Meta]) -> list[bytes]:
        """The stored bytes of a page. Raises NotFoundError if the session was wiped meanwhile."""
        lefts = self.values(keys[rows.RAW], [rows.text(meta.hash) for meta in metas])
        if None in lefts:
            self.session(session.id)
        return [left or b"" for left in lefts]

    def blobs(self, keys: Keys, metas: Sequence[Meta]) -> dict[str, bytes]:
        names = list(dict.fromkeys(hash_ for meta in metas for _, hash_ in meta.places))
        values = self.values(keys[rows.BLOBS], [rows.text(name) for name in names])
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    def entries(self, keys: Keys, session: Session, metas: Sequence[Meta]) -> Iterator[Entry]:
        for page in sized(metas):
            lefts, blobs = self.lefts(keys, session, page), self.blobs(keys, page)
            for meta, left in zip(page, lefts, strict=True):
                yield meta.entry(mend(left, meta.places, blobs.get))

    def log(self, keys: Keys, session: Session) -> Iterator[tuple[int, Meta, bytes]]:
        """All messages as they came, without their data URLs; each with its place in the log."""
        place = itertools.count()
        for names in self.orders(keys):
            for page in sized(self.metas(keys, names)):
                for meta, left in zip(page, self.lefts(keys, session, page), strict=True):
                    yield next(place), meta, left

    def newest(self, keys: Keys, session: Session, found: list[tuple[float, int, Meta]], limit: int) -> Sequence[Entry]:
        newest = sorted(found, key=lambda one: one[:2])[: max(limit, 0)]
        return list(self.entries(keys, session, [meta for _, _, meta in newest]))

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


def _broken(session: Session, head: str) -> CorruptLogError:
    return CorruptLogError(f"session {session.id}: the chain of {head} does not reach its first message")

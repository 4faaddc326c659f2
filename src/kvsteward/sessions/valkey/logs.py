"""Reads the logs of sessions: a path, a whole log, what of it holds a text. Each page is one step of the server.

Knows the layout of `rows`. It writes nothing. Invariants: every answer of the server is bounded by a page, in entries
and in bytes (one message may be longer), and so is the time that it works for one; a message that is given out is the
one that was written, or CorruptLogError is raised.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any

from kvsteward.errors import CorruptLogError, NotFoundError
from kvsteward.sessions import chain, words
from kvsteward.sessions.base import Entry, Session, page_of
from kvsteward.sessions.blobs import mend
from kvsteward.sessions.needles import needles
from kvsteward.sessions.ranking import Ranking
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey import scripts as scripts
from kvsteward.sessions.valkey.link import Link, Script
from kvsteward.sessions.valkey.reader import Reader, sized
from kvsteward.sessions.valkey.rows import Keys, Meta

_WALKED = (rows.ROW, rows.ENTRIES)
_LOGGED = (*_WALKED, rows.ORDER)
_SEARCHED = (*_LOGGED, rows.RAW)
_STEP = 1000
"""Entries that the server reads in one step."""
_SEARCH_BYTES = 2**20
_SEARCH_FORM_BYTES = 128
"""Longer texts are looked for here: the server's search takes the length of a text times that of a message at worst."""


class Logs:
    """Of one link."""

    def __init__(self, link: Link, reader: Reader) -> None:
        self._link, self._reader = link, reader

    def path(self, session: Session, head: str) -> list[Entry]:
        """From the first message to `head`. Raises NotFoundError for an unknown head, CorruptLogError where the chain
        does not reach its first message."""
        return list(self.entries(session, self.walk(session, head)))

    def walk(self, session: Session, head: str, *, unknown_is_empty: bool = False) -> list[Meta]:
        """As `path`, without the messages."""
        path: list[Meta] = []
        at = head
        while not chain.is_start(session, at):
            _, parts = self._parts(scripts.WALK, _WALKED, session, (rows.text(at), _STEP))
            if not parts and not path:
                if unknown_is_empty:
                    return []
                raise NotFoundError(f"session {session.id!r} has no entry {head!r}")
            for meta in _metas(parts):
                if path and meta.depth != path[-1].depth - 1:  # it falls by one at each step, so the walk ends
                    raise _broken(session, head)
                path.append(meta)
            if not parts:
                raise _broken(session, head)
            at = path[-1].parent
        if path and path[-1].depth != 1:
            raise _broken(session, head)
        path.reverse()
        return path

    def page(self, session: Session, offset: int, limit: int) -> list[Entry]:
        """Of all branches, in the order in which they came; no more than `base.PAGE_BYTES` of messages."""
        keys = Keys(session.id)
        names = self._link.ask("LRANGE", keys[rows.ORDER], offset, offset + limit - 1) if limit else ()
        return page_of(self.entries(session, self._reader.metas(keys, names)))

    def entries(self, session: Session, metas: Sequence[Meta]) -> Iterator[Entry]:
        return (meta.entry(whole) for meta, whole in self._whole(session, metas))

    def _whole(self, session: Session, metas: Sequence[Meta]) -> Iterator[tuple[Meta, bytes]]:
        """Each with its message."""
        keys = Keys(session.id)
        for page in sized(metas):
            lefts, blobs = self._reader.bodies(keys, session.id, page)
            for meta, left in zip(page, lefts, strict=True):
                yield meta, mend(left, meta.places, blobs.get) if meta.places else left

    def holding(self, session: Session, text: str, limit: int, among: Container[str] | None = None) -> Sequence[Entry]:
        """Messages that hold a text as it is, newest first. `among`: only these."""
        newest = heapq.nsmallest(
            max(limit, 0),
            (
                (-meta.created_s, -place, meta)
                for place, meta in self._holding(session, needles(text))
                if among is None or meta.hash in among
            ),
            key=lambda found: found[:2],
        )
        return list(self.entries(session, [meta for _, _, meta in newest]))

    def _holding(self, session: Session, forms: Sequence[bytes]) -> Iterator[tuple[int, Meta]]:
        """What holds one of the forms, as it came, with its place in the log."""
        if max(map(len, forms)) > _SEARCH_FORM_BYTES:
            yield from self._holding_long(session, forms)
            return
        at = 0
        while at >= 0:
            bounds = (at, _STEP, _SEARCH_BYTES)
            at, parts = self._parts(scripts.SEARCH, _SEARCHED, session, (*bounds, *forms))
            for place, name, value in zip(parts[0::3], parts[1::3], parts[2::3], strict=True):
                yield int(place), rows.decode_meta(rows.string(name), value)

    def _holding_long(self, session: Session, forms: Sequence[bytes]) -> Iterator[tuple[int, Meta]]:
        keys, place = Keys(session.id), itertools.count()
        for metas in self._log(session):
            for page in sized(metas):
                for meta, left in zip(page, self._reader.lefts(keys, session.id, page), strict=True):
                    at = next(place)
                    if any(form in left for form in forms):
                        yield at, meta

    def ranked(self, session: Session, query: str, limit: int, among: Container[str] | None = None) -> Sequence[Entry]:
        """Messages that hold words of a query, best first. `among`: only these."""
        asked = words.words(query)
        if not asked:
            return []
        metas: list[Meta] = []
        with Ranking(session.id) as ranking:
            for page in self._log(session):
                for meta, whole in self._whole(session, page):
                    ranking.add(len(metas), words.searched_text(whole))
                    metas.append(meta)
            best = [metas[place] for place in ranking.best(asked)]
        best = [meta for meta in best if among is None or meta.hash in among]
        return list(self.entries(session, best[: max(limit, 0)]))

    def _log(self, session: Session) -> Iterator[list[Meta]]:
        """All entries as they came, in pages."""
        at = 0
        while at >= 0:
            at, parts = self._parts(scripts.LOG, _LOGGED, session, (at, _STEP))
            yield _metas(parts)

    def _parts(
        self, script: Script, which: Sequence[int], session: Session, arguments: Sequence[Any]
    ) -> tuple[int, list[bytes]]:
        """What a script has packed, and the place that it says comes next (0 where it says none)."""
        keys = Keys(session.id)
        answer = self._link.run(script, [keys[key] for key in which], arguments)
        if answer is None:  # wiped meanwhile
            raise NotFoundError(f"no session {session.id!r}")
        *place, lengths, parts = answer
        return (place[0] if place else 0), scripts.unpacked(lengths, parts)


def _metas(parts: Sequence[bytes]) -> list[Meta]:
    """Of a packed answer: an entry, what stands beside it, and so on."""
    return [rows.decode_meta(rows.string(name), value) for name, value in zip(parts[::2], parts[1::2], strict=True)]


def _broken(session: Session, head: str) -> CorruptLogError:
    return CorruptLogError(f"session {session.id}: the chain of {head} does not reach its first message")

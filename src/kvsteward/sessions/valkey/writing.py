"""Writes to a session that is there: reads what it must know, sets its places in the indexes, then changes all in one
step of the server, if nobody else has written meanwhile; else it begins again.

Knows the layout of `rows`. Invariant: a row's version is new with each write and never comes back.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvsteward.errors import StoreUnavailableError
from kvsteward.sessions import chain
from kvsteward.sessions.base import Decision, Entry, Session
from kvsteward.sessions.blobs import cut
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey import scripts as scripts
from kvsteward.sessions.valkey.indexes import forget, holders, places
from kvsteward.sessions.valkey.link import Command, Link
from kvsteward.sessions.valkey.reader import Life, Reader, pages
from kvsteward.sessions.valkey.rows import Keys, Meta
from kvsteward.sessions.valkey.scripts import Changes
from kvsteward.sessions.valkey.turns import OpenTurns
from kvsteward.wire.fingerprint import root

_TRIES = 50


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be written to a session."""

    session: Session
    entries: Sequence[Entry] = ()
    decisions: Sequence[Decision] = ()
    ended: Sequence[bytes] = ()
    """Turns whose drafts go."""


class Writer:
    """Of one link and one process."""

    def __init__(self, link: Link, reader: Reader, turns: OpenTurns) -> None:
        self._link, self._reader, self._turns = link, reader, turns
        self._versions = itertools.count(1)

    def write(
        self,
        session_id: str,
        plan: Callable[[Life, Session, chain.DepthOf], Plan | None],
        needed: Sequence[str],
        *,
        indexed: bool = True,
    ) -> Session | None:
        """Does what `plan` says of the session as it stands, until nobody else comes between. `needed` are the entries
        whose depths it will ask for. None: there is no such session."""
        keys = Keys(session_id)
        tried: tuple[Session, str, list[Entry]] | None = None
        for tries in range(_TRIES):
            life, depths = self._reader.read(keys, session_id, needed)
            if life.session is None:
                if tried is not None:
                    self._take_back(*tried)
                return None
            todo = plan(life, life.session, depths)
            if todo is None:
                return life.session
            new: dict[str, Entry] = {}
            for entry in todo.entries:
                if depths(entry.hash) is None:
                    new.setdefault(entry.hash, entry)
            if self._written(keys, life, todo, list(new.values()), indexed=indexed):
                return todo.session
            tried = (todo.session, life.uid, list(new.values()))
            time.sleep(random.uniform(0, 0.001) * min(tries, 20))
        raise StoreUnavailableError(f"session {session_id}: too many write to it at once", retry_after_s=1.0)

    def _take_back(self, session: Session, uid: str, entries: Sequence[Entry]) -> None:
        """The session was wiped before it could be written: takes back what says that it holds something."""
        for page in pages(entries):
            self._link.ask_all(holders("SREM", session.id, session.tenant, uid, page))
        forget(self._link, session.id, session.tenant, session.last_used_s, session.last_used_s + session.ttl_s)

    def _written(self, keys: Keys, life: Life, todo: Plan, added: Sequence[Entry], *, indexed: bool) -> bool:
        session = todo.session
        cuts = [(entry, *cut(entry.raw)) for entry in added]
        items = [(rows.meta_of(entry, left, places), left) for entry, left, places, _ in cuts]
        changes = Changes()
        add_entries(changes, items)
        add_blobs(changes, {hash_: data for *_, taken in cuts for hash_, data in taken.items()})
        changes.add_all("RPUSH", rows.DECISIONS, [rows.encode_decision(decision) for decision in todo.decisions])
        changes.add_all("HDEL", rows.DRAFTS, todo.ended)
        counts = (life.entries + len(added), life.decisions + len(todo.decisions))
        changes.add("HSET", rows.ROW, *self.row(session, life, *counts))
        with self.noted(session) as noted:
            before = [*noted, *(places(session) if indexed else ())]
            before += holders("SADD", session.id, session.tenant, life.uid, [meta for meta, _ in items])
            for page in pages(before):
                self._link.ask_all(page)
            return self.commit(keys, life.version, changes)

    def commit(self, keys: Keys, version: bytes, changes: Changes, script: Any = scripts.COMMIT) -> bool:
        return bool(self._link.run(script, keys.all, [version, *changes.words]) == 1)

    def row(self, session: Session, before: Life, entries: int, decisions: int) -> tuple[Any, ...]:
        """Names and values of a session's row, with a version of its own. Who made it active stays."""
        opener = ""
        if session.state == "active":
            was_active = before.session is not None and before.session.state == "active"
            opener = (before.opener if was_active else "") or self._turns.owner
        return (
            *("s", rows.encode_session(session), "v", self.version(), "root", root(session.tenant), "o", opener),
            *("n", entries, "d", decisions),
        )

    def version(self) -> bytes:
        return f"{self._turns.owner}:{next(self._versions)}".encode()

    @contextmanager
    def noted(self, session: Session) -> Iterator[Sequence[Command]]:
        """Around the write of a row: what must be sent before it where a turn is open."""
        if session.state != "active":
            yield ()
            return
        with self._turns.noting(session.id) as noted:
            yield noted


def add_entries(changes: Changes, items: Sequence[tuple[Meta, bytes]]) -> None:
    """Each with its bytes without data URLs."""
    names = [rows.text(meta.hash) for meta, _ in items]
    beside = [rows.encode_meta(meta) for meta, _ in items]
    changes.add_all("HSET", rows.ENTRIES, [word for pair in zip(names, beside, strict=True) for word in pair])
    lefts = [left for _, left in items]
    changes.add_all("HSET", rows.RAW, [word for pair in zip(names, lefts, strict=True) for word in pair])
    changes.add_all("RPUSH", rows.ORDER, names)
    changes.add_all("ZADD", rows.NAMES, [word for name in names for word in (0, name)])


def add_blobs(changes: Changes, blobs: dict[str, bytes]) -> None:
    changes.add_all("HSET", rows.BLOBS, [word for name, data in blobs.items() for word in (rows.text(name), data)])

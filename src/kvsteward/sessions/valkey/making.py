"""Makes sessions: a new one, and one that starts as a copy of another's path.

A session that is being made has a row without the session itself, so nobody sees it until the last step. Whoever stops
in between leaves a place in the indexes, by which a sweep, or the next who wants the id, takes the rest away.

Knows the layout of `rows`. Invariant: of several that make one id at once, one does.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from kvsteward.errors import StateError, StoreUnavailableError
from kvsteward.sessions import chain
from kvsteward.sessions.base import Session
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey.ending import Ender
from kvsteward.sessions.valkey.indexes import holders, places
from kvsteward.sessions.valkey.link import Link
from kvsteward.sessions.valkey.logs import Logs
from kvsteward.sessions.valkey.reader import Life, Reader, sized
from kvsteward.sessions.valkey.rows import Keys
from kvsteward.sessions.valkey.scripts import Changes
from kvsteward.sessions.valkey.writing import Writer, add_blobs, add_entries


class Maker:
    """Of one link and one process."""

    def __init__(self, link: Link, reader: Reader, logs: Logs, writer: Writer, ender: Ender) -> None:
        self._link, self._reader, self._logs, self._writer, self._ender = link, reader, logs, writer, ender

    def create(self, session: Session) -> None:
        chain.check_head(session, lambda _: None)
        keys = Keys(session.id)
        while True:
            self._clear(keys, session.id)
            uid = uuid.uuid4().hex
            with self._writer.noted(session) as noted:
                self._link.ask_all([*noted, *places(session)])
                changes = Changes()
                changes.add("HSET", rows.ROW, "u", uid, *self._writer.row(session, Life(None), 0, 0))
                if self._writer.commit(keys, b"", changes):
                    return

    def branch(self, session: Session, source_id: str, head: str) -> None:
        keys, source_keys = Keys(session.id), Keys(source_id)
        source = self._reader.session(source_id)
        chain.check_tenant(session, source)
        if self._reader.life(keys, session.id).session is not None:
            raise StateError(f"session {session.id!r} exists")
        metas = self._logs.walk(source, head)
        session = replace(session, head=head)
        version, uid = self._begun(keys, session)
        for page in sized(metas):
            self._link.ask_all(holders("SADD", session.id, session.tenant, uid, page))
            lefts, blobs = self._reader.bodies(source_keys, source.id, page)
            changes = Changes()
            add_entries(changes, list(zip(page, lefts, strict=True)))
            add_blobs(changes, blobs)
            version = self._go_on(keys, session.id, version, changes)
        on_path, count = {meta.hash for meta in metas}, 0
        for values in self._reader.lists(source_keys[rows.DECISIONS]):
            kept = [value for value in values if rows.decode_decision(source_id, value)[0].at in on_path]
            changes, count = Changes(), count + len(kept)
            changes.add_all("RPUSH", rows.DECISIONS, kept)
            version = self._go_on(keys, session.id, version, changes)
        changes = Changes()
        changes.add("HDEL", rows.ROW, "t", "b")
        changes.add("HSET", rows.ROW, *self._writer.row(session, Life(None), len(metas), count))
        with self._writer.noted(session) as noted:
            self._link.ask_all([*noted, *places(session)])
            self._go_on(keys, session.id, version, changes)

    def _clear(self, keys: Keys, session_id: str) -> None:
        """Takes away what is left of a session of this name that is no more. Raises StateError if there is one."""
        while True:
            life = self._reader.life(keys, session_id)
            if life.session is not None:
                raise StateError(f"session {session_id!r} exists")
            if not life.version:
                return
            self._ender.purge(keys, session_id, life.version)

    def _begun(self, keys: Keys, session: Session) -> tuple[bytes, str]:
        """A session that is being made and is not seen yet: its version and its uid."""
        while True:
            self._clear(keys, session.id)
            self._link.ask_all(places(session))
            version, uid = self._writer.version(), uuid.uuid4().hex
            changes = Changes()
            changes.add("HSET", rows.ROW, "u", uid, "v", version, *rows.hidden(session))
            if self._writer.commit(keys, b"", changes):
                return version, uid

    def _go_on(self, keys: Keys, session_id: str, version: bytes, changes: Changes) -> bytes:
        """One more step of a session that is being made: its next version."""
        after = self._writer.version()
        changes.add("HSET", rows.ROW, "v", after)
        if not self._writer.commit(keys, version, changes):
            raise StoreUnavailableError(f"session {session_id} was wiped while it was made", retry_after_s=1.0)
        return after

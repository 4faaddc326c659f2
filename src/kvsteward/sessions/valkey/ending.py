"""Ends sessions: wipes them for good, and finds those whose time to live or retention is over.

Texts go first, in one step, with what makes the session seen; then its places in the indexes, then the rest. Whoever
stops in between leaves enough to go on from: a place in the index of sessions, which the next sweep finds.

Knows the layout of `rows`. Invariant: a session that somebody has written to since it was read is not wiped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from kvsteward.errors import CorruptLogError
from kvsteward.sessions import chain
from kvsteward.sessions.base import Session
from kvsteward.sessions.lifecycle import allows, step
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey import scripts as scripts
from kvsteward.sessions.valkey.indexes import forget, holders
from kvsteward.sessions.valkey.link import Link
from kvsteward.sessions.valkey.reader import PAGE, Life, Reader
from kvsteward.sessions.valkey.rows import Keys
from kvsteward.sessions.valkey.scripts import Changes
from kvsteward.sessions.valkey.writing import Plan, Writer

log = logging.getLogger("kvsteward")


class Ender:
    """Of one link and one process."""

    def __init__(self, link: Link, reader: Reader, writer: Writer) -> None:
        self._link, self._reader, self._writer = link, reader, writer

    def delete(self, session_id: str) -> bool:
        keys = Keys(session_id)
        while True:
            life = self._reader.life(keys, session_id)
            if life.session is None:
                if life.version:
                    self.purge(keys, session_id, life.version)
                return False
            if self._wipe(keys, life.session, life.version):
                return True

    def _wipe(self, keys: Keys, session: Session, version: bytes) -> bool:
        """Texts first, in one step, then the rest. False if somebody has written to the session."""
        changes = Changes()
        for key in (rows.RAW, rows.BLOBS, rows.DECISIONS, rows.DRAFTS, rows.VECTORS, rows.VECTOR_ORDER):
            changes.add("UNLINK", key)
        changes.add("HDEL", rows.ROW, "s", "root", "o", "n", "d", "drafts", "vectors")
        after = self._writer.version()
        changes.add("HSET", rows.ROW, "v", after, *rows.hidden(session))
        if not self._writer.commit(keys, version, changes, scripts.WIPE):
            return False
        self.purge(keys, session.id, after)
        return True

    def purge(self, keys: Keys, session_id: str, version: bytes) -> None:
        """Takes away what is left of a session that is wiped, or was never finished. Whoever stops in between leaves
        enough to go on from: a place in the index of sessions."""
        uid, tenant, bounds = self._link.ask("HMGET", keys[rows.ROW], "u", "t", "b")
        tenant, uid = rows.string(tenant or b""), rows.string(uid or b"")
        for page in self._reader.orders(keys):
            metas = self._reader.metas(keys, page)
            self._link.ask_all(holders("SREM", session_id, tenant, uid, metas))
        changes = Changes()
        for key in (rows.ENTRIES, rows.RAW, rows.BLOBS, rows.ORDER, rows.NAMES, rows.DECISIONS, rows.DRAFTS, rows.ROW):
            changes.add("UNLINK", key)
        if self._writer.commit(keys, version, changes, scripts.WIPE):
            forget(self._link, session_id, tenant, *rows.decode_bounds(session_id, bounds))

    def expired(self, now: float) -> Iterator[Session]:
        """Sessions whose TTL is over, and are made so."""
        offset = 0
        while True:
            page = self._link.ask("ZRANGE", rows.DUE, "-inf", now, "BYSCORE", "LIMIT", offset, PAGE)
            for name in page:
                session_id = rows.string(name)
                try:
                    stays, session = self._expire(session_id, now)
                except CorruptLogError as error:
                    log.error("cannot end %s: %s", session_id, error.message)
                    stays, session = True, None
                offset += stays
                if session is not None:
                    yield session
            if len(page) < PAGE:
                return

    def _expire(self, session_id: str, now: float) -> tuple[bool, Session | None]:
        """Whether it stays in the index of what is due; the session, if it has expired now."""
        keys = Keys(session_id)
        life = self._reader.life(keys, session_id)
        if life.session is None:
            if life.version:
                self.purge(keys, session_id, life.version)
            forget(self._link, session_id, None, now, now)
            return False, None
        expired: Session | None = None

        def plan(_: Life, session: Session, __: chain.DepthOf) -> Plan | None:
            nonlocal expired
            expired = None
            if allows(session.state, "expire") and now - session.last_used_s > session.ttl_s:
                expired = replace(session, state=step(session.state, "expire"))
            return None if expired is None else Plan(expired)

        stored = self._writer.write(session_id, plan, (), indexed=False)
        if stored is None or (expired is None and (stored.state == "active" or allows(stored.state, "expire"))):
            return stored is not None, None
        self._link.run(scripts.DROP, [rows.DUE], [rows.text(session_id), "-inf", now])
        return False, expired

    def outlived(self, now: float, log_retention_s: float) -> Iterator[Session]:
        """Wipes logs that were not used for so long; those whose KV must still be given back."""
        offset, last = 0, f"({log_retention_s - now}"
        while True:
            page = self._link.ask("ZRANGE", rows.USED, "inf", last, "BYSCORE", "REV", "LIMIT", offset, PAGE)
            for name in page:
                session_id = rows.string(name)
                keys = Keys(session_id)
                try:
                    life = self._reader.life(keys, session_id)
                except CorruptLogError as error:
                    log.error("cannot wipe %s: %s", session_id, error.message)
                    offset += 1
                    continue
                session = life.session
                if session is None:
                    if life.version:
                        self.purge(keys, session_id, life.version)
                    forget(self._link, session_id, None, now - log_retention_s, now)
                elif session.state == "active" or now - session.last_used_s <= log_retention_s:
                    offset += 1
                elif not self._wipe(keys, session, life.version):
                    offset += 1  # somebody uses it after all
                elif allows(session.state, "expire"):
                    yield replace(session, state=step(session.state, "expire"))
            if len(page) < PAGE:
                return

"""The session store in a Valkey server or cluster, which several gateways may share.

A write reads what it must know, puts the session's place into the indexes that span sessions, then changes all that
belongs to the session in one step of the server, if nobody else has written it meanwhile; else it begins again. So a
writer that dies in between leaves an index that says too much, which every reader checks, and never half a write.

Here is the contract alone. Where what it does is done: `logs` reads paths and searches, `finding` finds who holds an
entry, `making` makes sessions and branches, `writing` changes them, `ending` wipes and sweeps, `crashes` ends the turns
of a gateway that died (`turns` tells them from those that run), `verify` looks for damage. Below them `rows` has the
names and forms of what stands in the server, `indexes` the places that span sessions, `reader` pages, `scripts` what
the server does in one step, and `link` the line to it. Time to live and retention are the sweep's, as in the other
stores: no key of a log expires by itself. What outlives a crash of the server is what its append-only file has.

Needs the package `valkey` (`pip install 'kvsteward[valkey]'`). Knows no asyncio and no engines. Invariants: each call
is one transaction on its session; every answer of the server is bounded: by a page, a limit, or what the caller gave.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvsteward.errors import InvariantError, NotFoundError, StoreError
from kvsteward.sessions import chain
from kvsteward.sessions.base import Decision, Entry, Fault, Found, Session, SessionStore
from kvsteward.sessions.needles import hash_prefix
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey import scripts as scripts
from kvsteward.sessions.valkey.crashes import Crashes
from kvsteward.sessions.valkey.ending import Ender
from kvsteward.sessions.valkey.finding import Finder
from kvsteward.sessions.valkey.link import Link, check_server
from kvsteward.sessions.valkey.logs import Logs
from kvsteward.sessions.valkey.making import Maker
from kvsteward.sessions.valkey.reader import PAGE, Life, Reader
from kvsteward.sessions.valkey.rows import Keys
from kvsteward.sessions.valkey.turns import OpenTurns
from kvsteward.sessions.valkey.verify import all_faults, faults_of
from kvsteward.sessions.valkey.writing import Plan, Writer
from kvsteward.sessions.vectors import VectorIndex, without_numpy

log = logging.getLogger("kvsteward")

LEASE_S = 60.0
"""Four sweeps."""
_SLOW_S = 3600.0


class ValkeyStore(SessionStore):
    """Keeps logs in the server at `url` (see `link.Link`). Any number of gateways may use it at once.

    `lease_s`: how long a gateway may be silent before another takes its open turns for dead. Raises ConfigError for a
    URL or a server that cannot be used, StoreUnavailableError where the server cannot be reached.
    """

    def __init__(self, url: str, *, lease_s: float = LEASE_S, timeout_s: float = 5.0) -> None:
        self._link = link = Link(url, timeout_s=timeout_s)
        self._reader = reader = Reader(link)
        self._turns = OpenTurns(link, lease_s)
        self._logs, self._finder = Logs(link, reader), Finder(link, reader)
        self._writer = Writer(link, reader, self._turns)
        self._ender = Ender(link, reader, self._writer)
        self._maker = Maker(link, reader, self._logs, self._writer, self._ender)
        self._crashes = Crashes(reader, self._turns, self._writer)
        self._closing = threading.Lock()
        self._closed = False
        try:
            check_server(link)
        except BaseException:
            link.close()
            raise

    # -- sessions

    def create(self, session: Session) -> None:
        self._maker.create(session)

    def branch(self, session: Session, source_id: str, head: str) -> None:
        self._maker.branch(session, source_id, head)

    def get(self, session_id: str) -> Session | None:
        return self._reader.life(Keys(session_id), session_id).session

    def list(self, *, tenant: str | None = None, limit: int = 100, offset: int = 0) -> Sequence[Session]:
        index = rows.USED if tenant is None else rows.used_of(tenant)
        found: list[Session] = []
        at = max(offset, 0)
        while len(found) < limit:
            count = min(limit - len(found), PAGE)
            ids = [rows.string(id_) for id_ in self._link.ask("ZRANGE", index, at, at + count - 1)]
            at += len(ids)
            for id_, life in zip(ids, self._reader.lives(ids), strict=True):
                if life.session is not None and tenant in {None, life.session.tenant}:
                    found.append(life.session)
                elif not life.version:  # a writer died. One that is only slow was not last used an hour ago
                    self._link.run(scripts.DROP, [index], [rows.text(id_), _SLOW_S - time.time(), "inf"])
            if len(ids) < count:
                break
        return found

    def amend(
        self,
        session_id: str,
        change: Callable[[Session], Session],
        entries: Sequence[Entry] = (),
        decisions: Sequence[Decision] = (),
        *,
        end_draft: str | None = None,
    ) -> Session | None:
        ended = () if end_draft is None else (rows.text(end_draft),)
        needed = [hash_ for entry in entries for hash_ in (entry.hash, entry.parent)]
        needed += [decision.at for decision in decisions]

        def plan(life: Life, session: Session, depth_of: chain.DepthOf) -> Plan:
            changed = change(session)
            chain.check_append(changed, entries, decisions, depth_of)
            return Plan(changed, entries, decisions, ended)

        return self._writer.write(session_id, plan, needed)

    # -- the log

    def find(self, hashes: Sequence[str], *, session_id: str | None = None) -> Sequence[Found]:
        unique = list(dict.fromkeys(hashes))
        order = {hash_: at for at, hash_ in enumerate(unique)}
        found = self._finder.find(unique, session_id)
        return sorted(found, key=lambda one: (order[one.hash], -one.last_used_s, one.session_id))

    def find_response(self, tenant: str, response_id: str) -> Found | None:
        found = self._finder.find_response(tenant, response_id)
        return min(found, key=lambda one: (-one.last_used_s, one.session_id, one.hash), default=None)

    def path(self, session_id: str, head: str | None = None) -> Sequence[Entry]:
        session = self._reader.session(session_id)
        return self._logs.path(session, session.head if head is None else head)

    def on_path(self, session_id: str, head: str, hashes: Sequence[str]) -> frozenset[str]:
        return frozenset(hashes) & self._path_to(self._reader.session(session_id), head)

    def _path_to(self, session: Session, head: str) -> frozenset[str]:
        return frozenset(meta.hash for meta in self._logs.walk(session, head, unknown_is_empty=True))

    def entries(self, session_id: str, *, offset: int = 0, limit: int = 100) -> Sequence[Entry]:
        return self._logs.page(self._reader.session(session_id), max(offset, 0), max(limit, 0))

    def decisions(self, session_id: str) -> Sequence[Decision]:
        keys = Keys(session_id)
        self._reader.session(session_id)
        return [rows.checked_decision(session_id, value) for value in self._reader.all_of(keys[rows.DECISIONS])]

    def item(self, session_id: str, prefix: str) -> Entry | None:
        prefix = hash_prefix(prefix)
        keys, session = Keys(session_id), self._reader.session(session_id)
        names = keys[rows.NAMES]
        found = self._link.ask("ZRANGE", names, f"[{prefix}", f"({prefix}g", "BYLEX", "LIMIT", 0, 2)
        if len(found) > 1:
            raise NotFoundError(f"two items start with {prefix}", hint="Give more digits.")
        return next(self._logs.entries(session, self._reader.metas(keys, found)), None)

    def search(self, session_id: str, needle: str, *, limit: int = 20) -> Sequence[Entry]:
        return self._logs.holding(self._reader.session(session_id), needle, limit)

    def lookup(self, session_id: str, query: str, *, head: str | None = None, limit: int = 20) -> Sequence[Entry]:
        session = self._reader.session(session_id)
        among = None if head is None else self._path_to(session, head)
        found = self._logs.holding(session, query, limit, among)
        return found or self._logs.ranked(session, query, limit, among)

    def vectors(self) -> VectorIndex:
        try:
            from kvsteward.sessions.valkey.vectors import ValkeyVectors
        except ModuleNotFoundError as error:
            raise without_numpy(error) from error
        return ValkeyVectors(self._link.another())

    # -- drafts and crashes

    def draft(self, session_id: str, turn_id: str, parent: str, text: bytes, *, now: float) -> None:
        keys = Keys(session_id)
        with self._turns.noting(session_id) as noted:
            self._link.ask_all(noted)
            kept = self._link.run(
                scripts.DRAFT,
                [keys[rows.ROW], keys[rows.ENTRIES], keys[rows.DRAFTS]],
                [rows.text(turn_id), rows.text(parent), rows.draft_head(self._turns.owner, parent), text],
            )
        if kept == 0:
            raise NotFoundError(f"no session {session_id!r}")
        if kept < 0:
            raise InvariantError(f"session {session_id}: the parent {parent} is not in its log")

    def recover(self, *, now: float) -> int:
        return self._crashes.end_own(now) + self._crashes.end_dead(now)

    # -- the end

    def delete(self, session_id: str) -> bool:
        return self._ender.delete(session_id)

    def sweep(self, *, now: float, log_retention_s: float) -> Sequence[Session]:
        self._turns.tidy()
        self._crashes.end_dead(now)
        over = [*self._ender.expired(now), *self._ender.outlived(now, log_retention_s)]
        return sorted(over, key=lambda session: (session.last_used_s, session.id))

    def verify(self, session_id: str | None = None) -> Sequence[Fault]:
        return all_faults(self._link) if session_id is None else faults_of(self._link, session_id)

    def close(self) -> None:
        """Gives the lease back. A second call does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            self._turns.close()
        except StoreError as error:
            log.warning("the store was closed without a word to it: %s", error.message)
        finally:
            self._link.close()

"""The session store in a Valkey server or cluster, which several gateways may share.

A write reads what it must know, puts the session's place into the indexes that span sessions, then changes all that
belongs to the session in one step of the server, if nobody else has written it meanwhile; else it begins again. So a
writer that dies in between leaves an index that says too much, which every reader checks, and never half a write.

`rows` has the names and forms of what stands in the server, `turns` how the turns of a gateway that died are told from
those that run. Time to live and retention are the sweep's, as in the other stores: no key of a log expires by itself.
What outlives a crash of the server is what its append-only file has.

Needs the package `valkey` (`pip install 'kvsteward[valkey]'`). Knows no asyncio and no engines. Invariants: each call
is one transaction on its session; every answer of the server is bounded: by a page, a limit, or what the caller gave.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvsteward.errors import (
    ConfigError,
    CorruptLogError,
    InvariantError,
    NotFoundError,
    StateError,
    StoreError,
    StoreUnavailableError,
)
from kvsteward.sessions import chain, words
from kvsteward.sessions.base import Decision, Entry, Fault, Found, Session, SessionStore, page_of
from kvsteward.sessions.blobs import cut, mend
from kvsteward.sessions.lifecycle import allows, step
from kvsteward.sessions.needles import hash_prefix, needles
from kvsteward.sessions.ranking import Ranking
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey import scripts as scripts
from kvsteward.sessions.valkey.link import Command, Link
from kvsteward.sessions.valkey.reader import PAGE, Life, Reader, pages, sized
from kvsteward.sessions.valkey.rows import Holder, Keys, Meta
from kvsteward.sessions.valkey.scripts import Changes
from kvsteward.sessions.valkey.turns import OpenTurns
from kvsteward.sessions.valkey.verify import session_faults
from kvsteward.sessions.vectors import VectorIndex, without_numpy
from kvsteward.wire.fingerprint import root

T = TypeVar("T")

log = logging.getLogger("kvsteward")

LEASE_S = 60.0
"""Four sweeps."""
_TRIES = 50
_MIN_VERSION = (7,)
_VERIFY_TRIES = 5
_SLOW_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be written to a session."""

    session: Session
    entries: Sequence[Entry] = ()
    decisions: Sequence[Decision] = ()
    ended: Sequence[bytes] = ()
    """Turns whose drafts go."""


class ValkeyStore(SessionStore):
    """Keeps logs in the server at `url` (see `link.Link`). Any number of gateways may use it at once.

    `lease_s`: how long a gateway may be silent before another takes its open turns for dead. Raises ConfigError for a
    URL or a server that cannot be used, StoreUnavailableError where the server cannot be reached.
    """

    def __init__(self, url: str, *, lease_s: float = LEASE_S, timeout_s: float = 5.0) -> None:
        self._link = Link(url, timeout_s=timeout_s)
        self._reader = Reader(self._link)
        self._turns = OpenTurns(self._link, lease_s)
        self._versions = itertools.count(1)
        self._closing = threading.Lock()
        self._closed = False
        try:
            self._check_server()
        except BaseException:
            self._link.close()
            raise

    # -- sessions

    def create(self, session: Session) -> None:
        chain.check_head(session, lambda _: None)
        keys = Keys(session.id)
        while True:
            life = self._reader.life(keys, session.id)
            if life.session is not None:
                raise StateError(f"session {session.id!r} exists")
            if life.version:
                self._purge(keys, session.id, life.version)
                continue
            uid = uuid.uuid4().hex
            with self._noted(session) as noted:
                self._link.ask_all([*noted, *_places(session)])
                changes = Changes()
                changes.add("HSET", rows.ROW, "u", uid, *self._row(session, Life(None), 0, 0))
                if self._commit(keys, b"", changes):
                    return

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

        def plan(life: Life, session: Session, depth_of: chain.DepthOf) -> _Plan:
            changed = change(session)
            chain.check_append(changed, entries, decisions, depth_of)
            return _Plan(changed, entries, decisions, ended)

        return self._write(session_id, plan, needed)

    # -- the log

    def find(self, hashes: Sequence[str], *, session_id: str | None = None) -> Sequence[Found]:
        unique = list(dict.fromkeys(hashes))
        order = {hash_: at for at, hash_ in enumerate(unique)}
        found: list[Found] = []
        for page in pages(unique):
            found += self._reader.find_all(page) if session_id is None else self._reader.find_in(session_id, page)
        return sorted(found, key=lambda one: (order[one.hash], -one.last_used_s, one.session_id))

    def find_response(self, tenant: str, response_id: str) -> Found | None:
        key = rows.answer_key(tenant, response_id)
        found: list[Found] = []
        for members in self._reader.members([key]):
            found += self._reader.held(
                [(key, holder) for _, member in members if (holder := rows.holder_of(member))], tenant
            )
        return min(found, key=lambda one: (-one.last_used_s, one.session_id, one.hash), default=None)

    def path(self, session_id: str, head: str | None = None) -> Sequence[Entry]:
        keys, session = Keys(session_id), self._reader.session(session_id)
        metas = self._reader.walk(keys, session, session.head if head is None else head)
        return list(self._reader.entries(keys, session, metas))

    def entries(self, session_id: str, *, offset: int = 0, limit: int = 100) -> Sequence[Entry]:
        keys, session = Keys(session_id), self._reader.session(session_id)
        first = max(offset, 0)
        names = self._link.ask("LRANGE", keys[rows.ORDER], first, first + limit - 1) if limit > 0 else ()
        return page_of(self._reader.entries(keys, session, self._reader.metas(keys, names)))

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
        return next(self._reader.entries(keys, session, self._reader.metas(keys, found)), None)

    def search(self, session_id: str, needle: str, *, limit: int = 20) -> Sequence[Entry]:
        keys, session = Keys(session_id), self._reader.session(session_id)
        forms = needles(needle)
        found = [
            (-meta.created_s, -place, meta)
            for place, meta, left in self._reader.log(keys, session)
            if any(form in left for form in forms)
        ]
        return self._reader.newest(keys, session, found, limit)

    def lookup(self, session_id: str, query: str, *, head: str | None = None, limit: int = 20) -> Sequence[Entry]:
        keys, session = Keys(session_id), self._reader.session(session_id)
        forms, asked = needles(query), words.words(query)
        on_path: set[str] | None = None
        if head is not None:
            on_path = {meta.hash for meta in self._reader.walk(keys, session, head, unknown_is_empty=True)}
        found: list[tuple[float, int, Meta]] = []
        metas: list[Meta] = []
        with Ranking(session_id) as ranking:
            for place, meta, left in self._reader.log(keys, session):
                metas.append(meta)
                if (on_path is None or meta.hash in on_path) and any(form in left for form in forms):
                    found.append((-meta.created_s, -place, meta))
                if not found and asked:
                    whole = mend(left, meta.places, self._reader.blobs(keys, [meta]).get)
                    ranking.add(place, words.searched_text(whole))
            if found:
                return self._reader.newest(keys, session, found, limit)
            best = [metas[place] for place in ranking.best(asked)]
        best = [meta for meta in best if on_path is None or meta.hash in on_path]
        return list(self._reader.entries(keys, session, best[: max(limit, 0)]))

    def on_path(self, session_id: str, head: str, hashes: Sequence[str]) -> frozenset[str]:
        keys, session = Keys(session_id), self._reader.session(session_id)
        path = self._reader.walk(keys, session, head, unknown_is_empty=True)
        return frozenset(hashes) & {meta.hash for meta in path}

    def vectors(self) -> VectorIndex:
        try:
            from kvsteward.sessions.valkey.vectors import ValkeyVectors
        except ModuleNotFoundError as error:
            raise without_numpy(error) from error
        return ValkeyVectors(self._link.another())

    def branch(self, session: Session, source_id: str, head: str) -> None:
        keys, source_keys = Keys(session.id), Keys(source_id)
        source = self._reader.session(source_id)
        chain.check_tenant(session, source)
        if self.get(session.id) is not None:
            raise StateError(f"session {session.id!r} exists")
        metas = self._reader.walk(source_keys, source, head)
        session = replace(session, head=head)
        version, uid = self._begun(keys, session)
        for page in sized(metas):
            self._link.ask_all(_holders("SADD", session.id, session.tenant, uid, page))
            lefts, blobs = self._reader.lefts(source_keys, source, page), self._reader.blobs(source_keys, page)
            changes = Changes()
            _add_entries(changes, list(zip(page, lefts, strict=True)))
            _add_blobs(changes, blobs)
            version = self._go_on(keys, session.id, version, changes)
        on_path, count = {meta.hash for meta in metas}, 0
        for values in self._reader.lists(source_keys[rows.DECISIONS]):
            kept = [value for value in values if rows.decode_decision(source_id, value)[0].at in on_path]
            changes, count = Changes(), count + len(kept)
            changes.add_all("RPUSH", rows.DECISIONS, kept)
            version = self._go_on(keys, session.id, version, changes)
        changes = Changes()
        changes.add("HDEL", rows.ROW, "t", "b")
        changes.add("HSET", rows.ROW, *self._row(session, Life(None), len(metas), count))
        with self._noted(session) as noted:
            self._link.ask_all([*noted, *_places(session)])
            self._go_on(keys, session.id, version, changes)

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
        return self._end_turns(self._turns.owner, now) + self._end_dead(now)

    def _end_dead(self, now: float) -> int:
        return sum(self._end_turns(owner, now) for owner in list(self._turns.ended_owners()))

    def _end_turns(self, owner: str, now: float) -> int:
        """Ends all turns of a process that is no more (or, of this one, that has just begun)."""
        count = 0
        over: list[str] = []
        for session_id in self._turns.sessions_of(owner):
            try:
                count += self._interrupt(session_id, owner, now)
            except CorruptLogError as error:  # one damaged session must not keep a gateway from starting
                log.error("cannot end the turns of %s: %s", session_id, error.message)
            else:
                over.append(session_id)
        self._turns.ended(owner, over)
        return count

    def _interrupt(self, session_id: str, owner: str, now: float) -> int:
        keys, count = Keys(session_id), 0

        def plan(life: Life, session: Session, depth_of: chain.DepthOf) -> _Plan | None:
            nonlocal count
            drafts = [draft for draft in self._reader.drafts(keys, session_id) if draft.owner == owner]
            entries: list[Entry] = []
            ended: list[bytes] = []
            for draft in sorted(drafts, key=lambda draft: -draft.number):
                try:
                    depth = chain.depth_below(session, draft.parent, depth_of)
                except InvariantError:  # damaged: it stays for `verify` to tell
                    continue
                entries.append(chain.interrupted(draft.parent, depth, draft.text, now=now))
                ended.append(draft.turn_id)
                if session.head == draft.parent:
                    session = replace(session, head=entries[-1].hash)
            count = len(ended)
            crashed = life.opener == owner and allows(session.state, "crash")
            if crashed:
                session = replace(session, state=step(session.state, "crash"))
            return _Plan(session, entries, (), ended) if crashed or ended else None

        self._write(session_id, plan, ())
        return count

    # -- the end

    def delete(self, session_id: str) -> bool:
        keys = Keys(session_id)
        while True:
            life = self._reader.life(keys, session_id)
            if life.session is None:
                if life.version:
                    self._purge(keys, session_id, life.version)
                return False
            if self._wipe(keys, life.session, life.version):
                return True

    def _wipe(self, keys: Keys, session: Session, version: bytes) -> bool:
        """Texts first, in one step, then the rest. False if somebody has written to the session."""
        changes = Changes()
        for key in (rows.RAW, rows.BLOBS, rows.DECISIONS, rows.DRAFTS, rows.VECTORS, rows.VECTOR_ORDER):
            changes.add("UNLINK", key)
        changes.add("HDEL", rows.ROW, "s", "root", "o", "n", "d", "drafts", "vectors")
        after = self._version()
        changes.add("HSET", rows.ROW, "v", after, *_hidden(session))
        if not self._commit(keys, version, changes, scripts.WIPE):
            return False
        self._purge(keys, session.id, after)
        return True

    def _purge(self, keys: Keys, session_id: str, version: bytes) -> None:
        """Takes away what is left of a session that is wiped, or was never finished. Whoever stops in between leaves
        enough to go on from: a place in the index of sessions."""
        uid, tenant, bounds = self._link.ask("HMGET", keys[rows.ROW], "u", "t", "b")
        tenant, uid = rows.string(tenant or b""), rows.string(uid or b"")
        for page in self._reader.orders(keys):
            metas = self._reader.metas(keys, page)
            self._link.ask_all(_holders("SREM", session_id, tenant, uid, metas))
        changes = Changes()
        for key in (rows.ENTRIES, rows.RAW, rows.BLOBS, rows.ORDER, rows.NAMES, rows.DECISIONS, rows.DRAFTS, rows.ROW):
            changes.add("UNLINK", key)
        if self._commit(keys, version, changes, scripts.WIPE):
            self._forget(session_id, tenant, *rows.decode_bounds(session_id, bounds))

    def _forget(self, session_id: str, tenant: str | None, used_s: float, due_s: float) -> None:
        """Takes a session out of the indexes, but for one that was used later."""
        name = rows.text(session_id)
        indexes = [rows.USED] if tenant is None else [rows.USED, rows.used_of(tenant)]
        for index in indexes:
            self._link.run(scripts.DROP, [index], [name, -used_s, "inf"])
        self._link.run(scripts.DROP, [rows.DUE], [name, "-inf", due_s])

    def sweep(self, *, now: float, log_retention_s: float) -> Sequence[Session]:
        self._turns.tidy()
        self._end_dead(now)
        over = [*self._expired(now), *self._outlived(now, log_retention_s)]
        return sorted(over, key=lambda session: (session.last_used_s, session.id))

    def _expired(self, now: float) -> Iterator[Session]:
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
                self._purge(keys, session_id, life.version)
            self._forget(session_id, None, now, now)
            return False, None
        expired: Session | None = None

        def plan(_: Life, session: Session, __: chain.DepthOf) -> _Plan | None:
            nonlocal expired
            expired = None
            if allows(session.state, "expire") and now - session.last_used_s > session.ttl_s:
                expired = replace(session, state=step(session.state, "expire"))
            return None if expired is None else _Plan(expired)

        stored = self._write(session_id, plan, (), indexed=False)
        if stored is None or (expired is None and (stored.state == "active" or allows(stored.state, "expire"))):
            return stored is not None, None
        self._link.run(scripts.DROP, [rows.DUE], [rows.text(session_id), "-inf", now])
        return False, expired

    def _outlived(self, now: float, log_retention_s: float) -> Iterator[Session]:
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
                        self._purge(keys, session_id, life.version)
                    self._forget(session_id, None, now - log_retention_s, now)
                elif session.state == "active" or now - session.last_used_s <= log_retention_s:
                    offset += 1
                elif not self._wipe(keys, session, life.version):
                    offset += 1  # somebody uses it after all
                elif allows(session.state, "expire"):
                    yield replace(session, state=step(session.state, "expire"))
            if len(page) < PAGE:
                return

    # -- verify

    def verify(self, session_id: str | None = None) -> Sequence[Fault]:
        if session_id is not None:
            return self._verify_one(session_id)
        found: list[Fault] = []
        seen = set[str]()
        for members in self._reader.scanned("ZSCAN", rows.USED):
            for name, _ in members:
                id_ = rows.string(name)
                if id_ in seen:
                    continue
                seen.add(id_)
                try:
                    found += self._verify_one(id_)
                except NotFoundError:
                    continue  # deleted since
        return found

    def _verify_one(self, session_id: str) -> Sequence[Fault]:
        """Entries may be added while they are read: then it is done again."""
        keys = Keys(session_id)
        found: list[Fault] = []
        for _ in range(_VERIFY_TRIES):
            try:
                life = self._reader.life(keys, session_id)
            except CorruptLogError as error:
                return [Fault(session_id, "", error.message)]
            if life.session is None:
                raise NotFoundError(f"no session {session_id!r}")
            found = session_faults(self._link, keys, life.session, life)
            if not found or self._link.ask("HGET", keys[rows.ROW], "v") == life.version:
                break
        return found

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

    # -- writing

    def _write(
        self,
        session_id: str,
        plan: Callable[[Life, Session, chain.DepthOf], _Plan | None],
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
            self._link.ask_all(_holders("SREM", session.id, session.tenant, uid, page))
        self._forget(session.id, session.tenant, session.last_used_s, session.last_used_s + session.ttl_s)

    def _written(self, keys: Keys, life: Life, todo: _Plan, added: Sequence[Entry], *, indexed: bool) -> bool:
        session = todo.session
        cuts = [(entry, *cut(entry.raw)) for entry in added]
        items = [(rows.meta_of(entry, left, places), left) for entry, left, places, _ in cuts]
        changes = Changes()
        _add_entries(changes, items)
        _add_blobs(changes, {hash_: data for *_, taken in cuts for hash_, data in taken.items()})
        changes.add_all("RPUSH", rows.DECISIONS, [rows.encode_decision(decision) for decision in todo.decisions])
        changes.add_all("HDEL", rows.DRAFTS, todo.ended)
        counts = (life.entries + len(added), life.decisions + len(todo.decisions))
        changes.add("HSET", rows.ROW, *self._row(session, life, *counts))
        with self._noted(session) as noted:
            places = [*noted, *(_places(session) if indexed else ())]
            places += _holders("SADD", session.id, session.tenant, life.uid, [meta for meta, _ in items])
            for page in pages(places):
                self._link.ask_all(page)
            return self._commit(keys, life.version, changes)

    def _commit(self, keys: Keys, version: bytes, changes: Changes, script: Any = scripts.COMMIT) -> bool:
        return bool(self._link.run(script, keys.all, [version, *changes.words]) == 1)

    def _row(self, session: Session, before: Life, entries: int, decisions: int) -> tuple[Any, ...]:
        """Names and values of a session's row, with a version of its own. Who made it active stays."""
        opener = ""
        if session.state == "active":
            was_active = before.session is not None and before.session.state == "active"
            opener = (before.opener if was_active else "") or self._turns.owner
        return (
            *("s", rows.encode_session(session), "v", self._version(), "root", root(session.tenant), "o", opener),
            *("n", entries, "d", decisions),
        )

    def _version(self) -> bytes:
        return f"{self._turns.owner}:{next(self._versions)}".encode()

    @contextmanager
    def _noted(self, session: Session) -> Iterator[Sequence[Command]]:
        """Around the write of a row: what must be sent before it where a turn is open."""
        if session.state != "active":
            yield ()
            return
        with self._turns.noting(session.id) as noted:
            yield noted

    def _begun(self, keys: Keys, session: Session) -> tuple[bytes, str]:
        """A session that is being made and is not seen yet: its version and its uid."""
        while True:
            life = self._reader.life(keys, session.id)
            if life.session is not None:
                raise StateError(f"session {session.id!r} exists")
            if life.version:
                self._purge(keys, session.id, life.version)
                continue
            self._link.ask_all(_places(session))
            version, uid = self._version(), uuid.uuid4().hex
            changes = Changes()
            changes.add("HSET", rows.ROW, "u", uid, "v", version, *_hidden(session))
            if self._commit(keys, b"", changes):
                return version, uid

    def _go_on(self, keys: Keys, session_id: str, version: bytes, changes: Changes) -> bytes:
        """One more step of a session that is being made: its next version."""
        after = self._version()
        changes.add("HSET", rows.ROW, "v", after)
        if not self._commit(keys, version, changes):
            raise StoreUnavailableError(f"session {session_id} was wiped while it was made", retry_after_s=1.0)
        return after

    # -- the server

    def _check_server(self) -> None:
        """Raises ConfigError for a server that is too old or may throw logs away; says so where it keeps no file."""
        self._link.ask("PING")
        if self._link.cluster:
            return
        try:
            info = self._link.ask("INFO")
        except StoreUnavailableError:
            raise
        except StoreError as error:  # a user who may not ask
            log.info("the settings of %s are not known: %s", self._link.place, error.message)
            return
        version = str(info.get("redis_version", "7"))
        if tuple(int(part) for part in version.split(".")[:1] if part.isdigit()) < _MIN_VERSION:
            raise ConfigError(
                f"{self._link.place} speaks version {version}", hint="Use Valkey 7.2 or later.", param="store"
            )
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if info.get("maxmemory") and policy.startswith("allkeys"):
            raise ConfigError(
                f"{self._link.place} throws keys away when its memory is full (maxmemory-policy {policy})",
                hint="Set maxmemory-policy noeviction: no log may be lost.",
                param="store",
            )
        if not info.get("aof_enabled"):
            log.warning("%s has no append-only file: a crash of it loses logs; set appendonly yes", self._link.place)


def _places(session: Session) -> list[Command]:
    """A session's places in the indexes of sessions."""
    name = rows.text(session.id)
    return [
        ("ZADD", rows.USED, -session.last_used_s, name),
        ("ZADD", rows.used_of(session.tenant), -session.last_used_s, name),
        ("ZADD", rows.DUE, session.last_used_s + session.ttl_s, name),
    ]


def _holders(name: str, session_id: str, tenant: str, uid: str, metas: Iterable[Meta | Entry]) -> list[Command]:
    """Sets ("SADD") or takes back ("SREM") the places of entries in the indexes of entries and answers."""
    commands: list[Command] = []
    for meta in metas:
        member = Holder(uid, session_id, meta.hash).member()
        commands.append((name, rows.entry_key(meta.hash), member))
        if meta.response_id is not None:
            commands.append((name, rows.answer_key(tenant, meta.response_id), member))
    return commands


def _hidden(session: Session) -> tuple[Any, ...]:
    """Of a row that is not seen: what is needed to take it away."""
    return ("t", rows.text(session.tenant), "b", rows.encode_bounds(session))


def _add_entries(changes: Changes, items: Sequence[tuple[Meta, bytes]]) -> None:
    """Each with its bytes without data URLs."""
    names = [rows.text(meta.hash) for meta, _ in items]
    beside = [rows.encode_meta(meta) for meta, _ in items]
    changes.add_all("HSET", rows.ENTRIES, [word for pair in zip(names, beside, strict=True) for word in pair])
    lefts = [left for _, left in items]
    changes.add_all("HSET", rows.RAW, [word for pair in zip(names, lefts, strict=True) for word in pair])
    changes.add_all("RPUSH", rows.ORDER, names)
    changes.add_all("ZADD", rows.NAMES, [word for name in names for word in (0, name)])


def _add_blobs(changes: Changes, blobs: dict[str, bytes]) -> None:
    changes.add_all("HSET", rows.BLOBS, [word for name, data in blobs.items() for word in (rows.text(name), data)])

"""The session store in one SQLite file.

One connection in WAL mode behind a lock, called from worker threads. With `synchronous=NORMAL` a commit is in the
kernel's hands when the call returns, so it outlives this process however it ends; only a power cut can take the
newest commits (never part of one). `secure_delete` overwrites what is wiped.

Knows no asyncio and no engines. Invariant: each call is one transaction, and every statement is bounded: by a limit,
by one session, by the rows that the caller passed, or (`sweep`) by the sessions that are over.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsteward.errors import CorruptLogError, NotFoundError, StateError, StoreError
from kvsteward.sessions import chain, rows, words
from kvsteward.sessions.base import Decision, Entry, Fault, Found, Session, SessionStore, page_of
from kvsteward.sessions.blobs import cut
from kvsteward.sessions.integrity import Stored, faults
from kvsteward.sessions.lifecycle import allows, step
from kvsteward.sessions.migrations import migrate
from kvsteward.sessions.needles import hash_prefix, needles
from kvsteward.sessions.vectors import VectorIndex, without_numpy

BUSY_TIMEOUT_S = 5.0
FIND_BATCH = 1000
_WAL_LIMIT_BYTES = 64 * 2**20

_SESSION_MARKS = ", ".join("?" for _ in rows.SESSION.split(", "))
_SESSION_SET = ", ".join(f"{column} = ?" for column in rows.SESSION.split(", ")[1:])

# Depth falls by one at each step, so the walk ends even where a parent was tampered with.
_WALK = """WITH RECURSIVE walk (id, parent, depth) AS (
    SELECT rowid, parent, depth FROM entries WHERE session_id = :session AND hash = :head
    UNION ALL
    SELECT e.rowid, e.parent, e.depth FROM walk JOIN entries e
    ON e.session_id = :session AND e.hash = walk.parent AND e.depth = walk.depth - 1)
"""
_FOUND_ENTRY = ", ".join(f"e.{column}" for column in rows.ENTRY.split(", "))
_PATH = f"{_WALK} SELECT {rows.ENTRY} FROM entries WHERE rowid IN (SELECT id FROM walk) ORDER BY depth"


class SqliteStore(SessionStore):
    """Keeps logs in the file at `path` (made, with its folders, if absent). One gateway per file.

    Raises StoreError if the file cannot be opened, is no database, or is newer than this code.
    """

    def __init__(self, path: Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self._path = str(path)
        self._lock = threading.Lock()
        _make_private(path)
        try:
            self._db = sqlite3.connect(
                path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False, cached_statements=64
            )
        except sqlite3.Error as error:
            raise rows.store_error(error, self._path) from error
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._db.close()
            raise rows.store_error(error, self._path) from error
        except StoreError:
            self._db.close()
            raise

    def create(self, session: Session) -> None:
        with self._write() as db:
            self._insert_session(db, session)
            chain.check_head(session, lambda _: None)

    def get(self, session_id: str) -> Session | None:
        with self._read() as db:
            row = db.execute(f"SELECT {rows.SESSION} FROM sessions WHERE id = ?", (session_id,)).fetchone()
            return None if row is None else rows.session_of(row)

    def list(self, *, tenant: str | None = None, limit: int = 100, offset: int = 0) -> Sequence[Session]:
        where, values = ("", ()) if tenant is None else ("WHERE tenant = ?", (tenant,))
        sql = f"SELECT {rows.SESSION} FROM sessions {where} ORDER BY last_used_s DESC, id LIMIT ? OFFSET ?"
        with self._read() as db:
            return [rows.session_of(row) for row in db.execute(sql, (*values, max(limit, 0), max(offset, 0)))]

    def find(self, hashes: Sequence[str], *, session_id: str | None = None) -> Sequence[Found]:
        where, more = ("", ()) if session_id is None else (" AND e.session_id = ?", (session_id,))
        unique = list(dict.fromkeys(hashes))
        order = {hash_: at for at, hash_ in enumerate(unique)}
        found: list[Found] = []
        with self._read() as db:
            for start in range(0, len(unique), FIND_BATCH):
                batch = json.dumps(unique[start : start + FIND_BATCH])
                found += _found(db, f"e.hash IN (SELECT value FROM json_each(?)){where}", batch, *more)
        return sorted(found, key=lambda one: (order[one.hash], -one.last_used_s, one.session_id))

    def find_response(self, tenant: str, response_id: str) -> Found | None:
        with self._read() as db:
            found = _found(db, "e.response_id = ? AND s.tenant = ?", response_id, tenant)
        return min(found, key=lambda one: (-one.last_used_s, one.session_id, one.hash), default=None)

    def amend(
        self,
        session_id: str,
        change: Callable[[Session], Session],
        entries: Sequence[Entry] = (),
        decisions: Sequence[Decision] = (),
        *,
        end_draft: str | None = None,
    ) -> Session | None:
        with self._write() as db:
            row = db.execute(f"SELECT {rows.SESSION} FROM sessions WHERE id = ?", (session_id,)).fetchone()
            if row is None:
                return None
            session = change(rows.session_of(row))
            chain.check_append(session, entries, decisions, lambda hash_: _depth(db, session.id, hash_))
            self._update(db, session)
            _add_entries(db, session.id, entries)
            _add_decisions(db, session.id, decisions)
            if end_draft is not None:
                db.execute("DELETE FROM drafts WHERE session_id = ? AND turn_id = ?", (session.id, end_draft))
            return session

    def path(self, session_id: str, head: str | None = None) -> Sequence[Entry]:
        with self._read() as db:
            session = self._session(db, session_id)
            return _walk(db, session, session.head if head is None else head)

    def entries(self, session_id: str, *, offset: int = 0, limit: int = 100) -> Sequence[Entry]:
        places = "SELECT rowid FROM entries WHERE session_id = ? ORDER BY rowid LIMIT ? OFFSET ?"
        sql = f"SELECT {rows.ENTRY} FROM entries WHERE rowid IN ({places}) ORDER BY rowid"
        with self._read() as db:
            self._session(db, session_id)
            found = db.execute(sql, (session_id, max(limit, 0), max(offset, 0)))
            return page_of(_entry(db, session_id, row) for row in found)

    def decisions(self, session_id: str) -> Sequence[Decision]:
        with self._read() as db:
            self._session(db, session_id)
            return [rows.decision_of(row) for row in _decision_rows(db, session_id)]

    def item(self, session_id: str, prefix: str) -> Entry | None:
        prefix = hash_prefix(prefix)
        sql = f"SELECT {rows.ENTRY} FROM entries WHERE session_id = ? AND hash >= ? AND hash < ? LIMIT 2"
        with self._read() as db:
            self._session(db, session_id)
            matches = db.execute(sql, (session_id, prefix, prefix + "g")).fetchall()
            if len(matches) > 1:
                raise NotFoundError(f"two items start with {prefix}", hint="Give more digits.")
            return _entry(db, session_id, matches[0]) if matches else None

    def search(self, session_id: str, needle: str, *, limit: int = 20) -> Sequence[Entry]:
        forms = needles(needle)
        holds = " OR ".join(["instr(raw, ?)"] * len(forms))
        sql = (
            f"SELECT {rows.ENTRY} FROM entries WHERE session_id = ? AND ({holds}) "
            "ORDER BY created_s DESC, rowid DESC LIMIT ?"
        )
        with self._read() as db:
            self._session(db, session_id)
            return [_entry(db, session_id, row) for row in db.execute(sql, (session_id, *forms, max(limit, 0)))]

    def lookup(self, session_id: str, query: str, *, head: str | None = None, limit: int = 20) -> Sequence[Entry]:
        forms, asked = needles(query), words.words(query)
        holds = " OR ".join(f"instr(raw, :form{n})" for n in range(len(forms)))
        values: dict[str, object] = {"session": session_id, "head": head}
        values |= {"limit": max(limit, 0), "match": words.match(session_id, asked)}
        values |= {f"form{n}": form for n, form in enumerate(forms)}
        walk, on_path = (_WALK, "AND rowid IN (SELECT id FROM walk)") if head is not None else ("", "")
        with self._read() as db:
            self._session(db, session_id)
            sql = (
                f"{walk} SELECT {rows.ENTRY} FROM entries WHERE session_id = :session AND ({holds}) {on_path} "
                "ORDER BY created_s DESC, rowid DESC LIMIT :limit"
            )
            found = [_entry(db, session_id, row) for row in db.execute(sql, values)]
            if found or not asked:
                return found
            hashes = "SELECT hash FROM entries WHERE rowid IN (SELECT id FROM walk)"
            sql = (
                f"{walk} SELECT {_FOUND_ENTRY} FROM words JOIN texts t ON t.id = words.rowid "
                "JOIN entries e ON e.session_id = t.session_id AND e.hash = t.hash WHERE words MATCH :match "
                f"AND t.session_id = :session {f'AND e.hash IN ({hashes})' if walk else ''} "
                "ORDER BY words.rank, t.id DESC LIMIT :limit"
            )
            return [_entry(db, session_id, row) for row in db.execute(sql, values)]

    def on_path(self, session_id: str, head: str, hashes: Sequence[str]) -> frozenset[str]:
        sql = (
            f"{_WALK} SELECT hash FROM entries WHERE rowid IN (SELECT id FROM walk) "
            "AND hash IN (SELECT value FROM json_each(:hashes))"
        )
        values = {"session": session_id, "head": head, "hashes": json.dumps([*hashes])}
        with self._read() as db:
            self._session(db, session_id)
            return frozenset(hash_ for (hash_,) in db.execute(sql, values))

    def vectors(self) -> VectorIndex:
        try:
            from kvsteward.sessions.vectors_sqlite import SqliteVectors
        except ModuleNotFoundError as error:
            raise without_numpy(error) from error
        return SqliteVectors(Path(self._path))

    def branch(self, session: Session, source_id: str, head: str) -> None:
        with self._write() as db:
            source = self._session(db, source_id)
            chain.check_tenant(session, source)
            self._insert_session(db, replace(session, head=head))
            _check_walk(db, source, head)
            _copy_path(db, session.id, source_id, head)

    def draft(self, session_id: str, turn_id: str, parent: str, text: bytes, *, now: float) -> None:
        with self._write() as db:
            changed = db.execute(
                "UPDATE drafts SET text = ? WHERE session_id = ? AND turn_id = ? AND parent = ?",
                (text, session_id, turn_id, parent),
            ).rowcount
            if changed:
                return
            session = self._session(db, session_id)
            chain.depth_below(session, parent, lambda hash_: _depth(db, session_id, hash_))
            db.execute(
                "INSERT INTO drafts (session_id, turn_id, parent, text) VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET parent = excluded.parent, text = excluded.text",
                (session_id, turn_id, parent, text),
            )

    def recover(self, *, now: float) -> int:
        with self._write() as db:
            drafts = db.execute("SELECT session_id, parent, text FROM drafts ORDER BY rowid DESC").fetchall()
            for session_id, parent, text in drafts:
                self._keep_draft(db, session_id, parent, text, now)
            db.execute("DELETE FROM drafts")
            db.execute("UPDATE sessions SET state = ? WHERE state = 'active'", (step("active", "crash"),))
            return len(drafts)

    def delete(self, session_id: str) -> bool:
        with self._write() as db:
            gone = db.execute("DELETE FROM sessions WHERE id = ?", (session_id,)).rowcount > 0
        if gone:
            self._empty_wal()
        return gone

    def sweep(self, *, now: float, log_retention_s: float) -> Sequence[Session]:
        with self._write() as db:
            unused = db.execute(
                f"SELECT {rows.SESSION} FROM sessions WHERE "
                "(state IN ('idle', 'parked') AND :now - last_used_s > ttl_s) OR "
                "(state != 'active' AND :now - last_used_s > :kept_s) ORDER BY last_used_s, id",
                {"now": now, "kept_s": log_retention_s},
            ).fetchall()
            over: list[Session] = []
            wiped = 0
            for session in map(rows.session_of, unused):
                if allows(session.state, "expire"):
                    over.append(replace(session, state=step(session.state, "expire")))
                    self._update(db, over[-1])
                if now - session.last_used_s > log_retention_s:
                    wiped += db.execute("DELETE FROM sessions WHERE id = ?", (session.id,)).rowcount
        if wiped:
            self._empty_wal()
        return over

    def verify(self, session_id: str | None = None) -> Sequence[Fault]:
        if session_id is not None:
            return self._verify_one(session_id)
        with self._read() as db:
            ids = [id_ for (id_,) in db.execute("SELECT id FROM sessions ORDER BY id")]
            found = [Fault("", "", f"the file: {text}") for (text,) in db.execute("PRAGMA integrity_check(20)")]
            found = [] if [fault.problem for fault in found] == ["the file: ok"] else found
            found += _orphans(db)
        for id_ in ids:  # one read each, so that writers are let in between
            try:
                found += self._verify_one(id_)
            except NotFoundError:
                continue  # deleted since
        return found

    def close(self) -> None:
        """Empties the write-ahead log into the file and closes it. A second call does nothing."""
        with self._lock:
            try:
                self._db.close()
            except sqlite3.Error as error:
                raise rows.store_error(error, self._path) from error

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._transaction("BEGIN") as db:
            yield db

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._transaction("BEGIN IMMEDIATE") as db:
            yield db

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute(begin)
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                finally:
                    if self._db.in_transaction:  # SQLite itself has rolled back after some errors
                        self._db.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise rows.store_error(error, self._path) from error

    def _prepare(self) -> None:
        db = self._db
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA secure_delete = ON")
        db.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
        migrate(db)

    def _empty_wal(self) -> None:
        """Wiped text may still lie in the index, whose parts that hold deleted words go when they are merged, and in
        the write-ahead log. Another reader may hold that; then the next call does it."""
        with self._lock:
            try:
                self._db.execute("INSERT INTO words (words) VALUES ('optimize')")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.Error as error:
                raise rows.store_error(error, self._path) from error

    def _session(self, db: sqlite3.Connection, session_id: str) -> Session:
        row = db.execute(f"SELECT {rows.SESSION} FROM sessions WHERE id = ?", (session_id,)).fetchone()
        if row is None:
            raise NotFoundError(f"no session {session_id!r}")
        return rows.session_of(row)

    def _insert_session(self, db: sqlite3.Connection, session: Session) -> None:
        sql = f"INSERT INTO sessions ({rows.SESSION}) VALUES ({_SESSION_MARKS}) ON CONFLICT DO NOTHING"
        if db.execute(sql, rows.session_row(session)).rowcount == 0:
            raise StateError(f"session {session.id!r} exists")

    def _update(self, db: sqlite3.Connection, session: Session) -> None:
        id_, *values = rows.session_row(session)
        db.execute(f"UPDATE sessions SET {_SESSION_SET} WHERE id = ?", (*values, id_))

    def _keep_draft(self, db: sqlite3.Connection, session_id: str, parent: str, text: bytes, now: float) -> None:
        session = self._session(db, session_id)
        depth = chain.depth_below(session, parent, lambda hash_: _depth(db, session_id, hash_))
        entry = chain.interrupted(parent, depth, text, now=now)
        _add_entries(db, session_id, [entry])
        db.execute("UPDATE sessions SET head = ? WHERE id = ? AND head = ?", (entry.hash, session_id, parent))

    def _verify_one(self, session_id: str) -> Sequence[Fault]:
        by_depth = f"SELECT {rows.ENTRY} FROM entries WHERE session_id = ? ORDER BY depth, rowid"
        with self._read() as db:
            session = self._session(db, session_id)
            (entry_count, decision_count) = db.execute(
                "SELECT entry_count, decision_count FROM sessions WHERE id = ?", (session_id,)
            ).fetchone()
            stored = Stored(
                session,
                (rows.stored_entry(row, _blobs(db, session_id)) for row in db.execute(by_depth, (session_id,))),
                map(rows.stored_decision, _decision_rows(db, session_id)),
                db.execute("SELECT turn_id, parent FROM drafts WHERE session_id = ?", (session_id,)),
                entry_count,
                decision_count,
            )
            return list(faults(stored))


def _make_private(path: Path) -> None:
    """Logs hold what people said: a new file is readable by its owner alone (SQLite's side files follow it)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        hint = "Check that --store names a file in a folder that can be written."
        raise StoreError(f"{path}: {error.strerror}", hint=hint) from error


def _depth(db: sqlite3.Connection, session_id: str, hash_: str) -> int | None:
    sql = "SELECT depth FROM entries WHERE session_id = ? AND hash = ?"
    row = db.execute(sql, (session_id, hash_)).fetchone()
    return None if row is None else int(row[0])


def _found(db: sqlite3.Connection, where: str, *values: str) -> list[Found]:
    sql = (
        "SELECT s.id, e.hash, s.head = e.hash, s.last_used_s "
        f"FROM entries e JOIN sessions s ON s.id = e.session_id WHERE {where}"
    )
    return [Found(id_, hash_, bool(is_head), used_s) for id_, hash_, is_head, used_s in db.execute(sql, values)]


def _decision_rows(db: sqlite3.Connection, session_id: str) -> sqlite3.Cursor:
    return db.execute(f"SELECT {rows.DECISION} FROM decisions WHERE session_id = ? ORDER BY seq", (session_id,))


def _add_entries(db: sqlite3.Connection, session_id: str, entries: Sequence[Entry]) -> None:
    sql = (
        f"INSERT INTO entries (session_id, {rows.ENTRY}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (session_id, hash) DO NOTHING"
    )
    added = 0
    for entry in entries:
        if db.execute(sql, (session_id, *rows.entry_row(entry))).rowcount:
            added += 1
            _index(db, session_id, entry)
            _keep_blobs(db, session_id, entry)
    if added:
        db.execute("UPDATE sessions SET entry_count = entry_count + ? WHERE id = ?", (added, session_id))


def _index(db: sqlite3.Connection, session_id: str, entry: Entry) -> None:
    row = (session_id, entry.hash, words.session_key(session_id), words.searched_text(entry.raw))
    db.execute("INSERT INTO texts (session_id, hash, session, text) VALUES (?, ?, ?, ?)", row)


def _keep_blobs(db: sqlite3.Connection, session_id: str, entry: Entry) -> None:
    _, _, taken = cut(entry.raw)
    sql = "INSERT INTO blobs (session_id, hash, data) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
    for hash_, data in taken.items():
        db.execute(sql, (session_id, hash_, data))


def _blobs(db: sqlite3.Connection, session_id: str) -> rows.BlobOf:
    """Finds a session's blobs by their hash."""

    def blob_of(hash_: str) -> bytes | None:
        found = db.execute("SELECT data FROM blobs WHERE session_id = ? AND hash = ?", (session_id, hash_)).fetchone()
        return bytes(found[0]) if found and isinstance(found[0], bytes) else None

    return blob_of


def _entry(db: sqlite3.Connection, session_id: str, row: tuple[Any, ...]) -> Entry:
    return rows.entry_of(row, _blobs(db, session_id))


def _add_decisions(db: sqlite3.Connection, session_id: str, decisions: Sequence[Decision]) -> None:
    sql = f"INSERT INTO decisions (session_id, {rows.DECISION}) VALUES (?, ?, ?, ?, ?, ?)"
    for decision in decisions:
        db.execute(sql, (session_id, *rows.decision_row(decision)))
    if decisions:
        sql = "UPDATE sessions SET decision_count = decision_count + ? WHERE id = ?"
        db.execute(sql, (len(decisions), session_id))


def _walk(db: sqlite3.Connection, session: Session, head: str) -> list[Entry]:
    """Raises NotFoundError for an unknown head, CorruptLogError where the chain does not reach its first message."""
    if chain.is_start(session, head):
        return []
    path = [_entry(db, session.id, row) for row in db.execute(_PATH, {"session": session.id, "head": head})]
    if not path:
        raise NotFoundError(f"session {session.id!r} has no entry {head!r}")
    if len(path) != path[-1].depth or not chain.is_start(session, path[0].parent):
        raise _broken(session, head)
    return path


def _check_walk(db: sqlite3.Connection, session: Session, head: str) -> None:
    """As `_walk`, without reading the messages."""
    if chain.is_start(session, head):
        return
    depth = _depth(db, session.id, head)
    if depth is None:
        raise NotFoundError(f"session {session.id!r} has no entry {head!r}")
    walk = f"{_WALK} SELECT count(*), min(depth) FROM walk"
    if db.execute(walk, {"session": session.id, "head": head}).fetchone() != (depth, 1):
        raise _broken(session, head)


def _broken(session: Session, head: str) -> CorruptLogError:
    return CorruptLogError(f"session {session.id}: the chain of {head} does not reach its first message")


def _copy_path(db: sqlite3.Connection, session_id: str, source_id: str, head: str) -> None:
    values = {"session": source_id, "head": head, "to": session_id}
    entries = db.execute(
        f"INSERT INTO entries (session_id, {rows.ENTRY}) {_WALK} SELECT :to, {rows.ENTRY} FROM entries "
        "WHERE rowid IN (SELECT id FROM walk) ORDER BY depth",
        values,
    ).rowcount
    db.execute(
        "INSERT INTO blobs (session_id, hash, data) SELECT :to, b.hash, b.data FROM blobs b "
        "WHERE b.session_id = :session AND EXISTS (SELECT 1 FROM entries e WHERE e.session_id = :to "
        "AND instr(e.blobs, b.hash))",
        values,
    )
    db.execute(
        "INSERT INTO texts (session_id, hash, session, text) SELECT :to, t.hash, :key, t.text FROM texts t "
        "JOIN entries e ON e.session_id = :to AND e.hash = t.hash WHERE t.session_id = :session ORDER BY t.id",
        {**values, "key": words.session_key(session_id)},
    )
    decisions = db.execute(
        f"INSERT INTO decisions (session_id, {rows.DECISION}) SELECT :to, {rows.DECISION} FROM decisions d "
        "WHERE d.session_id = :session AND EXISTS "
        "(SELECT 1 FROM entries e WHERE e.session_id = :to AND e.hash = d.at) ORDER BY d.seq",
        values,
    ).rowcount
    sql = "UPDATE sessions SET entry_count = ?, decision_count = ? WHERE id = ?"
    db.execute(sql, (entries, decisions, session_id))


def _orphans(db: sqlite3.Connection) -> list[Fault]:
    """Rows whose session or entry was taken away underneath them."""
    found: list[Fault] = []
    for table, column in (("entries", "hash"), ("decisions", "at"), ("drafts", "parent")):
        sql = (
            f"SELECT session_id, {column} FROM {table} t "
            "WHERE NOT EXISTS (SELECT 1 FROM sessions s WHERE s.id = t.session_id) LIMIT 1000"
        )
        found += [Fault(id_, hash_, f"a row of {table} belongs to no session") for id_, hash_ in db.execute(sql)]
    return found

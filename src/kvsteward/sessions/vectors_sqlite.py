"""The vectors of a SQLite store, in the store's own file.

A row belongs to its entry by a foreign key, so whatever wipes an entry, in whichever connection, wipes its vectors in
the same transaction. A connection of its own reads beside the store's without waiting for it (WAL); it is opened with
the first call.

Knows no schema: `migrations` makes the table when the store is opened. Invariant: as in `vectors`.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvsteward.sessions import rows
from kvsteward.sessions.nearest import nearest, packed
from kvsteward.sessions.vectors import MAX_SEARCHED, Near, Space, VectorIndex

_HELD = "EXISTS (SELECT 1 FROM entries WHERE session_id = :session AND hash = :hash)"
_NO_TEXT = -1
"""The part of the one row of an entry without passages."""


class SqliteVectors(VectorIndex):
    """Beside the logs in the file at `path`, which a SqliteStore has opened before."""

    def __init__(self, path: Path, *, busy_timeout_s: float = 5.0) -> None:
        self._path, self._timeout_s = path, busy_timeout_s
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None

    def known(self, session_id: str, space: Space, hashes: Sequence[str]) -> frozenset[str]:
        sql = (
            "SELECT DISTINCT hash FROM vectors WHERE session_id = ? AND space = ? "
            "AND hash IN (SELECT value FROM json_each(?))"
        )
        with self._transaction("BEGIN") as db:
            return frozenset(hash_ for (hash_,) in db.execute(sql, (session_id, space.key, json.dumps([*hashes]))))

    def adopt(self, session_id: str, space: Space, hash_: str) -> bool:
        values = {"session": session_id, "space": space.key, "hash": hash_}
        sql = (
            "INSERT INTO vectors (session_id, space, hash, part, vector) "
            f"SELECT :session, space, hash, part, vector FROM vectors WHERE {_HELD} "
            "AND hash = :hash AND space = :space AND "
            "session_id = (SELECT session_id FROM vectors WHERE hash = :hash AND space = :space LIMIT 1) "
            "ORDER BY part ON CONFLICT DO NOTHING"
        )
        with self._transaction("BEGIN IMMEDIATE") as db:
            return db.execute(sql, values).rowcount > 0

    def add(self, session_id: str, space: Space, hash_: str, vectors: Sequence[Sequence[float]]) -> bool:
        parts = [*enumerate(map(packed, vectors))] or [(_NO_TEXT, b"")]
        values = {"session": session_id, "space": space.key, "hash": hash_}
        sql = (
            "INSERT INTO vectors (session_id, space, hash, part, vector) "
            f"SELECT :session, :space, :hash, :part, :vector WHERE {_HELD}"
        )
        with self._transaction("BEGIN IMMEDIATE") as db:
            db.execute("DELETE FROM vectors WHERE session_id = :session AND space = :space AND hash = :hash", values)
            kept = [db.execute(sql, {**values, "part": part, "vector": data}).rowcount for part, data in parts]
            return all(kept)

    def nearest(self, session_id: str, space: Space, vector: Sequence[float], *, limit: int) -> Sequence[Near]:
        sql = (
            f"SELECT hash, vector FROM vectors WHERE part > {_NO_TEXT} AND id IN "
            "(SELECT id FROM vectors WHERE session_id = ? AND space = ? ORDER BY id DESC LIMIT ?) ORDER BY id DESC"
        )
        with self._transaction("BEGIN") as db:
            held = ((hash_, bytes(data)) for hash_, data in db.execute(sql, (session_id, space.key, MAX_SEARCHED)))
            return nearest(held, vector, limit)

    def forget_others(self, session_id: str, space: Space) -> None:
        with self._transaction("BEGIN IMMEDIATE") as db:
            db.execute("DELETE FROM vectors WHERE session_id = ? AND space != ?", (session_id, space.key))

    def close(self) -> None:
        with self._lock:
            db, self._db = self._db, None
            if db is not None:
                db.close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                db = self._db = self._db or self._opened()
                db.execute(begin)
                try:
                    yield db
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise rows.store_error(error, str(self._path)) from error

    def _opened(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=self._timeout_s, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA synchronous = NORMAL")
        return db

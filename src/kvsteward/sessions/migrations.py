"""The schema of the SQLite store, as the steps that lead to it, and the engine that takes them.

A file says how far it is in `PRAGMA user_version`, and that it is ours in `PRAGMA application_id`. To change the
schema, add `mNNN_...` at the end of `MIGRATIONS`; a step that was released is never edited.

Knows no sessions. Invariant: a file is at one version as a whole, since each step and its number are one
transaction; a file that is another program's, or newer than this code, is left as it is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from kvsteward.errors import StoreError
from kvsteward.sessions.words import searched_text, session_key

APPLICATION_ID = 0x6B767374  # "kvst"

Migration = Callable[[sqlite3.Connection], None]


def m001_sessions(db: sqlite3.Connection) -> None:
    """Sessions, entries, decisions, drafts. Long columns come last, so that a walk reads no overflow pages."""
    for statement in (
        """CREATE TABLE sessions (
            id TEXT PRIMARY KEY, tenant TEXT NOT NULL, state TEXT NOT NULL, head TEXT NOT NULL,
            created_s REAL NOT NULL, last_used_s REAL NOT NULL, ttl_s REAL NOT NULL,
            model TEXT, title TEXT NOT NULL, turns INTEGER NOT NULL, branched_from TEXT,
            view_tokens INTEGER NOT NULL, log_tokens INTEGER NOT NULL, saved_tokens INTEGER NOT NULL,
            entry_count INTEGER NOT NULL DEFAULT 0, decision_count INTEGER NOT NULL DEFAULT 0)""",
        "CREATE INDEX sessions_by_use ON sessions (last_used_s DESC, id)",
        "CREATE INDEX sessions_by_tenant ON sessions (tenant, last_used_s DESC, id)",
        """CREATE TABLE entries (
            session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
            hash TEXT NOT NULL, parent TEXT NOT NULL, depth INTEGER NOT NULL, source TEXT NOT NULL,
            created_s REAL NOT NULL, tokens INTEGER NOT NULL, finish TEXT, response_id TEXT,
            body TEXT NOT NULL, raw BLOB NOT NULL,
            PRIMARY KEY (session_id, hash))""",
        "CREATE INDEX entries_by_hash ON entries (hash)",
        "CREATE INDEX entries_by_response ON entries (response_id) WHERE response_id IS NOT NULL",
        """CREATE TABLE decisions (
            seq INTEGER PRIMARY KEY, session_id TEXT NOT NULL, at TEXT NOT NULL, kind TEXT NOT NULL,
            created_s REAL NOT NULL, body TEXT NOT NULL, payload BLOB NOT NULL,
            FOREIGN KEY (session_id, at) REFERENCES entries (session_id, hash) ON DELETE CASCADE)""",
        "CREATE INDEX decisions_by_entry ON decisions (session_id, at)",
        """CREATE TABLE drafts (
            session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
            turn_id TEXT NOT NULL, parent TEXT NOT NULL, text BLOB NOT NULL,
            PRIMARY KEY (session_id, turn_id))""",
    ):
        db.execute(statement)


def m002_words(db: sqlite3.Connection) -> None:
    """The text of each entry, and a full-text index over it. `texts` has a key of its own: the rowid of `entries` is
    not kept by VACUUM."""
    for statement in (
        """CREATE TABLE texts (
            id INTEGER PRIMARY KEY, session_id TEXT NOT NULL, hash TEXT NOT NULL,
            session TEXT NOT NULL, text TEXT NOT NULL, UNIQUE (session_id, hash),
            FOREIGN KEY (session_id, hash) REFERENCES entries (session_id, hash) ON DELETE CASCADE)""",
        """CREATE VIRTUAL TABLE words USING fts5(
            session, text, content='texts', content_rowid='id', tokenize='unicode61')""",
        """CREATE TRIGGER texts_added AFTER INSERT ON texts BEGIN
            INSERT INTO words (rowid, session, text) VALUES (new.id, new.session, new.text); END""",
        """CREATE TRIGGER texts_wiped AFTER DELETE ON texts BEGIN
            INSERT INTO words (words, rowid, session, text) VALUES ('delete', old.id, old.session, old.text); END""",
    ):
        db.execute(statement)
    for (row,) in db.execute("SELECT rowid FROM entries ORDER BY rowid").fetchall():
        session_id, hash_, raw = db.execute(
            "SELECT session_id, hash, raw FROM entries WHERE rowid = ?", (row,)
        ).fetchone()
        text = searched_text(raw if isinstance(raw, bytes) else str(raw).encode())
        db.execute(
            "INSERT INTO texts (session_id, hash, session, text) VALUES (?, ?, ?, ?)",
            (session_id, hash_, session_key(session_id), text),
        )


def m003_blobs(db: sqlite3.Connection) -> None:
    """Long data URLs, kept once for each session. What was stored before stays in its messages."""
    db.execute("ALTER TABLE entries ADD COLUMN blobs TEXT")
    db.execute(
        """CREATE TABLE blobs (
            session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
            hash TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (session_id, hash))"""
    )


def m004_engines(db: sqlite3.Connection) -> None:
    """The engine that a session is bound to. Sessions of before are bound at their next turn."""
    db.execute("ALTER TABLE sessions ADD COLUMN engine TEXT")


def m005_compactions(db: sqlite3.Connection) -> None:
    """What compactions cost each session. For those of before it is not known, and begins at 0."""
    for name in ("compactions", "again_tokens"):
        db.execute(f"ALTER TABLE sessions ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0")


def m006_vectors(db: sqlite3.Connection) -> None:
    """Where the vectors of texts are kept, if the deployment has a model for them. `part` -1: the entry has no text."""
    db.execute(
        """CREATE TABLE vectors (
            id INTEGER PRIMARY KEY, session_id TEXT NOT NULL, space TEXT NOT NULL, hash TEXT NOT NULL,
            part INTEGER NOT NULL, vector BLOB NOT NULL, UNIQUE (session_id, space, hash, part),
            FOREIGN KEY (session_id, hash) REFERENCES entries (session_id, hash) ON DELETE CASCADE)"""
    )
    db.execute("CREATE INDEX vectors_by_entry ON vectors (hash, session_id)")


MIGRATIONS: tuple[Migration, ...] = (
    m001_sessions,
    m002_words,
    m003_blobs,
    m004_engines,
    m005_compactions,
    m006_vectors,
)


def migrate(db: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """Brings `db` (in autocommit mode) to the newest version and returns how many steps that took.

    Raises StoreError for a file that is newer than this code or another program's.
    """
    taken = 0
    while version_of(db, len(migrations)) < len(migrations):
        db.execute("BEGIN IMMEDIATE")
        try:
            version = version_of(db, len(migrations))  # again: another process may have been first
            if version < len(migrations):
                migrations[version](db)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {version + 1}")
                taken += 1
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
    return taken


def version_of(db: sqlite3.Connection, newest: int) -> int:
    """The version of the file's schema, 0 for an empty file. Raises StoreError if it cannot be ours."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (owner,) = db.execute("PRAGMA application_id").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if owner != APPLICATION_ID and (owner or version or tables):
        raise StoreError("the file is a database of another program", hint="Point --store at a file of its own.")
    if version > newest:
        raise StoreError(
            f"the store has schema version {version}; this kvsteward knows {newest}",
            hint="Upgrade kvsteward, or point --store at another file.",
        )
    return int(version)

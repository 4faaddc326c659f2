"""Between SQLite and the values of `base`: rows in, rows out, and SQLite's errors as ours.

Knows no statements. Invariant: an entry that is read is the entry that was written, or CorruptLogError is raised.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from kvsteward.errors import CorruptLogError, KVStewardError, StoreError
from kvsteward.sessions.base import Decision, Entry, Session
from kvsteward.sessions.blobs import cut, decode_places, encode_places, mend
from kvsteward.wire.fingerprint import body_hash

SESSION = (
    "id, tenant, state, head, created_s, last_used_s, ttl_s, model, title, turns, branched_from, "
    "view_tokens, log_tokens, saved_tokens, engine, compactions, again_tokens"
)
ENTRY = "hash, parent, depth, source, raw, created_s, tokens, finish, response_id, body, blobs"
DECISION = "at, kind, payload, created_s, body"

BlobOf = Callable[[str], bytes | None]

_HINTS = {
    sqlite3.SQLITE_FULL: "The disk is full: free space. What was acknowledged before is stored.",
    sqlite3.SQLITE_READONLY: "The store is read-only: check the permissions of the file, its folder and its mount.",
    sqlite3.SQLITE_BUSY: "Another process holds the store: run one kvsteward per file, then retry.",
    sqlite3.SQLITE_LOCKED: "Another process holds the store: run one kvsteward per file, then retry.",
    sqlite3.SQLITE_NOTADB: "The file is not a SQLite database: point --store at another path.",
    sqlite3.SQLITE_CANTOPEN: "Check that --store names a file in a folder that can be written.",
    sqlite3.SQLITE_IOERR: "The disk failed or is full: look at the system log and at the free space.",
    sqlite3.SQLITE_TOOBIG: "One message is over SQLite's limit of about 1 GB.",
}


def session_row(session: Session) -> tuple[Any, ...]:
    """In the order of `SESSION`."""
    s = session
    return (
        *(s.id, s.tenant, s.state, s.head, s.created_s, s.last_used_s, s.ttl_s, s.model, s.title, s.turns),
        *(s.branched_from, s.view_tokens, s.log_tokens, s.saved_tokens, s.engine, s.compactions, s.again_tokens),
    )


def entry_row(entry: Entry) -> tuple[Any, ...]:
    """In the order of `ENTRY`; the blobs that the row points at are `blobs.cut(entry.raw)`'s."""
    e = entry
    left, places, _ = cut(e.raw)
    return (
        *(e.hash, e.parent, e.depth, e.source, left, e.created_s, e.tokens, e.finish, e.response_id),
        *(body_hash(e.raw), encode_places(places)),
    )


def decision_row(decision: Decision) -> tuple[Any, ...]:
    """In the order of `DECISION`."""
    return (decision.at, decision.kind, decision.payload, decision.created_s, body_hash(decision.payload))


def session_of(row: tuple[Any, ...]) -> Session:
    return Session(*row)


def entry_of(row: tuple[Any, ...], blob_of: BlobOf) -> Entry:
    """Raises CorruptLogError if the bytes are not those that were written."""
    entry, body = stored_entry(row, blob_of)
    if body_hash(entry.raw) != body:
        raise CorruptLogError(f"entry {entry.hash}: the stored bytes do not match their hash")
    return entry


def stored_entry(row: tuple[Any, ...], blob_of: BlobOf) -> tuple[Entry, str]:
    """An entry as it lies there, and the body hash beside it."""
    *fields, body, places = row
    fields[4] = mend(_bytes(fields[4]), decode_places(places), blob_of)
    return Entry(*fields), body


def decision_of(row: tuple[Any, ...]) -> Decision:
    """Raises CorruptLogError if the bytes are not those that were written."""
    decision, body = stored_decision(row)
    if body_hash(decision.payload) != body:
        raise CorruptLogError(f"a {decision.kind} decision at {decision.at} does not match its hash")
    return decision


def stored_decision(row: tuple[Any, ...]) -> tuple[Decision, str]:
    at, kind, payload, created_s, body = row
    return Decision(at, kind, _bytes(payload), created_s), body


def store_error(error: sqlite3.Error, path: str) -> KVStewardError:
    """What a SQLite error means to a caller."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_CORRUPT:
        return CorruptLogError(f"{path}: {error}")
    return StoreError(f"{path}: {error}", hint=_HINTS.get(code))


def _bytes(value: Any) -> bytes:
    # A column that was tampered with may hold text; the hash will tell.
    return value if isinstance(value, bytes) else str(value).encode()

"""What stands in Valkey, under which names: between its bytes and the values of `base`.

All that belongs to one session has the session's tag in braces, so it lies in one slot of a cluster:

    kvs:1:{TAG}:row         hash: s the session as JSON (absent: it is being made, or wiped), v the version of the last
                            write, u which of the sessions of this id it is, o who made it active, root, t its tenant,
                            n and d how many entries and decisions were written, b its bounds in the indexes
    kvs:1:{TAG}:entries     hash: entry -> all of it but the message, as JSON
    kvs:1:{TAG}:raw         hash: entry -> the message, its long data URLs left out
    kvs:1:{TAG}:blobs       hash: content hash -> data URL
    kvs:1:{TAG}:order       list of entries as they came
    kvs:1:{TAG}:names       sorted set of entries, for prefixes
    kvs:1:{TAG}:decisions   list: a line of JSON, then the payload
    kvs:1:{TAG}:drafts      hash: turn -> a line of JSON, then the text
    kvs:1:{TAG}:vectors     hash: SPACE:ENTRY -> its vectors, each behind its length
    kvs:1:{TAG}:vectororder sorted set: SPACE:ENTRY as they were made

What spans sessions is an index: it may say too much (a writer that died), never too little, and each answer of it is
checked at the session.

    kvs:1:used, kvs:1:used:TENANT   sorted set: session -> minus the time of its last use
    kvs:1:due                       sorted set: session -> when its TTL is over
    kvs:1:entry:HASH                set: who holds the entry, as UID:ENTRY:SESSION
    kvs:1:answer:DIGEST             set: who holds the answer of a tenant's response id, as UID:ENTRY:SESSION
    kvs:1:owners                    set of the processes that have turns open
    kvs:1:lease:OWNER               there as long as the process lives
    kvs:1:open:OWNER                set: its sessions with open turns

Knows no commands. Invariant: an entry or a decision that is read is the one that was written, or CorruptLogError is
raised.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields
from typing import Any

import orjson

from kvsteward.errors import CorruptLogError
from kvsteward.sessions.base import Decision, Entry, Session
from kvsteward.sessions.blobs import Place
from kvsteward.wire.fingerprint import body_hash

PREFIX = b"kvs:1:"
_PLAIN = re.compile(rb"[\w./:+=@-]{1,128}")
_FIELDS = tuple(field.name for field in fields(Session))

ROW, ENTRIES, RAW, BLOBS, ORDER, NAMES, DECISIONS, DRAFTS, VECTORS, VECTOR_ORDER = range(1, 11)
"""Where each key of a session stands in `Keys.all`, counted as scripts count."""
_PARTS = (
    *(b"row", b"entries", b"raw", b"blobs", b"order", b"names", b"decisions", b"drafts"),
    *(b"vectors", b"vectororder"),
)

USED, DUE, OWNERS, _ANSWER = PREFIX + b"used", PREFIX + b"due", PREFIX + b"owners", PREFIX + b"answer:"


def text(value: str) -> bytes:
    """As bytes; half a surrogate, too."""
    return value.encode("utf-8", "surrogatepass")


def string(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")


class Keys:
    """The names of a session's keys."""

    def __init__(self, session_id: str) -> None:
        name = text(session_id)
        if not _PLAIN.fullmatch(name):  # braces and the like; "~" stands in no plain id
            name = b"~" + hashlib.blake2b(name, digest_size=16).hexdigest().encode()
        self.all = tuple(b"%s{%s}:%s" % (PREFIX, name, part) for part in _PARTS)

    def __getitem__(self, which: int) -> bytes:
        return self.all[which - 1]


def used_of(tenant: str) -> bytes:
    return USED + b":" + text(tenant)


def entry_key(hash_: str) -> bytes:
    return PREFIX + b"entry:" + text(hash_)


def answer_key(tenant: str, response_id: str) -> bytes:
    digest = hashlib.blake2b(text(tenant) + b"\0" + text(response_id), digest_size=16).hexdigest()
    return _ANSWER + digest.encode()


def lease_key(owner: str) -> bytes:
    return PREFIX + b"lease:" + owner.encode()


def open_key(owner: str) -> bytes:
    return PREFIX + b"open:" + owner.encode()


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds an entry: one life of a session. A member of the indexes."""

    uid: str
    session_id: str
    hash: str

    def member(self) -> bytes:
        return text(f"{self.uid}:{self.hash}:{self.session_id}")


def holder_of(member: bytes) -> Holder | None:
    """None for what is no member of ours."""
    parts = string(member).split(":", 2)
    return Holder(parts[0], parts[2], parts[1]) if len(parts) == 3 else None


@dataclass(frozen=True, slots=True)
class Meta:
    """An entry without its message."""

    hash: str
    parent: str
    depth: int
    source: Any
    created_s: float
    tokens: int
    finish: str | None
    response_id: str | None
    body: str
    places: tuple[Place, ...]
    size_bytes: int
    """Of the message without its data URLs."""

    def entry(self, raw: bytes) -> Entry:
        """Raises CorruptLogError if the bytes are not those that were written."""
        if body_hash(raw) != self.body:
            raise CorruptLogError(f"entry {self.hash}: the stored bytes do not match their hash")
        return self.unchecked(raw)

    def unchecked(self, raw: bytes) -> Entry:
        return Entry(
            self.hash, self.parent, self.depth, self.source, raw, self.created_s, self.tokens, self.finish,
            self.response_id,
        )  # fmt: skip


def meta_of(entry: Entry, left: bytes, places: tuple[Place, ...]) -> Meta:
    """`left` and `places` are of `blobs.cut`."""
    e = entry
    return Meta(
        e.hash, e.parent, e.depth, e.source, e.created_s, e.tokens, e.finish, e.response_id, body_hash(e.raw), places,
        len(left),
    )  # fmt: skip


def encode_meta(meta: Meta) -> bytes:
    """`parent` comes first: a script reads it."""
    m = meta
    return _dump(
        [m.parent, m.depth, m.source, m.created_s, m.tokens, m.finish, m.response_id, m.body, m.places, m.size_bytes]
    )


def decode_meta(hash_: str, value: bytes) -> Meta:
    """Raises CorruptLogError for what was not written by `encode_meta`."""
    try:
        parent, depth, source, created_s, tokens, finish, response_id, body, places, size = _load(value)
        found = tuple((int(offset), str(blob)) for offset, blob in places)
        return Meta(
            hash_, str(parent), int(depth), source, float(created_s), int(tokens), finish, response_id, str(body),
            found, int(size),
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise CorruptLogError(f"entry {hash_}: what stands beside its message cannot be read") from error


def encode_session(session: Session) -> bytes:
    return _dump({name: getattr(session, name) for name in _FIELDS})


def decode_session(session_id: str, value: bytes) -> Session:
    """Fields that are not known (a newer kvsteward wrote them) are passed over. Raises CorruptLogError."""
    try:
        found = json.loads(value)
        return Session(**{name: found[name] for name in _FIELDS if name in found})
    except (ValueError, TypeError) as error:
        raise CorruptLogError(f"session {session_id}: its row cannot be read") from error


def encode_bounds(session: Session) -> bytes:
    """Where a session stands in the indexes of use and of what is due."""
    return _dump([session.last_used_s, session.last_used_s + session.ttl_s])


def hidden(session: Session) -> tuple[Any, ...]:
    """Of a row that is not seen: what is needed to take it away."""
    return ("t", text(session.tenant), "b", encode_bounds(session))


def decode_bounds(session_id: str, value: bytes | None) -> tuple[float, float]:
    """Raises CorruptLogError."""
    try:
        used_s, due_s = json.loads(value or b"")
        return float(used_s), float(due_s)
    except (ValueError, TypeError) as error:
        raise CorruptLogError(f"session {session_id}: its row cannot be read") from error


def encode_decision(decision: Decision) -> bytes:
    head = [decision.at, decision.kind, decision.created_s, body_hash(decision.payload)]
    return _dump(head) + b"\n" + decision.payload


def decode_decision(session_id: str, value: bytes) -> tuple[Decision, str]:
    """A decision as it lies there, and the body hash beside it. Raises CorruptLogError where it cannot be read."""
    head, _, payload = value.partition(b"\n")
    try:
        at, kind, created_s, body = json.loads(head)
        return Decision(str(at), str(kind), payload, float(created_s)), str(body)
    except (ValueError, TypeError) as error:
        raise CorruptLogError(f"session {session_id}: a decision cannot be read") from error


def checked_decision(session_id: str, value: bytes) -> Decision:
    """Raises CorruptLogError if the bytes are not those that were written."""
    decision, body = decode_decision(session_id, value)
    if body_hash(decision.payload) != body:
        raise CorruptLogError(f"a {decision.kind} decision at {decision.at} does not match its hash")
    return decision


@dataclass(frozen=True, slots=True)
class Draft:
    """What an engine has said so far. `number` counts the drafts of a session as they were begun."""

    turn_id: bytes
    number: int
    owner: str
    parent: str
    text: bytes


def draft_head(owner: str, parent: str) -> bytes:
    """Behind the number, which the script writes."""
    return _dump([owner, parent])


def decode_draft(session_id: str, turn_id: bytes, value: bytes) -> Draft:
    """Raises CorruptLogError where it cannot be read."""
    head, _, said = value.partition(b"\n")
    number, _, words = head.partition(b" ")
    try:
        owner, parent = json.loads(words)
        return Draft(turn_id, int(number), str(owner), str(parent), said)
    except (ValueError, TypeError) as error:
        raise CorruptLogError(f"session {session_id}: a draft cannot be read") from error


def _load(value: bytes) -> Any:
    """orjson is faster, and does not read all that `_dump` writes."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return json.loads(value)


def _dump(value: Any) -> bytes:
    # Not orjson: a TTL may be infinite, and a name may hold half a surrogate.
    return json.dumps(value, separators=(",", ":")).encode()

"""What makes entries a chain: the rules that every store keeps when it writes.

Knows no storage: a store passes `depth_of`, its look-up. Invariant: what `check_append` lets through, `integrity`
finds without fault (but for the hash itself, which is the caller's word until `verify` derives it).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvsteward.errors import InvariantError
from kvsteward.sessions.base import Decision, Entry, Session
from kvsteward.wire import fingerprint

DepthOf = Callable[[str], int | None]
"""The depth of an entry that is already in the session, or None."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


def message_of(raw: bytes) -> Mapping[str, Any]:
    """The message in `raw`, read as the wire reads it. Raises ValueError where it is not a JSON object."""
    message = json.loads(raw.decode(), parse_int=_integer, parse_constant=_no_constant)
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message


def is_start(session: Session, parent: str) -> bool:
    """Whether `parent` stands for "before the first message" ("" or the tenant's root)."""
    return parent in ("", fingerprint.root(session.tenant))


def check_head(session: Session, depth_of: DepthOf) -> None:
    """Raises InvariantError if the head is not an entry of the session."""
    if not is_start(session, session.head) and depth_of(session.head) is None:
        raise InvariantError(f"session {session.id}: its head {session.head} is not in its log")


def check_tenant(session: Session, source: Session) -> None:
    """Raises InvariantError if a branch would cross tenants: their roots differ, so no hash would hold."""
    if session.tenant != source.tenant:
        raise InvariantError(f"session {session.id} cannot branch from a session of another tenant")


def check_append(session: Session, entries: Sequence[Entry], decisions: Sequence[Decision], depth_of: DepthOf) -> None:
    """Raises InvariantError if a parent, a depth, a decision's place or the head does not fit the log."""
    new: dict[str, int] = {}

    def known(hash_: str) -> int | None:
        return new[hash_] if hash_ in new else depth_of(hash_)

    for entry in entries:
        new[entry.hash] = place(session, entry, known)
    for decision in decisions:
        if known(decision.at) is None:
            raise InvariantError(f"session {session.id}: a decision at {decision.at}, which is not in its log")
    check_head(session, known)


def place(session: Session, entry: Entry, depth_of: DepthOf) -> int:
    """The depth of `entry`. Raises InvariantError if its parent is missing or its depth is another."""
    depth = depth_below(session, entry.parent, depth_of)
    if depth != entry.depth:
        raise InvariantError(f"session {session.id}: entry {entry.hash} says depth {entry.depth}, its place is {depth}")
    return depth


def depth_below(session: Session, parent: str, depth_of: DepthOf) -> int:
    """The depth of an entry after `parent`. Raises InvariantError if the parent is not there."""
    if parent == fingerprint.root(session.tenant):
        return 1
    depth = depth_of(parent)
    if depth is None:
        raise InvariantError(f"session {session.id}: the parent {parent} is not in its log")
    return depth + 1


def interrupted(parent: str, depth: int, text: bytes, *, now: float) -> Entry:
    """The entry that a draft becomes. A draft that is not a message is kept as an answer's text, not lost."""
    try:
        raw, hash_ = text, fingerprint.link(parent, message_of(text))
    except (ValueError, TypeError, RecursionError):
        message = {"role": "assistant", "content": text.decode(errors="replace")}
        raw, hash_ = json.dumps(message).encode(), fingerprint.link(parent, message)
    return Entry(hash_, parent, depth, "engine", raw, now, finish="interrupted")


def _integer(digits: str) -> int | float:
    """As orjson does: a number that 64 bits cannot hold is a float. `link` could not write it otherwise."""
    if len(digits) > 20:
        return float(digits)
    value = int(digits)
    return value if _INT_MIN <= value <= _INT_MAX else float(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

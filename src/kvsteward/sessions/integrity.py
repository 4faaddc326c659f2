"""Finds what is wrong in a stored session, by deriving it again from the raw messages.

Knows no storage: it is given rows as they lie there, with the body hash that was written beside each. Invariant: it
reads and reports, never mends and never raises for bad data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvsteward.sessions.base import Decision, Entry, Fault, Session
from kvsteward.sessions.chain import is_start, message_of
from kvsteward.wire import fingerprint


@dataclass(frozen=True, slots=True)
class Stored:
    """A session as a store holds it. `entries` come parents first (by depth); they may be streamed."""

    session: Session
    entries: Iterable[tuple[Entry, str]]
    """Each with the body hash that was stored beside it."""
    decisions: Iterable[tuple[Decision, str]]
    drafts: Iterable[tuple[str, str]]
    """(turn_id, parent) of each draft."""
    entry_count: int
    """How many were ever written: a deleted leaf leaves no other trace."""
    decision_count: int


def faults(stored: Stored) -> Iterator[Fault]:
    """Everything wrong with one session."""
    session, depths = stored.session, dict[str, int]()
    for entry, body in stored.entries:
        for problem in _entry_problems(session, entry, body, depths):
            yield Fault(session.id, entry.hash, problem)
        depths[entry.hash] = entry.depth
    if len(depths) != stored.entry_count:
        yield Fault(session.id, "", f"{len(depths)} entries are there, {stored.entry_count} were written")
    if not is_start(session, session.head) and session.head not in depths:
        yield Fault(session.id, session.head, "the session's head is not in its log")
    yield from _decision_faults(stored, depths)
    for turn_id, parent in stored.drafts:
        if parent not in depths and not is_start(session, parent):
            yield Fault(session.id, parent, f"the parent of the draft of turn {turn_id} is not in the log")


def _entry_problems(session: Session, entry: Entry, body: str, depths: dict[str, int]) -> Iterator[str]:
    if fingerprint.body_hash(entry.raw) != body:
        yield "the stored bytes do not match their hash"
    derived = _derive(entry)
    if derived != entry.hash:
        yield "the message after its parent has another hash" if derived else "the stored bytes are not a message"
    if entry.parent == fingerprint.root(session.tenant):
        place = 1
    elif entry.parent in depths:
        place = depths[entry.parent] + 1
    else:
        yield f"its parent {entry.parent} is not in the log"
        return
    if entry.depth != place:
        yield f"its depth is {entry.depth}, its place is {place}"


def _derive(entry: Entry) -> str | None:
    try:
        return fingerprint.link(entry.parent, message_of(entry.raw))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None  # not JSON, or JSON that is no message


def _decision_faults(stored: Stored, depths: dict[str, int]) -> Iterator[Fault]:
    count = Counter[str]()
    for decision, body in stored.decisions:
        count[decision.kind] += 1
        if decision.at not in depths:
            yield Fault(stored.session.id, decision.at, f"a {decision.kind} decision at an entry that is not there")
        if fingerprint.body_hash(decision.payload) != body:
            yield Fault(stored.session.id, decision.at, f"a {decision.kind} decision does not match its hash")
    if count.total() != stored.decision_count:
        problem = f"{count.total()} decisions are there, {stored.decision_count} were written"
        yield Fault(stored.session.id, "", problem)

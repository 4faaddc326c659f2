"""The session store in memory: for tests, trials and deployments that keep no log over a restart.

Knows no file. Invariant: it behaves as the SQLite store does (one contract test runs on both); every check is made
before the first change, so a call that raises has changed nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from kvsteward.errors import CorruptLogError, NotFoundError, StateError
from kvsteward.sessions import chain
from kvsteward.sessions.base import Decision, Entry, Fault, Found, Session, SessionStore, page_of
from kvsteward.sessions.blobs import Place, cut, mend
from kvsteward.sessions.integrity import Stored, faults
from kvsteward.sessions.lifecycle import allows, step
from kvsteward.sessions.needles import hash_prefix, needles
from kvsteward.sessions.ranking import Ranking
from kvsteward.sessions.vectors import VectorIndex, without_numpy
from kvsteward.sessions.words import searched_text, words
from kvsteward.wire.fingerprint import body_hash

if TYPE_CHECKING:
    from kvsteward.sessions.vectors_memory import MemoryVectors


@dataclass(slots=True)
class _Log:
    session: Session
    entries: dict[str, Entry] = field(default_factory=dict)
    """By hash, without their long data URLs."""
    bodies: dict[str, str] = field(default_factory=dict)
    places: dict[str, Sequence[Place]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    decisions: list[tuple[Decision, str]] = field(default_factory=list)

    def depth_of(self, hash_: str) -> int | None:
        entry = self.entries.get(hash_)
        return None if entry is None else entry.depth

    def whole(self, entry: Entry) -> Entry:
        """The entry as it was received."""
        places = self.places.get(entry.hash)
        return replace(entry, raw=mend(entry.raw, places, self.blobs.get)) if places else entry

    def checked(self, entry: Entry) -> Entry:
        """As `whole`. Raises CorruptLogError if it is another than was written."""
        entry = self.whole(entry)
        if body_hash(entry.raw) != self.bodies[entry.hash]:
            raise CorruptLogError(f"session {self.session.id}: entry {entry.hash} does not match its hash")
        return entry


@dataclass(frozen=True, slots=True)
class _Draft:
    parent: str
    text: bytes


class MemoryStore(SessionStore):
    """Keeps every log in this process. Nothing outlives it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._logs: dict[str, _Log] = {}
        self._holders: dict[str, set[str]] = {}  # entry hash -> session ids
        self._answers: dict[tuple[str, str], set[tuple[str, str]]] = {}  # (tenant, response id) -> (session id, hash)
        self._drafts: dict[tuple[str, str], _Draft] = {}  # (session id, turn id), oldest turn first
        self._vectors: MemoryVectors | None = None

    def create(self, session: Session) -> None:
        with self._lock:
            self._check_new(session)
            chain.check_head(session, lambda _: None)
            self._logs[session.id] = _Log(session)

    def get(self, session_id: str) -> Session | None:
        with self._lock:
            log = self._logs.get(session_id)
            return None if log is None else log.session

    def list(self, *, tenant: str | None = None, limit: int = 100, offset: int = 0) -> Sequence[Session]:
        with self._lock:
            sessions = [log.session for log in self._logs.values() if tenant is None or log.session.tenant == tenant]
        sessions.sort(key=lambda session: (-session.last_used_s, session.id))
        start = max(offset, 0)
        return sessions[start : start + max(limit, 0)]

    def find(self, hashes: Sequence[str], *, session_id: str | None = None) -> Sequence[Found]:
        with self._lock:
            found: list[Found] = []
            for hash_ in dict.fromkeys(hashes):
                holders = self._holders.get(hash_, ())
                here = [self._found(holder, hash_) for holder in holders if session_id in {None, holder}]
                found += sorted(here, key=lambda one: (-one.last_used_s, one.session_id))
            return found

    def find_response(self, tenant: str, response_id: str) -> Found | None:
        with self._lock:
            found = [self._found(*where) for where in self._answers.get((tenant, response_id), ())]
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
        with self._lock:
            log = self._logs.get(session_id)
            if log is None:
                return None
            session = change(log.session)
            chain.check_append(session, entries, decisions, log.depth_of)
            log.session = session
            self._add(log, entries, decisions)
            if end_draft is not None:
                self._drafts.pop((session.id, end_draft), None)
            return session

    def path(self, session_id: str, head: str | None = None) -> Sequence[Entry]:
        with self._lock:
            log = self._log(session_id)
            return self._walk(log, log.session.head if head is None else head)

    def entries(self, session_id: str, *, offset: int = 0, limit: int = 100) -> Sequence[Entry]:
        first = max(offset, 0)
        with self._lock:
            log = self._log(session_id)
            return page_of(map(log.checked, islice(log.entries.values(), first, first + max(limit, 0))))

    def decisions(self, session_id: str) -> Sequence[Decision]:
        with self._lock:
            return [decision for decision, _ in self._log(session_id).decisions]

    def item(self, session_id: str, prefix: str) -> Entry | None:
        prefix = hash_prefix(prefix)
        with self._lock:
            log = self._log(session_id)
            matches = [hash_ for hash_ in log.entries if hash_.startswith(prefix)]
            if len(matches) > 1:
                raise NotFoundError(f"two items start with {prefix}", hint="Give more digits.")
            return log.whole(log.entries[matches[0]]) if matches else None

    def search(self, session_id: str, needle: str, *, limit: int = 20) -> Sequence[Entry]:
        forms = needles(needle)
        with self._lock:
            log = self._log(session_id)
            newest = list(reversed(log.entries.values()))
            newest.sort(key=lambda entry: -entry.created_s)
            found = [entry for entry in newest if any(form in entry.raw for form in forms)]
            return [log.whole(entry) for entry in found[: max(limit, 0)]]

    def lookup(self, session_id: str, query: str, *, head: str | None = None, limit: int = 20) -> Sequence[Entry]:
        with self._lock:
            log = self._log(session_id)
            on_path = log.entries.keys() if head is None else {entry.hash for entry in self._walk(log, head)}
            entries = [log.whole(entry) for entry in log.entries.values()]
            exact = self.search(session_id, query, limit=len(log.entries))
        found = [entry for entry in exact if entry.hash in on_path]
        if not found:
            with Ranking(session_id) as ranking:
                for place, entry in enumerate(entries):
                    ranking.add(place, searched_text(entry.raw))
                found = [entries[place] for place in ranking.best(words(query)) if entries[place].hash in on_path]
        return found[: max(limit, 0)]

    def vectors(self) -> VectorIndex:
        try:
            from kvsteward.sessions.vectors_memory import MemoryVectors
        except ModuleNotFoundError as error:
            raise without_numpy(error) from error
        self._vectors = self._vectors or MemoryVectors(self._holds)
        return self._vectors

    def branch(self, session: Session, source_id: str, head: str) -> None:
        with self._lock:
            source = self._log(source_id)
            self._check_new(session)
            chain.check_tenant(session, source.session)
            entries = self._walk(source, head)
            on_path = {entry.hash for entry in entries}
            log = self._logs[session.id] = _Log(replace(session, head=head))
            self._add(log, entries, [decision for decision, _ in source.decisions if decision.at in on_path])

    def draft(self, session_id: str, turn_id: str, parent: str, text: bytes, *, now: float) -> None:
        with self._lock:
            log = self._log(session_id)
            chain.depth_below(log.session, parent, log.depth_of)
            self._drafts[session_id, turn_id] = _Draft(parent, text)

    def recover(self, *, now: float) -> int:
        with self._lock:
            drafts = list(reversed(self._drafts.items()))
            for (session_id, _), draft in drafts:
                self._keep_draft(self._log(session_id), draft, now)
            self._drafts.clear()
            for log in self._logs.values():
                if allows(log.session.state, "crash"):
                    log.session = replace(log.session, state=step(log.session.state, "crash"))
            return len(drafts)

    def delete(self, session_id: str) -> bool:
        with self._lock:
            log = self._logs.pop(session_id, None)
            if log is None:
                return False
            for entry in log.entries.values():
                self._forget(log.session, entry)
            for key in [key for key in self._drafts if key[0] == session_id]:
                del self._drafts[key]
            if self._vectors is not None:
                self._vectors.delete(session_id)
            return True

    def sweep(self, *, now: float, log_retention_s: float) -> Sequence[Session]:
        with self._lock:
            over: list[Session] = []
            for log in tuple(self._logs.values()):
                session, unused_s = log.session, now - log.session.last_used_s
                wipe = unused_s > log_retention_s and session.state != "active"
                if allows(session.state, "expire") and (wipe or unused_s > session.ttl_s):
                    log.session = replace(session, state=step(session.state, "expire"))
                    over.append(log.session)
                if wipe:
                    self.delete(session.id)
            return sorted(over, key=lambda session: (session.last_used_s, session.id))

    def verify(self, session_id: str | None = None) -> Sequence[Fault]:
        with self._lock:
            logs = list(self._logs.values()) if session_id is None else [self._log(session_id)]
            return [fault for log in logs for fault in faults(self._stored(log))]

    def close(self) -> None:
        """Nothing to give back."""

    def _holds(self, session_id: str, hash_: str) -> bool:
        log = self._logs.get(session_id)  # without the lock: `delete` holds it while it asks the vectors
        return log is not None and hash_ in log.entries

    def _log(self, session_id: str) -> _Log:
        try:
            return self._logs[session_id]
        except KeyError:
            raise NotFoundError(f"no session {session_id!r}") from None

    def _check_new(self, session: Session) -> None:
        if session.id in self._logs:
            raise StateError(f"session {session.id!r} exists")

    def _found(self, session_id: str, hash_: str) -> Found:
        session = self._logs[session_id].session
        return Found(session_id, hash_, session.head == hash_, session.last_used_s)

    def _add(self, log: _Log, entries: Sequence[Entry], decisions: Sequence[Decision]) -> None:
        for entry in entries:
            if entry.hash in log.entries:
                continue
            left, places, taken = cut(entry.raw)
            log.entries[entry.hash] = replace(entry, raw=left)
            if places:
                log.places[entry.hash] = places
                log.blobs.update(taken)
            log.bodies[entry.hash] = body_hash(entry.raw)
            self._holders.setdefault(entry.hash, set()).add(log.session.id)
            if entry.response_id is not None:
                answer = (log.session.tenant, entry.response_id)
                self._answers.setdefault(answer, set()).add((log.session.id, entry.hash))
        log.decisions += [(decision, body_hash(decision.payload)) for decision in decisions]

    def _forget(self, session: Session, entry: Entry) -> None:
        holders = self._holders[entry.hash]
        holders.discard(session.id)
        if not holders:
            del self._holders[entry.hash]
        if entry.response_id is None:
            return
        answers = self._answers.get((session.tenant, entry.response_id), set())
        answers.discard((session.id, entry.hash))
        if not answers:
            self._answers.pop((session.tenant, entry.response_id), None)

    def _walk(self, log: _Log, head: str) -> Sequence[Entry]:
        path: list[Entry] = []
        at = head
        while not chain.is_start(log.session, at):
            entry = log.entries.get(at)
            if entry is None:
                raise NotFoundError(f"session {log.session.id!r} has no entry {at!r}")
            path.append(log.checked(entry))
            at = entry.parent
        path.reverse()
        return path

    def _keep_draft(self, log: _Log, draft: _Draft, now: float) -> None:
        depth = chain.depth_below(log.session, draft.parent, log.depth_of)
        entry = chain.interrupted(draft.parent, depth, draft.text, now=now)
        self._add(log, [entry], ())
        if log.session.head == draft.parent:
            log.session = replace(log.session, head=entry.hash)

    def _stored(self, log: _Log) -> Stored:
        entries = sorted(log.entries.values(), key=lambda entry: entry.depth)
        drafts = [(turn, draft.parent) for (owner, turn), draft in self._drafts.items() if owner == log.session.id]
        return Stored(
            log.session,
            [(log.whole(entry), log.bodies[entry.hash]) for entry in entries],
            log.decisions,
            drafts,
            len(log.entries),
            len(log.decisions),
        )

"""The two stores side by side under random operations: they agree, and nothing is ever found wrong."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsteward.errors import KVStewardError
from kvsteward.sessions import Decision, Entry, MemoryStore, Session, SqliteStore, allows, step
from kvsteward.sessions.base import SessionStore
from kvsteward.wire import fingerprint

picks = st.integers(0, 2**16)
texts = st.sampled_from(["a", "b", 'say "c"', "é", "x" * 5000])


class Stores(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "log.db"
        self.memory, self.sqlite = MemoryStore(), SqliteStore(self.path)
        self.now, self.count = 100.0, 0

    def both(self, call: Callable[[SessionStore], Any]) -> Any:
        """The one answer (or error) that both stores give."""
        answers = []
        for store in (self.memory, self.sqlite):
            try:
                answers.append(call(store))
            except KVStewardError as error:
                answers.append(type(error))
        assert answers[0] == answers[1]
        return answers[0]

    def some(self, pick: int) -> Session:
        sessions = self.memory.list(limit=1000)
        return sessions[pick % len(sessions)]

    def any_session(self) -> bool:
        return bool(self.memory.list(limit=1))

    @rule(tenant=st.sampled_from(["", "t"]), ttl_s=st.sampled_from([5.0, 50.0]))
    def create(self, tenant: str, ttl_s: float) -> None:
        self.now += 1
        self.count += 1
        root = fingerprint.root(tenant)
        self.both(lambda s: s.create(Session(f"s{self.count}", tenant, "new", root, self.now, self.now, ttl_s)))

    @precondition(any_session)
    @rule(pick=picks, cut=st.integers(0, 3), new=st.lists(texts, min_size=1, max_size=3), decide=st.booleans())
    def append(self, pick: int, cut: int, new: list[str], decide: bool) -> None:
        """One turn after the head, or after an earlier entry: an edited history."""
        self.now += 1
        session = self.some(pick)
        path = list(self.memory.path(session.id))
        path = path[: max(len(path) - cut, 0)]
        parent = path[-1].hash if path else fingerprint.root(session.tenant)
        entries = []
        for depth, text in enumerate(new, len(path) + 1):
            message = {"role": "user", "content": text}
            hash_ = fingerprint.link(parent, message)
            response = f"r{self.count}-{depth}" if depth % 2 else None
            raw = json.dumps(message).encode()
            entries.append(Entry(hash_, parent, depth, "client", raw, self.now, response_id=response))
            parent = hash_
        decisions = [Decision(entries[0].hash, "distil", new[0].encode(), self.now)] if decide else []
        session = replace(session, head=parent, state="idle", last_used_s=self.now, turns=session.turns + 1)
        self.both(lambda s: s.append(session, entries, decisions, end_draft="t1"))

    @precondition(any_session)
    @rule(pick=picks, turn=st.sampled_from(["t1", "t2"]), text=texts, whole=st.booleans(), at=picks)
    def draft(self, pick: int, turn: str, text: str, whole: bool, at: int) -> None:
        session = self.some(pick)
        parents = [fingerprint.root(session.tenant), *(e.hash for e in self.memory.path(session.id)), "f" * 32]
        raw = json.dumps({"role": "assistant", "content": text}).encode() if whole else text.encode()
        self.both(lambda s: s.draft(session.id, turn, parents[at % len(parents)], raw, now=self.now))

    @rule()
    def recover(self) -> None:
        self.now += 1
        self.both(lambda s: s.recover(now=self.now))

    @precondition(any_session)
    @rule(pick=picks, event=st.sampled_from(["turn_started", "turn_ended", "park", "expire", "close"]))
    def move(self, pick: int, event: str) -> None:
        session = self.some(pick)
        if allows(session.state, event):
            self.both(lambda s: s.put(replace(session, state=step(session.state, event))))

    @precondition(any_session)
    @rule(pick=picks, at=picks, tenant=st.sampled_from(["", "t"]))
    def branch(self, pick: int, at: int, tenant: str) -> None:
        self.now += 1
        self.count += 1
        source = self.some(pick)
        heads = [*(e.hash for e in self.memory.path(source.id)), fingerprint.root(source.tenant)]
        root = fingerprint.root(tenant)
        new = Session(f"s{self.count}", tenant, "new", root, self.now, self.now, 50.0, branched_from=source.id)
        self.both(lambda s: s.branch(new, source.id, heads[at % len(heads)]))

    @precondition(any_session)
    @rule(pick=picks)
    def delete(self, pick: int) -> None:
        id_ = self.some(pick).id
        assert self.both(lambda s: s.delete(id_)) is True

    @rule(later_s=st.sampled_from([0.0, 6.0, 60.0]), log_retention_s=st.sampled_from([20.0, 1000.0]))
    def sweep(self, later_s: float, log_retention_s: float) -> None:
        self.now += later_s
        self.both(lambda s: s.sweep(now=self.now, log_retention_s=log_retention_s))

    @rule()
    def reopen(self) -> None:
        self.sqlite.close()
        self.sqlite = SqliteStore(self.path)

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "memory"):
            return
        sessions = self.both(lambda s: s.list(limit=1000))
        for session in sessions:
            path = self.both(lambda s, id_=session.id: s.path(id_))
            self.both(lambda s, id_=session.id: s.decisions(id_))
            self.both(lambda s, id_=session.id: s.entries(id_, offset=1, limit=5))
            self.both(lambda s, id_=session.id: s.search(id_, 'say "c"'))
            self.both(lambda s, hashes=[e.hash for e in path]: s.find(hashes))
            for entry in path[-1:]:
                self.both(lambda s, id_=session.id, e=entry: s.item(id_, e.hash[:12]))
                if entry.response_id:
                    self.both(lambda s, t=session.tenant, r=entry.response_id: s.find_response(t, r))
        assert self.both(lambda s: s.verify()) == []

    def teardown(self) -> None:
        if hasattr(self, "sqlite"):
            self.sqlite.close()
            self.folder.cleanup()


TestStores = Stores.TestCase
TestStores.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

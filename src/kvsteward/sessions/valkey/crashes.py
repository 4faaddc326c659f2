"""Ends the turns of a process that is no more: what an engine had said so far becomes an entry, and the session idle.

Knows who has turns open by `turns`, drafts by `reader`. Invariant: turns of a process that lives are left to it.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from kvsteward.errors import CorruptLogError, InvariantError
from kvsteward.sessions import chain
from kvsteward.sessions.base import Entry, Session
from kvsteward.sessions.lifecycle import allows, step
from kvsteward.sessions.valkey.reader import Life, Reader
from kvsteward.sessions.valkey.rows import Keys
from kvsteward.sessions.valkey.turns import OpenTurns
from kvsteward.sessions.valkey.writing import Plan, Writer

log = logging.getLogger("kvsteward")


class Crashes:
    """Of one link and one process."""

    def __init__(self, reader: Reader, turns: OpenTurns, writer: Writer) -> None:
        self._reader, self._turns, self._writer = reader, turns, writer

    def end_own(self, now: float) -> int:
        """Of this process, which has just begun. Returns how many turns there were."""
        return self._end_turns(self._turns.owner, now)

    def end_dead(self, now: float) -> int:
        """Of those whose lease is gone."""
        return sum(self._end_turns(owner, now) for owner in list(self._turns.ended_owners()))

    def _end_turns(self, owner: str, now: float) -> int:
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

        def plan(life: Life, session: Session, depth_of: chain.DepthOf) -> Plan | None:
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
            return Plan(session, entries, (), ended) if crashed or ended else None

        self._writer.write(session_id, plan, ())
        return count

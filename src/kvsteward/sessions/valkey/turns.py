"""Which sessions have turns open, and in which process: so that a crash is told from a turn that still runs elsewhere.

A process with open turns has a lease, which it renews with what it writes and at each sweep. It notes a session as open
before it writes the draft or the active state; what is noted too much is taken back at a sweep. Whoever finds the lease
of a process gone ends its turns.

Knows the layout of `rows`, not what a turn is. Invariant: an open turn of a process is in its set.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey.link import Command, Link

_PAGE = 500


class OpenTurns:
    """Of one process. `lease_s` is how long it may be silent before its turns are taken for dead."""

    def __init__(self, link: Link, lease_s: float) -> None:
        self.owner = uuid.uuid4().hex
        self._link, self._lease_ms = link, max(1, round(lease_s * 1e3))
        self._lock = threading.Lock()
        self._noted: set[str] = set()
        self._writing = Counter[str]()
        self._known = False

    @contextmanager
    def noting(self, session_id: str) -> Iterator[Sequence[Command]]:
        """Around a write that opens a turn: what must be sent before it."""
        with self._lock:
            self._known = True
            self._noted.add(session_id)
            self._writing[session_id] += 1
        try:
            yield (*self._renewal(), ("SADD", rows.open_key(self.owner), rows.text(session_id)))
        finally:
            with self._lock:
                self._writing[session_id] -= 1
                if not self._writing[session_id]:
                    del self._writing[session_id]

    def _renewal(self) -> tuple[Command, ...]:
        return (
            ("SADD", rows.OWNERS, self.owner),
            ("SET", rows.lease_key(self.owner), 1, "PX", self._lease_ms),
        )

    def tidy(self) -> None:
        """Renews the lease, and takes back what is not open any more."""
        with self._lock:
            noted = [session_id for session_id in self._noted if session_id not in self._writing]
            if not self._noted:
                return
        self._link.ask_all(self._renewal())
        for start in range(0, len(noted), _PAGE):
            page = noted[start : start + _PAGE]
            commands: list[Command] = []
            for session_id in page:
                keys = rows.Keys(session_id)
                commands += [("HMGET", keys[rows.ROW], "s", "o"), ("HLEN", keys[rows.DRAFTS])]
            answers = self._link.ask_all(commands)
            over = [
                session_id
                for session_id, (session, owner), drafts in zip(page, answers[::2], answers[1::2], strict=True)
                if not drafts and (session is None or owner != self.owner.encode())
            ]
            self._take_back(over)

    def _take_back(self, over: Sequence[str]) -> None:
        if not over:
            return
        with self._lock:
            self._noted -= set(over)
        self._link.ask("SREM", rows.open_key(self.owner), *map(rows.text, over))
        with self._lock:
            again = [session_id for session_id in over if session_id in self._noted]
        if again:  # opened while it was taken back
            self._link.ask("SADD", rows.open_key(self.owner), *map(rows.text, again))

    def ended_owners(self) -> Iterator[str]:
        """Processes whose lease is gone."""
        cursor = 0
        while True:
            cursor, members = self._link.ask("SSCAN", rows.OWNERS, cursor, "COUNT", _PAGE)
            owners = [rows.string(member) for member in members]
            leases = self._link.ask_all([("EXISTS", rows.lease_key(owner)) for owner in owners])
            yield from (owner for owner, held in zip(owners, leases, strict=True) if not held and owner != self.owner)
            if not cursor:
                return

    def sessions_of(self, owner: str) -> Iterator[str]:
        cursor = 0
        while True:
            cursor, members = self._link.ask("SSCAN", rows.open_key(owner), cursor, "COUNT", _PAGE)
            yield from map(rows.string, members)
            if not cursor:
                return

    def ended(self, owner: str, session_ids: Sequence[str]) -> None:
        """The turns of a process in these sessions are over."""
        if owner == self.owner:
            self._take_back(session_ids)
        elif session_ids:
            self._link.ask("SREM", rows.open_key(owner), *map(rows.text, session_ids))
        if owner != self.owner and not self._link.ask("EXISTS", rows.open_key(owner)):
            self._link.ask("SREM", rows.OWNERS, owner)

    def close(self) -> None:
        """Others need not wait for the lease to run out."""
        if not self._known:  # it only read
            return
        self.tidy()
        with self._lock:
            left = bool(self._noted)
        self._link.ask("DEL", rows.lease_key(self.owner))
        if not left:
            self._link.ask("SREM", rows.OWNERS, self.owner)

"""The contract of a session store: the log of each session, whole and never rewritten.

A session owns a tree of entries. An entry is one message as it was received, named by the hash of itself and all
that came before it (`kvsteward.wire.fingerprint`). A client that only ever appends makes a chain; one that edits its
history makes a second branch, and the first stays. What the pipeline decided (a reduction, a compaction) is recorded
as a decision at the entry where it was taken, so that the view of any entry can be derived again from its path.

Knows nothing of engines. Invariants: an entry is never changed; its parent is in the same session or is the
tenant's root; a call that returned is on disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvsteward.errors import ConfigError, NotFoundError
from kvsteward.sessions.vectors import VectorIndex

State = Literal["new", "active", "idle", "parked", "expired", "closed"]
Source = Literal["client", "engine"]
PAGE_BYTES = 8 * 2**20
"""How long the messages of one page of a log may be together."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session's row. `head` is the entry of its newest turn; times are seconds since the epoch."""

    id: str
    tenant: str
    state: State
    head: str
    created_s: float
    last_used_s: float
    ttl_s: float
    model: str | None = None
    title: str = ""
    turns: int = 0
    branched_from: str | None = None
    """The session that this one continues differently, if its history was recognised by fingerprint."""
    view_tokens: int = 0
    log_tokens: int = 0
    saved_tokens: int = 0
    engine: str | None = None
    """The engine that its turns go to, by the name that the gateway gives it: the KV of its view is there."""
    compactions: int = 0
    again_tokens: int = 0
    """Prompt tokens that the engine had to prefill again because a compaction had changed what stands before them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of the log."""

    hash: str
    parent: str
    depth: int
    """1 for a first message."""
    source: Source
    raw: bytes
    """The message as JSON, as it was received."""
    created_s: float
    tokens: int = 0
    """Its length in tokens, as estimated on entry."""
    finish: str | None = None
    """For an answer: the engine's finish_reason, or "abandoned" (the client left), "interrupted" (a crash)."""
    response_id: str | None = None
    """For an answer: the id under which the client saw it (`previous_response_id` finds it)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the pipeline decided at an entry. `kind` is "distil", "compact", "note", "tools" or "recall"; `payload`
    is JSON."""

    at: str
    kind: str
    payload: bytes
    created_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """Where a fingerprint is known: the session, and whether it is that session's head."""

    session_id: str
    hash: str
    is_head: bool
    last_used_s: float


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that `verify` found wrong."""

    session_id: str
    hash: str
    problem: str


class SessionStore(ABC):
    """A store of sessions. Synchronous and safe to call from several threads; each call is one transaction.

    Raises StoreError when the disk is full or the file cannot be used, NotFoundError for an unknown session where
    a session is required.
    """

    @abstractmethod
    def create(self, session: Session) -> None:
        """Adds a session. Raises StateError if the id exists."""

    @abstractmethod
    def get(self, session_id: str) -> Session | None: ...

    def put(self, session: Session) -> None:
        """Replaces a session's row (state, head, times, figures). Never touches its log."""
        self.append(session, ())

    @abstractmethod
    def list(self, *, tenant: str | None = None, limit: int = 100, offset: int = 0) -> Sequence[Session]:
        """Newest use first."""

    @abstractmethod
    def find(self, hashes: Sequence[str], *, session_id: str | None = None) -> Sequence[Found]:
        """All sessions (or just this one) that hold one of these entries, in the order of `hashes`, newest use first
        within one."""

    @abstractmethod
    def find_response(self, tenant: str, response_id: str) -> Found | None:
        """The session and entry of an answer, by the id that the client was given."""

    def append(
        self,
        session: Session,
        entries: Sequence[Entry],
        decisions: Sequence[Decision] = (),
        *,
        end_draft: str | None = None,
    ) -> None:
        """As `amend`, with a row that is given as a whole. Raises NotFoundError if there is no such session."""
        if self.amend(session.id, lambda _: session, entries, decisions, end_draft=end_draft) is None:
            raise NotFoundError(f"no session {session.id!r}")

    @abstractmethod
    def amend(
        self,
        session_id: str,
        change: Callable[[Session], Session],
        entries: Sequence[Entry] = (),
        decisions: Sequence[Decision] = (),
        *,
        end_draft: str | None = None,
    ) -> Session | None:
        """In one transaction: replaces the session's row by what `change` makes of it as it stands, adds entries (those
        already there stay as they are), records decisions, and ends the draft of the turn `end_draft`. Returns the new
        row; None, with nothing written, where there is no such session.

        Others may write to the same store. `change` is given what they have written; it may be called again, so it must
        be pure. What two of them append to one parent are two branches, and the head is the later one's word.
        """

    @abstractmethod
    def path(self, session_id: str, head: str | None = None) -> Sequence[Entry]:
        """The entries from the first message to `head` (default: the session's head), in order."""

    @abstractmethod
    def entries(self, session_id: str, *, offset: int = 0, limit: int = 100) -> Sequence[Entry]:
        """The entries of all branches in the order in which they came, from the `offset`th on: at most `limit`, and no
        more than `PAGE_BYTES` of messages (a longer one comes alone); none behind the last. Each keeps its place."""

    @abstractmethod
    def decisions(self, session_id: str) -> Sequence[Decision]:
        """All decisions of a session, oldest first."""

    @abstractmethod
    def item(self, session_id: str, prefix: str) -> Entry | None:
        """The entry whose hash starts with `prefix` (8 hex digits or more). Raises NotFoundError if two match."""

    @abstractmethod
    def search(self, session_id: str, needle: str, *, limit: int = 20) -> Sequence[Entry]:
        """Entries whose text holds `needle` as it is, newest first."""

    @abstractmethod
    def lookup(self, session_id: str, query: str, *, head: str | None = None, limit: int = 20) -> Sequence[Entry]:
        """Entries for a query, best first: those that hold it as it is, newest first; where there are none, those that
        hold its words. `head` keeps to the path that ends there; None: all branches."""

    def on_path(self, session_id: str, head: str, hashes: Sequence[str]) -> frozenset[str]:
        """Those of the entries that stand on the path to `head`."""
        return frozenset(hashes) & {entry.hash for entry in self.path(session_id, head)}

    def vectors(self) -> VectorIndex:
        """Where the vectors of this store's texts are kept. Touches nothing yet; the caller closes it. Raises
        ConfigError for a store that has no place for them, or without numpy."""
        raise ConfigError(
            "this session store keeps no vectors",
            hint="Leave --embeddings out, or use a SQLite file or Valkey as --store.",
        )

    @abstractmethod
    def branch(self, session: Session, source_id: str, head: str) -> None:
        """Creates `session` with a copy of the path to `head` of another session, decisions on that path included."""

    @abstractmethod
    def draft(self, session_id: str, turn_id: str, parent: str, text: bytes, *, now: float) -> None:
        """Keeps what an engine has said so far in an unfinished turn (replaces the draft of that turn)."""

    @abstractmethod
    def recover(self, *, now: float) -> int:
        """After a crash: turns each draft into an entry that ends with finish "interrupted". Returns how many. Drafts
        of another process that still lives are left to it."""

    @abstractmethod
    def delete(self, session_id: str) -> bool:
        """Wipes a session, its log and its decisions for good. False if there was none."""

    @abstractmethod
    def sweep(self, *, now: float, log_retention_s: float) -> Sequence[Session]:
        """Ends what is over: sessions idle for longer than their TTL become "expired" and are returned (their KV can
        be given back; the log stays); logs not used for `log_retention_s` are wiped."""

    @abstractmethod
    def verify(self, session_id: str | None = None) -> Sequence[Fault]:
        """Re-derives every hash of one session or of all. Empty when nothing is wrong."""

    @abstractmethod
    def close(self) -> None: ...


def page_of(entries: Iterable[Entry]) -> list[Entry]:
    """As many of the first entries as one page holds, one at the least. Takes no more than the one after them."""
    page: list[Entry] = []
    left = PAGE_BYTES
    for entry in entries:
        left -= len(entry.raw)
        if page and left < 0:
            break
        page.append(entry)
    return page

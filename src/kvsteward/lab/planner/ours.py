"""A kvsteward store as turns: each answer of an engine is one, its prompt the path before it.

Knows the store's contract only. Invariant: the store is read, never made; tokens are those of the log, which is what a
gateway that passes everything through would send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from kvsteward.ledger.plan import Turn
from kvsteward.sessions import Entry, SessionStore, open_store

MOST_SESSIONS = 100_000
_PAGE = 500


def our_turns(path: Path) -> Iterator[Turn]:
    """The turns on the head path of each session, of 100,000 sessions at most. StoreError for another SQLite file."""
    with closing(open_store(str(path))) as store:
        for offset in range(0, MOST_SESSIONS, _PAGE):
            page = store.list(limit=_PAGE, offset=offset)
            for session in page:
                yield from _session(store, session.id)
            if len(page) < _PAGE:
                return


def _session(store: SessionStore, session_id: str) -> Iterator[Turn]:
    path = store.path(session_id)
    prompt = kept = 0
    for index, entry in enumerate(path):
        if entry.source == "engine":
            yield Turn(session_id, prompt, entry.tokens, kept, _pause(path, index))
            kept = prompt + entry.tokens
        prompt += entry.tokens


def _pause(path: Sequence[Entry], index: int) -> float:
    following = path[index + 1 : index + 2]
    return max(0.0, following[0].created_s - path[index].created_s) if following else 0.0

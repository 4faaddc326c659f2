"""Which texts of a session fit a query best, for a store that keeps no full-text index: one is made for the question.

SQLite's FTS5 does it, with the tokenizer and the BM25 of the SQLite store, so that both stores answer alike. The index
lies in a private database without a name, which SQLite spills to a temporary file (unlinked as it is made) when it
outgrows its page cache; it holds words and places, not the texts.

Knows no storage. Invariant: the order is that of the SQLite store over a file with this one session.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvsteward.sessions import rows, words

_CACHE_KIB = 16_384


class Ranking:
    """An index of one session's texts. Use it in one thread, in a `with` block. Raises StoreError where the disk for
    temporary files is full."""

    def __init__(self, session_id: str) -> None:
        self._session_id, self._key = session_id, words.session_key(session_id)
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._db.execute("CREATE VIRTUAL TABLE words USING fts5(session, text, content='', tokenize='unicode61')")
        self._db.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def add(self, place: int, text: str) -> None:
        """`place` counts up with the order of the log: of texts that fit alike, the later comes first."""
        try:
            self._db.execute("INSERT INTO words (rowid, session, text) VALUES (?, ?, ?)", (place, self._key, text))
        except sqlite3.Error as error:
            raise rows.store_error(error, "the index of a search") from error

    def best(self, asked: Sequence[str]) -> list[int]:
        """The places of all texts that hold one of the words, best first."""
        if not asked:
            return []
        sql = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank, rowid DESC"
        try:
            return [place for (place,) in self._db.execute(sql, (words.match(self._session_id, asked),))]
        except sqlite3.Error as error:
            raise rows.store_error(error, "the index of a search") from error

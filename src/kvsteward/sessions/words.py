"""What of a message is searched, and how a query is put: the words of a session's log.

Knows no storage. Invariants: the text of an entry is a pure function of its bytes, bounded by `MAX_TEXT_CHARS`; a
query has at most `MAX_WORDS` words, whatever was asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from kvsteward.sessions.chain import message_of
from kvsteward.wire.chat import image_marks, text_of

MAX_TEXT_CHARS = 1_000_000
MAX_WORDS = 32


def searched_text(raw: bytes) -> str:
    """The text of a message, its calls, and a mark with the hash of each image. "" for bytes that are no message."""
    try:
        message = message_of(raw)
    except (ValueError, RecursionError):
        return ""
    parts = [text_of(message), *image_marks(message)]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            parts += [str(function.get("name") or ""), str(function.get("arguments") or "")]
    text = "\n".join(part for part in parts if part)[:MAX_TEXT_CHARS]
    return text.encode(errors="replace").decode()  # a lone surrogate cannot be stored as text


def words(query: str) -> list[str]:
    """The words of a query, each once: what stands between blanks, without signs around it."""
    query = query.encode(errors="replace").decode().replace("\0", " ")
    found = (word.strip("\"'`.,:;!?()[]{}<>*…") for word in query.split())
    return list(dict.fromkeys(word for word in found if any(c.isalnum() for c in word)))[:MAX_WORDS]


def session_key(session_id: str) -> str:
    """The session as one word of the index, so that a search reads no other session's part of it."""
    return "s" + hashlib.blake2b(session_id.encode(), digest_size=8).hexdigest()


def match(session_id: str, asked: Sequence[str]) -> str:
    """The FTS5 query for entries of a session with any of the words. A word with signs inside is a phrase.
    Syntax: https://sqlite.org/fts5.html, section 3."""
    quoted = " OR ".join('"' + word.replace('"', '""') + '"' for word in asked)
    return f'session : "{session_key(session_id)}" AND text : ({quoted})'

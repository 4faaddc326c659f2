"""A session's places in the indexes that span sessions, as commands that set them or take them back.

An index may say too much (a writer that died), never too little: a place is set before what it speaks of is written,
and taken back after that is gone.

Knows the layout of `rows`. Invariant: what was used later than what is taken back keeps its place.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsteward.sessions.base import Entry, Session
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey import scripts as scripts
from kvsteward.sessions.valkey.link import Command, Link
from kvsteward.sessions.valkey.rows import Holder, Meta


def places(session: Session) -> list[Command]:
    """A session's places in the indexes of sessions."""
    name = rows.text(session.id)
    return [
        ("ZADD", rows.USED, -session.last_used_s, name),
        ("ZADD", rows.used_of(session.tenant), -session.last_used_s, name),
        ("ZADD", rows.DUE, session.last_used_s + session.ttl_s, name),
    ]


def holders(name: str, session_id: str, tenant: str, uid: str, metas: Iterable[Meta | Entry]) -> list[Command]:
    """Sets ("SADD") or takes back ("SREM") the places of entries in the indexes of entries and answers."""
    commands: list[Command] = []
    for meta in metas:
        member = Holder(uid, session_id, meta.hash).member()
        commands.append((name, rows.entry_key(meta.hash), member))
        if meta.response_id is not None:
            commands.append((name, rows.answer_key(tenant, meta.response_id), member))
    return commands


def forget(link: Link, session_id: str, tenant: str | None, used_s: float, due_s: float) -> None:
    """Takes a session out of the indexes, but for one that was used later."""
    name = rows.text(session_id)
    indexes = [rows.USED] if tenant is None else [rows.USED, rows.used_of(tenant)]
    for index in indexes:
        link.run(scripts.DROP, [index], [name, -used_s, "inf"])
    link.run(scripts.DROP, [rows.DUE], [name, "-inf", due_s])

"""Finds who holds an entry or an answer: what the indexes over all sessions say, checked at the sessions.

Knows the layout of `rows`. It writes nothing, but that it takes out of an index who holds an entry no more. Invariant:
what it finds is so: an index may say too much, a session does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvsteward.sessions.base import Found
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey.link import Command, Link
from kvsteward.sessions.valkey.reader import PAGE, Reader, life_command, life_of, pages
from kvsteward.sessions.valkey.rows import Holder, Keys


class Finder:
    """Of one link."""

    def __init__(self, link: Link, reader: Reader) -> None:
        self._link, self._reader = link, reader

    def find(self, hashes: Sequence[str], session_id: str | None) -> list[Found]:
        """In no order. `session_id`: in this session alone."""
        found: list[Found] = []
        for page in pages(hashes):
            found += self._find_all(page) if session_id is None else self._find_in(session_id, page)
        return found

    def find_response(self, tenant: str, response_id: str) -> list[Found]:
        key = rows.answer_key(tenant, response_id)
        found: list[Found] = []
        for members in self._members([key]):
            found += self._held([(key, holder) for _, member in members if (holder := rows.holder_of(member))], tenant)
        return found

    def _find_in(self, session_id: str, hashes: Sequence[str]) -> list[Found]:
        life, depths = self._reader.read(Keys(session_id), session_id, hashes)
        session = life.session
        if session is None:
            return []
        return [
            Found(session_id, hash_, session.head == hash_, session.last_used_s)
            for hash_ in hashes
            if depths(hash_) is not None
        ]

    def _members(self, names: Sequence[bytes]) -> Iterator[list[tuple[bytes, bytes]]]:
        """Pages of members of sets, each with the name of its set."""
        left: list[tuple[bytes, Any]] = [(name, 0) for name in names]
        while left:
            answers = self._link.ask_all([("SSCAN", name, cursor, "COUNT", PAGE) for name, cursor in left])
            yield [(name, m) for (name, _), (_, members) in zip(left, answers, strict=True) for m in members]
            left = [(name, cursor) for (name, _), (cursor, _) in zip(left, answers, strict=True) if int(cursor)]

    def _find_all(self, hashes: Sequence[str]) -> list[Found]:
        found: list[Found] = []
        for members in self._members([rows.entry_key(hash_) for hash_ in hashes]):
            holders = [
                (name, holder)
                for name, member in members
                if (holder := rows.holder_of(member)) and rows.entry_key(holder.hash) == name
            ]
            for page in pages(holders):
                found += self._held(page)
        return list({(one.hash, one.session_id): one for one in found}.values())

    def _held(self, holders: Sequence[tuple[bytes, Holder]], tenant: str | None = None) -> list[Found]:
        """Those of an index's holders that do hold the entry. Those of a session that is no more leave the index."""
        ids = {holder.session_id: Keys(holder.session_id) for _, holder in holders}
        commands: list[Command] = [life_command(keys) for keys in ids.values()]
        for _, holder in holders:
            commands.append(("HEXISTS", ids[holder.session_id][rows.ENTRIES], rows.text(holder.hash)))
        answers = self._link.ask_all(commands)
        lives = {id_: life_of(id_, row) for id_, row in zip(ids, answers, strict=False)}
        found: list[Found] = []
        gone: list[Command] = []
        for (name, holder), holds in zip(holders, answers[len(ids) :], strict=True):
            life = lives[holder.session_id]
            if life.uid != holder.uid:  # a uid stands before its first holder, and never comes back
                gone.append(("SREM", name, holder.member()))
            elif life.session is not None and holds and tenant in {None, life.session.tenant}:
                session = life.session
                found.append(Found(session.id, holder.hash, session.head == holder.hash, session.last_used_s))
        self._link.ask_all(gone)
        return found

"""What is wrong with a session in the server: beside what `integrity` finds, damage to rows and to the indexes.

Reads and reports, never mends.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvsteward.errors import CorruptLogError, NotFoundError
from kvsteward.sessions.base import Decision, Entry, Fault, Session
from kvsteward.sessions.blobs import mend
from kvsteward.sessions.integrity import Stored, faults
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey.link import Link
from kvsteward.sessions.valkey.reader import Life, Reader, sized
from kvsteward.sessions.valkey.rows import Holder, Keys, Meta

_TRIES = 5


def _session_faults(link: Link, keys: Keys, session: Session, life: Life) -> list[Fault]:
    more: list[Fault] = []
    reader = Reader(link)

    def entries() -> Iterator[tuple[Entry, str]]:
        for page in reader.orders(keys):
            metas: list[Meta] = []
            for name, value in zip(page, reader.values(keys[rows.ENTRIES], page), strict=True):
                try:
                    metas += [rows.decode_meta(rows.string(name), value)] if value is not None else []
                except CorruptLogError as error:
                    more.append(Fault(session.id, rows.string(name), error.message))
            for part in sized(metas):
                held = link.ask_all(
                    [
                        ("SISMEMBER", rows.entry_key(meta.hash), Holder(life.uid, session.id, meta.hash).member())
                        for meta in part
                    ]
                )
                lefts, blobs = reader.bodies(keys, session.id, part)
                for meta, is_held, left in zip(part, held, lefts, strict=True):
                    if not is_held:
                        more.append(Fault(session.id, meta.hash, "the entry is not in the index of entries"))
                    yield meta.unchecked(mend(left, meta.places, blobs.get)), meta.body

    def decisions() -> Iterator[tuple[Decision, str]]:
        for value in reader.all_of(keys[rows.DECISIONS]):
            try:
                yield rows.decode_decision(session.id, value)
            except CorruptLogError as error:
                more.append(Fault(session.id, "", error.message))

    def drafts() -> Iterator[tuple[str, str]]:
        try:
            yield from ((rows.string(draft.turn_id), draft.parent) for draft in reader.drafts(keys, session.id))
        except CorruptLogError as error:
            more.append(Fault(session.id, "", error.message))

    stored = Stored(session, entries(), decisions(), drafts(), life.entries, life.decisions)
    found = list(faults(stored))
    counts = link.ask_all([("HLEN", keys[rows.ENTRIES]), ("LLEN", keys[rows.ORDER]), ("ZCARD", keys[rows.NAMES])])
    if len(set(counts)) > 1:
        problem = "{} entries are there, {} in their order, {} by their names".format(*counts)
        found.append(Fault(session.id, "", problem))
    return found + more


def all_faults(link: Link) -> list[Fault]:
    """Of all sessions."""
    found: list[Fault] = []
    seen = set[str]()
    for members in Reader(link).scanned("ZSCAN", rows.USED):
        for name, _ in members:
            id_ = rows.string(name)
            if id_ in seen:
                continue
            seen.add(id_)
            try:
                found += faults_of(link, id_)
            except NotFoundError:
                continue  # deleted since
    return found


def faults_of(link: Link, session_id: str) -> list[Fault]:
    """Of one session. Entries may be added while they are read: then it is done again. Raises NotFoundError."""
    keys, reader = Keys(session_id), Reader(link)
    found: list[Fault] = []
    for _ in range(_TRIES):
        try:
            life = reader.life(keys, session_id)
        except CorruptLogError as error:
            return [Fault(session_id, "", error.message)]
        if life.session is None:
            raise NotFoundError(f"no session {session_id!r}")
        found = _session_faults(link, keys, life.session, life)
        if not found or link.ask("HGET", keys[rows.ROW], "v") == life.version:
            break
    return found

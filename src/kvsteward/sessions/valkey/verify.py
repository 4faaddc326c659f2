"""What is wrong with a session in the server: beside what `integrity` finds, damage to rows and to the indexes.

Reads and reports, never mends.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvsteward.errors import CorruptLogError
from kvsteward.sessions.base import Decision, Entry, Fault, Session
from kvsteward.sessions.blobs import mend
from kvsteward.sessions.integrity import Stored, faults
from kvsteward.sessions.valkey import rows as rows
from kvsteward.sessions.valkey.link import Link
from kvsteward.sessions.valkey.reader import Life, Reader, sized
from kvsteward.sessions.valkey.rows import Holder, Keys, Meta


def session_faults(link: Link, keys: Keys, session: Session, life: Life) -> list[Fault]:
    """Everything wrong with one session."""
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
                lefts = reader.values(keys[rows.RAW], [rows.text(meta.hash) for meta in part])
                blobs = reader.blobs(keys, part)
                for meta, is_held, left in zip(part, held, lefts, strict=True):
                    if not is_held:
                        more.append(Fault(session.id, meta.hash, "the entry is not in the index of entries"))
                    yield meta.unchecked(mend(left or b"", meta.places, blobs.get)), meta.body

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

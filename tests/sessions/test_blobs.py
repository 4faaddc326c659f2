"""Images are kept once, beside the messages, and come back byte for byte."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.errors import CorruptLogError
from kvsteward.sessions import SqliteStore
from kvsteward.sessions.blobs import cut, decode_places, encode_places, mend
from kvsteward.wire import fingerprint

BIG = "data:image/png;base64," + "QUJD" * 50_000
OTHER = "data:image/jpeg;base64," + "REVG" * 100


def image(*urls, text="see"):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


def fill(store, make, *messages, id_="s1"):
    session, entries, parent = make.session(id_), [], fingerprint.root()
    for depth, message in enumerate(messages, 1):
        entries.append(make.entry(message, parent, depth))
        parent = entries[-1].hash
    store.create(session)
    store.append(replace(session, head=parent), entries)
    return entries


@given(
    st.lists(
        st.one_of(st.binary(max_size=40), st.sampled_from([BIG.encode(), OTHER.encode(), b"data:image/png;"])),
        max_size=6,
    )
)
def test_what_is_cut_is_mended(parts):
    raw = b"".join(parts)
    left, places, taken = cut(raw)
    assert mend(left, decode_places(encode_places(places)), taken.get) == raw


def test_an_image_in_forty_messages_is_stored_once(store, make):
    entries = fill(store, make, *(image(BIG, OTHER, text=f"turn {n}") for n in range(40)))
    assert store.path("s1") == entries
    assert store.item("s1", entries[7].hash[:12]) == entries[7]
    assert store.search("s1", "turn 7") == [entries[7]]
    assert store.lookup("s1", "7 of the turn")[0] == entries[7]
    assert store.verify() == []
    store.branch(make.session("s2"), "s1", entries[3].hash)
    store.delete("s1")
    assert store.path("s2") == entries[:4]
    assert store.verify() == []


def test_the_file_grows_by_one_image(tmp_path, make):
    store = SqliteStore(tmp_path / "log.db")
    fill(store, make, *(image(BIG, text=f"turn {n}") for n in range(40)))
    store.close()
    assert (tmp_path / "log.db").stat().st_size < 2 * len(BIG)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE blobs SET data = x'00'",
        "DELETE FROM blobs",
        "UPDATE entries SET blobs = '[[1'",
        "UPDATE entries SET blobs = NULL",
    ],
)
def test_a_blob_that_was_tampered_with_is_found(tmp_path, make, statement):
    store = SqliteStore(tmp_path / "log.db")
    entries = fill(store, make, image(BIG))
    store.close()
    db = sqlite3.connect(tmp_path / "log.db", isolation_level=None)
    db.execute(statement)
    db.close()
    store = SqliteStore(tmp_path / "log.db")
    with pytest.raises(CorruptLogError):
        store.path("s1")
    assert {fault.hash for fault in store.verify()} == {entries[0].hash}
    store.close()


def test_a_long_text_that_is_no_image_stays_where_it_is():
    raw = json.dumps({"role": "user", "content": "data:image/png;base64, is how it starts"}).encode()
    assert cut(raw) == (raw, (), {})

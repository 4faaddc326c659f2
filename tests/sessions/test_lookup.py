"""What a query finds in a session's log."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.sessions import SessionStore, SqliteStore
from kvsteward.sessions.migrations import MIGRATIONS, migrate
from kvsteward.sessions.words import MAX_WORDS, words
from kvsteward.wire import fingerprint
from kvsteward.wire.chat import image_hash


def fill(store: SessionStore, make, *texts: str, id_: str = "s1"):
    session, entries = make.session(id_), make.chain(*texts)
    store.create(session)
    store.append(replace(session, head=entries[-1].hash), entries)
    return replace(session, head=entries[-1].hash), entries


def test_a_query_as_it_stands_comes_first_and_alone(store, make):
    _, entries = fill(store, make, "order #W-1 is late", "the late order", "order #W-1, #W-2")
    assert store.lookup("s1", "#W-1") == [entries[2], entries[0]]
    assert store.lookup("s1", "#W-1", limit=1) == [entries[2]]
    assert store.lookup("s1", "#W-1", limit=0) == []


def test_words_in_another_order_are_found_rare_ones_first(store, make):
    _, entries = fill(store, make, "the parcel left Hamburg", *["the parcel is on its way"] * 5, "the customer waits")
    assert store.lookup("s1", "Where did HAMBURG see the parcel?")[0] == entries[0]
    assert store.lookup("s1", "zebra unicorn") == []
    assert store.lookup("s1", "?!") == []


def test_an_id_with_signs_is_found_by_its_words_too(store, make):
    _, entries = fill(store, make, "nothing here", "user sara_doe_496 wrote", "john_doe_1 wrote")
    assert store.lookup("s1", "which user is sara_doe_496, please")[0] == entries[1]


@pytest.mark.parametrize("query", ['"', 'a" OR "b', "text:x", "NEAR(a b)", "*", "' --", "a\0b", "\ud800", "(", "-x"])
def test_no_query_is_syntax(store, make, query):
    fill(store, make, "plain text")
    assert store.lookup("s1", f"{query} unheard") == []


def test_a_query_stays_in_its_session(store, make):
    fill(store, make, "the blue door", id_="s1")
    fill(store, make, "the red door is open", id_="s2")
    assert store.lookup("s1", "red open") == []
    assert len(store.lookup("s2", "open red")) == 1


def test_a_query_may_keep_to_one_branch(store, make):
    session, entries = fill(store, make, "first", "second apple pie")
    other = make.chain("third apple tart", after=entries[0])
    store.append(replace(session, head=other[0].hash), other)
    assert len(store.lookup("s1", "tart pie")) == 2
    assert store.lookup("s1", "tart pie", head=other[0].hash) == other
    assert store.lookup("s1", "apple", head=entries[1].hash) == [entries[1]]


def test_calls_and_images_are_found(store, make):
    call = {"id": "c", "type": "function", "function": {"name": "open_gate", "arguments": '{"gate": "north"}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    one = make.entry({"role": "assistant", "content": None, "tool_calls": [call]}, fingerprint.root(), 1)
    two = make.entry({"role": "user", "content": [{"type": "text", "text": "look"}, image]}, one.hash, 2)
    session = make.session()
    store.create(session)
    store.append(replace(session, head=two.hash), [one, two])
    assert store.lookup("s1", "gate to the north") == [one]
    assert store.lookup("s1", image_hash("data:image/png;base64,AAAA")[:10]) == [two]


def test_a_branch_and_a_wiped_session_take_their_words_along(store, make):
    _, entries = fill(store, make, "green tea", "black coffee")
    store.branch(make.session("s2"), "s1", entries[0].hash)
    assert [e.hash for e in store.lookup("s2", "tea that is green")] == [entries[0].hash]
    assert store.lookup("s2", "coffee that is black") == []
    store.delete("s1")
    assert len(store.lookup("s2", "tea that is green")) == 1
    assert store.verify() == []


def test_a_file_from_before_the_index_gets_one(tmp_path: Path, make):
    path = tmp_path / "old.db"
    store = SqliteStore(path)
    _, entries = fill(store, make, "an old apple", "a new pear")
    store.close()
    db = sqlite3.connect(path, isolation_level=None)
    for statement in ("DROP TABLE words", "DROP TABLE texts", "DROP TABLE vectors", "PRAGMA user_version = 1"):
        db.execute(statement)
    for (column,) in db.execute("SELECT name FROM pragma_table_info('entries') WHERE name = 'blobs'").fetchall():
        db.execute(f"ALTER TABLE entries DROP COLUMN {column}")
    db.execute("DROP TABLE IF EXISTS blobs")
    for column in ("engine", "compactions", "again_tokens"):
        db.execute(f"ALTER TABLE sessions DROP COLUMN {column}")
    assert migrate(db) == len(MIGRATIONS) - 1
    db.close()
    store = SqliteStore(path)
    assert [e.hash for e in store.lookup("s1", "apple so old")] == [entries[0].hash]
    assert store.verify() == []
    store.close()


@given(st.text(max_size=400))
def test_words_are_few_and_in_the_query(query):
    found = words(query)
    assert len(found) <= MAX_WORDS
    assert all(word in query for word in found)

"""What must be true of an index of vectors, for each store that has one."""

from __future__ import annotations

import builtins
import math
import sqlite3
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsteward.errors import ConfigError, StoreError
from kvsteward.sessions import MemoryStore, SessionStore, Space, SqliteStore
from kvsteward.sessions.nearest import nearest, packed

A2, A3, B2 = Space("a", 2), Space("a", 3), Space("b", 2)


@pytest.fixture
def vectors(store):
    index = store.vectors()
    yield index
    index.close()


def fill(store, make, *texts, id_="s1", used_s=100.0):
    session, entries = make.session(id_, used_s=used_s, state="idle"), make.chain(*texts)
    store.create(session)
    store.append(replace(session, head=entries[-1].hash), entries)
    return [entry.hash for entry in entries]


def test_the_nearest_passage_of_each_entry_counts(store, vectors, make):
    a, b, c = fill(store, make, "a", "b", "c")
    assert vectors.add("s1", A2, a, [[1, 0], [0, 5]])
    assert vectors.add("s1", A2, b, [[3, 3]])
    assert vectors.add("s1", A2, c, [[-1, 0]])
    found = vectors.nearest("s1", A2, [2, 0], limit=10)
    assert [one.hash for one in found] == [a, b, c]
    assert [one.cosine for one in found] == pytest.approx([1, math.sqrt(0.5), -1], abs=1e-3)
    assert [one.hash for one in vectors.nearest("s1", A2, [0, 1], limit=1)] == [a]
    assert vectors.nearest("s1", A2, [0, 1], limit=0) == []


def test_models_and_lengths_never_meet(store, vectors, make):
    a, b = fill(store, make, "a", "b")
    vectors.add("s1", A2, a, [[1, 0]])
    vectors.add("s1", B2, b, [[1, 0]])
    assert [one.hash for one in vectors.nearest("s1", A2, [1, 0], limit=9)] == [a]
    assert vectors.nearest("s1", A3, [1, 0, 0], limit=9) == []
    assert vectors.known("s1", A2, [a, b, "f" * 32]) == {a}
    assert vectors.known("s1", A3, [a, b]) == frozenset()
    vectors.forget_others("s1", A2)
    assert vectors.known("s1", B2, [b]) == frozenset()
    assert vectors.known("s1", A2, [a]) == {a}


def test_an_entry_without_text_is_known_and_never_found(store, vectors, make):
    (a,) = fill(store, make, "a")
    assert vectors.add("s1", A2, a, [])
    assert vectors.known("s1", A2, [a]) == {a}
    assert vectors.nearest("s1", A2, [1, 0], limit=9) == []


def test_adding_again_replaces(store, vectors, make):
    (a,) = fill(store, make, "a")
    vectors.add("s1", A2, a, [[1, 0], [1, 0]])
    vectors.add("s1", A2, a, [[0, 1]])
    assert vectors.nearest("s1", A2, [1, 0], limit=9)[0].cosine == pytest.approx(0, abs=1e-3)


def test_sessions_do_not_see_each_other(store, vectors, make):
    (a,) = fill(store, make, "a")
    (same,) = fill(store, make, "a", id_="s2")
    vectors.add("s1", A2, a, [[1, 0]])
    assert vectors.nearest("s2", A2, [1, 0], limit=9) == []
    assert not vectors.adopt("s2", B2, same)
    assert vectors.adopt("s2", A2, same), "the same message after the same history has the same vectors"
    assert [one.hash for one in vectors.nearest("s2", A2, [1, 0], limit=9)] == [same]


def test_what_is_deleted_takes_its_vectors_along(store, vectors, make):
    (a,) = fill(store, make, "a")
    (b,) = fill(store, make, "b", id_="s2")
    vectors.add("s1", A2, a, [[1, 0]])
    vectors.add("s2", A2, b, [[1, 0]])
    store.delete("s1")
    assert vectors.known("s1", A2, [a]) == frozenset()
    assert vectors.nearest("s1", A2, [1, 0], limit=9) == []
    assert not vectors.add("s1", A2, a, [[1, 0]]), "late vectors of what is gone are not kept"
    assert not vectors.adopt("s1", A2, a)
    assert vectors.known("s2", A2, [b]) == {b}


def test_a_log_whose_time_is_over_takes_its_vectors_along(store, vectors, make):
    (a,) = fill(store, make, "a", used_s=100.0)
    vectors.add("s1", A2, a, [[1, 0]])
    store.sweep(now=200.0, log_retention_s=1e6)
    assert store.get("s1").state == "expired"
    assert vectors.known("s1", A2, [a]) == {a}, "the log is still there"
    store.sweep(now=3e6, log_retention_s=1e6)
    assert vectors.known("s1", A2, [a]) == frozenset()


@pytest.mark.parametrize("bad", [[0, 0], [math.nan, 1], [math.inf, 1]])
def test_what_is_no_direction_is_refused_and_nothing_is_kept(store, vectors, make, bad):
    (a,) = fill(store, make, "a")
    with pytest.raises(ValueError, match="finite"):
        vectors.add("s1", A2, a, [[1, 0], bad])
    assert vectors.known("s1", A2, [a]) == frozenset()


def test_entries_on_a_path(store, make):
    session, (first, second) = make.session(), make.chain("one", "two")
    (other,) = make.chain("three", after=first)
    store.create(session)
    store.append(replace(session, head=second.hash), [first, second])
    store.append(replace(session, head=other.hash), [other])
    asked = [first.hash, second.hash, other.hash, "0" * 32]
    assert store.on_path("s1", second.hash, asked) == {first.hash, second.hash}
    assert store.on_path("s1", other.hash, asked) == {first.hash, other.hash}
    assert store.on_path("s1", other.hash, []) == frozenset()


def test_they_outlive_the_process_and_closing_twice_is_one(tmp_path, make):
    store = SqliteStore(tmp_path / "log.db")
    (a,) = fill(store, make, "a")
    index = store.vectors()
    index.add("s1", A2, a, [[1, 0]])
    index.close()
    index.close()
    store.close()
    store = SqliteStore(tmp_path / "log.db")
    index = store.vectors()
    assert index.known("s1", A2, [a]) == {a}
    assert store.verify() == []
    index.close()
    store.close()


def test_a_row_that_was_cut_is_passed_over(tmp_path, make):
    store = SqliteStore(tmp_path / "log.db")
    a, b = fill(store, make, "a", "b")
    index = store.vectors()
    index.add("s1", A2, a, [[1, 0]])
    index.add("s1", A2, b, [[1, 0.1]])
    with sqlite3.connect(tmp_path / "log.db") as db:
        db.execute("UPDATE vectors SET vector = x'00' WHERE hash = ?", (a,))
    db.close()
    assert [one.hash for one in index.nearest("s1", A2, [1, 0], limit=9)] == [b]
    index.close()
    store.close()


def test_a_file_that_cannot_be_used_is_an_error_of_ours(tmp_path, make):
    store = SqliteStore(tmp_path / "log.db")
    (a,) = fill(store, make, "a")
    index = store.vectors()
    with sqlite3.connect(tmp_path / "log.db") as db:
        db.execute("DROP TABLE vectors")
    db.close()
    with pytest.raises(StoreError):
        index.known("s1", A2, [a])
    index.close()
    store.close()


def test_without_numpy_the_error_says_what_to_install(store, monkeypatch):
    makers = {"vectors_memory", "vectors_sqlite", "nearest", "valkey.vectors"}
    for name in [name for name in sys.modules if name.removeprefix("kvsteward.sessions.") in makers]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="numpy") as caught:
        store.vectors()
    assert "pip install 'kvsteward[embeddings]'" in caught.value.hint


def test_a_store_without_a_place_for_them_says_so():
    class Bare(MemoryStore):
        vectors = SessionStore.vectors

    with pytest.raises(ConfigError, match="keeps no vectors"):
        Bare().vectors()


UNIT = st.lists(st.floats(-1, 1, allow_nan=False), min_size=4, max_size=4).filter(
    lambda v: sum(x * x for x in v) > 1e-2
)


def cosine(one, other):
    return sum(x * y for x, y in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from("abcdef"), UNIT), max_size=30), UNIT, st.integers(0, 8))
def test_a_search_is_what_comparing_with_each_would_be(rows, query, limit):
    found = nearest([(name, packed(vector)) for name, vector in rows], query, limit)
    best: dict[str, float] = {}
    for name, vector in rows:
        best[name] = max(best.get(name, -2), cosine(vector, query))
    assert len(found) == min(limit, len(best))
    assert [one.cosine for one in found] == pytest.approx(sorted(best.values(), reverse=True)[:limit], abs=2e-3)
    for one in found:
        assert one.cosine == pytest.approx(best[one.hash], abs=2e-3)

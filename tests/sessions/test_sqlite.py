"""What only the file store must do: outlive a kill, notice damage, say what is wrong with a disk, wipe for good."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvsteward.errors import CorruptLogError, StoreError
from kvsteward.sessions import Decision, SqliteStore
from kvsteward.sessions.migrations import MIGRATIONS, migrate
from kvsteward.wire import fingerprint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


def fill(store, make, *texts, id_="s1"):
    session = make.session(id_)
    store.create(session)
    entries = make.chain(*texts)
    session = replace(session, head=entries[-1].hash)
    store.append(session, entries)
    return session, entries


def tamper(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


# --- damage


TVO = fingerprint.body_hash(b'{"role": "user", "content": "tvo"}')
DAMAGE = {
    "a flipped byte": ("UPDATE entries SET raw = CAST(replace(raw, 'two', 'tvo') AS BLOB) WHERE depth = 2", "bytes"),
    "a flipped byte, body hash mended": (
        f"UPDATE entries SET raw = CAST(replace(raw, 'two', 'tvo') AS BLOB), body = '{TVO}' WHERE depth = 2",
        "another hash",
    ),
    "no JSON any more": ("UPDATE entries SET raw = 'x' WHERE depth = 2", "not a message"),
    "JSON that is no message": ("""UPDATE entries SET raw = '{"role":1e999}' WHERE depth = 2""", "bytes"),
    "a deleted row": ("DELETE FROM entries WHERE depth = 2", "its parent"),
    "a deleted head": ("DELETE FROM entries WHERE depth = 3", "head"),
    "a deleted leaf of another branch": ("DELETE FROM entries WHERE instr(raw, CAST('leaf' AS BLOB))", "were written"),
    "a swapped parent": (
        "UPDATE entries SET parent = (SELECT parent FROM entries WHERE depth = 2) WHERE depth = 3",
        "another hash",
    ),
    "a wrong depth": ("UPDATE entries SET depth = 7 WHERE depth = 3", "depth is 7"),
    "a changed hash": ("UPDATE entries SET hash = 'ffff' WHERE depth = 3", "another hash"),
    "a lost head": ("UPDATE sessions SET head = 'ffff'", "head"),
    "another tenant": ("UPDATE sessions SET tenant = 'other'", "its parent"),
    "a decision that points nowhere": ("UPDATE decisions SET at = 'ffff'", "not there"),
    "a changed decision": ("UPDATE decisions SET payload = '{}'", "does not match"),
    "a deleted decision": ("DELETE FROM decisions", "1 were written"),
    "a draft of no session": ("UPDATE drafts SET session_id = 'gone'", "no session"),
    "a draft of no parent": ("UPDATE drafts SET parent = 'gone'", "draft"),
    "a deleted session": ("DELETE FROM sessions", "no session"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_finds(path: Path, make, damage: str) -> None:
    store = SqliteStore(path)
    session, entries = fill(store, make, "one", "two", "three")
    leaf = make.chain("leaf", after=entries[0])
    store.append(session, leaf, [Decision(entries[0].hash, "distil", b'{"n":1}', 1.0)])
    store.draft("s1", "t1", entries[2].hash, b'{"role":"assistant"}', now=1.0)
    assert store.verify() == []
    assert store.verify("s1") == []
    store.close()
    statement, problem = DAMAGE[damage]
    tamper(path, statement)
    store = SqliteStore(path)
    assert any(problem in fault.problem for fault in store.verify())
    store.close()


def test_a_flipped_byte_in_the_file_is_never_served(path: Path, make) -> None:
    store = SqliteStore(path)
    _, entries = fill(store, make, "one", "a very unusual text", "three")
    store.close()
    image = path.read_bytes()
    assert image.count(b'"a very unusual') == 1, "beside it, the index has the words"
    path.write_bytes(image.replace(b"very unusual", b"very unusuam"))
    store = SqliteStore(path)
    for read in (lambda: store.path("s1"), lambda: store.item("s1", entries[1].hash), lambda: store.search("s1", "un")):
        with pytest.raises(CorruptLogError):
            read()
    assert {fault.hash for fault in store.verify()} == {entries[1].hash}
    assert store.path("s1", entries[0].hash) == entries[:1]
    store.close()


@pytest.mark.parametrize("statement", ["DELETE FROM entries WHERE depth = 2", "UPDATE entries SET parent = hash"])
def test_a_broken_chain_is_not_served(path: Path, make, statement: str) -> None:
    store = SqliteStore(path)
    _, entries = fill(store, make, "one", "two", "three")
    store.close()
    tamper(path, statement)
    store = SqliteStore(path)
    with pytest.raises(CorruptLogError):
        store.path("s1")
    with pytest.raises(CorruptLogError):
        store.branch(make.session("s2"), "s1", entries[2].hash)
    assert store.get("s2") is None
    store.close()


@pytest.mark.parametrize("where", ["header", "middle"])
def test_a_damaged_file_is_said_to_be_one(path: Path, make, where: str) -> None:
    store = SqliteStore(path)
    fill(store, make, *(f"message {n} " + "x" * 500 for n in range(500)))
    store.close()
    image = bytearray(path.read_bytes())
    span = slice(0, 100) if where == "header" else slice(4096 * 12, 4096 * 40)
    image[span] = bytes(random.Random(7).randbytes(span.stop - span.start))
    path.write_bytes(image)
    with pytest.raises(StoreError):
        store = SqliteStore(path)
        try:
            faults = store.verify()
            assert faults
            store.path("s1")
        finally:
            store.close()


# --- files that cannot be used


def test_a_file_that_is_no_database(path: Path) -> None:
    path.write_bytes(b"this is a text, not a database\n" * 100)
    with pytest.raises(StoreError, match="not a database") as caught:
        SqliteStore(path)
    assert "--store" in caught.value.hint


def test_a_database_of_another_program_is_left_alone(path: Path) -> None:
    tamper(path, "CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="another program"):
        SqliteStore(path)
    db = sqlite3.connect(path)
    assert [name for (name,) in db.execute("SELECT name FROM sqlite_schema")] == ["theirs"]
    db.close()


def test_a_newer_file_is_refused(path: Path, make) -> None:
    store = SqliteStore(path)
    fill(store, make, "a")
    store.close()
    tamper(path, f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(StoreError, match="schema version") as caught:
        SqliteStore(path)
    assert "Upgrade" in caught.value.hint


def test_migrations_run_once_each_and_whole(path: Path) -> None:
    def good(db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE second (x)")

    def bad(db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE third (x)")
        raise ZeroDivisionError

    db = sqlite3.connect(path, isolation_level=None)
    released = len(MIGRATIONS)
    assert migrate(db) == released
    assert migrate(db) == 0
    steps = (*MIGRATIONS, good, bad)
    with pytest.raises(ZeroDivisionError):
        migrate(db, steps)
    assert db.execute("PRAGMA user_version").fetchone() == (released + 1,)
    assert {name for (name,) in db.execute("SELECT name FROM sqlite_schema")} >= {"second"}
    assert not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'third'").fetchall()
    assert migrate(db, steps[:-1]) == 0
    db.close()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        SqliteStore(tmp_path / "file" / "log.db")
    with pytest.raises(StoreError):
        SqliteStore(tmp_path)


def test_a_full_disk_says_so_and_harms_nothing(path: Path, make) -> None:
    store = SqliteStore(path)
    session, entries = fill(store, make, "a")
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages + 4}")
    big = make.chain("x" * 100_000, after=entries[0])
    with pytest.raises(StoreError, match="full") as caught:
        store.append(replace(session, head=big[0].hash, turns=9), big)
    assert "free space" in caught.value.hint
    assert store.get("s1") == session
    assert store.path("s1") == entries
    store._db.execute("PRAGMA max_page_count = 100000")
    store.append(replace(session, head=big[0].hash), big)
    assert store.path("s1") == entries + big
    assert store.verify() == []
    store.close()


FILLER = """
import pathlib, resource, sys
from dataclasses import replace
from kvsteward.errors import StoreError
from kvsteward.sessions import Entry, Session, SqliteStore
from kvsteward.wire import fingerprint

store = SqliteStore(pathlib.Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, 2**21))  # the kernel refuses to let any file grow beyond
head = fingerprint.root()
session = Session("s1", "", "idle", head, 1.0, 1.0, 60.0)
store.create(session)
try:
    for depth in range(1, 1000):
        message = {"content": "x" * 50_000, "n": depth}
        parent, head = head, fingerprint.link(head, message)
        raw = fingerprint.orjson.dumps(message)
        store.append(replace(session, head=head), [Entry(head, parent, depth, "client", raw, 1.0)])
        print(head, flush=True)
except StoreError as error:
    print(error.hint, file=sys.stderr)
    assert len(store.path("s1")) == depth - 1
    raise SystemExit(3)
"""


def test_a_write_that_the_kernel_refuses_loses_nothing_acknowledged(path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", FILLER, str(path)], capture_output=True, text=True, timeout=60)
    assert child.returncode == 3, child.stderr
    assert "disk" in child.stderr
    printed = child.stdout.split()
    assert len(printed) > 5
    store = SqliteStore(path)
    assert [entry.hash for entry in store.path("s1")] == printed
    assert store.verify() == []
    store.close()


def test_a_store_that_became_read_only(path: Path, make) -> None:
    store = SqliteStore(path)
    session, entries = fill(store, make, "a")
    store._db.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match="readonly") as caught:
        store.put(session)
    assert "permissions" in caught.value.hint
    assert store.path("s1") == entries
    store.close()


def test_a_store_that_another_process_holds(path: Path, make) -> None:
    store = SqliteStore(path, busy_timeout_s=0.05)
    session, entries = fill(store, make, "a")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked") as caught:
        store.put(session)
    assert "Another process" in caught.value.hint
    assert store.path("s1") == entries  # readers are not held up
    other.execute("ROLLBACK")
    other.close()
    store.put(session)
    store.close()


def test_a_closed_store_says_so(path: Path) -> None:
    store = SqliteStore(path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("s1")


# --- wiping


@pytest.mark.parametrize("how", ["delete", "sweep"])
def test_wiped_text_is_not_in_the_file(path: Path, make, how: str) -> None:
    store = SqliteStore(path)
    _, entries = fill(store, make, "a secret text", "another secret text " + "y" * 50_000, id_="gone")
    store.draft("gone", "t", entries[1].hash, b'{"content":"a secret draft"}', now=1.0)
    kept, _ = fill(store, make, "a plain text", id_="kept")
    store.put(replace(kept, last_used_s=1e6))
    if how == "delete":
        assert store.delete("gone")
    else:
        store.sweep(now=1e6, log_retention_s=1e5)
    image = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert b"a plain text" in image
    assert b"secret" not in image
    assert b"yyyyyyyy" not in image
    store.close()


# --- more than one at once


def test_two_stores_on_one_file(path: Path, make) -> None:
    one, two = SqliteStore(path), SqliteStore(path)
    fill(one, make, "a", id_="s1")
    assert len(two.path("s1")) == 1
    problems: list[BaseException] = []

    def work(store: SqliteStore, name: str) -> None:
        try:
            for n in range(50):
                fill(store, make, f"{name} {n}", id_=f"{name}-{n}")
        except BaseException as problem:  # noqa: BLE001 - carried to the test's thread
            problems.append(problem)

    threads = [threading.Thread(target=work, args=args) for args in ((one, "x"), (two, "y"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(one.list(limit=1000)) == 101
    assert two.verify() == []
    one.close()
    two.close()


def test_two_processes_may_make_the_file_at_once(path: Path) -> None:
    code = "import sys, pathlib; from kvsteward.sessions import SqliteStore; SqliteStore(pathlib.Path(sys.argv[1]))"
    children = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(4)]
    assert [child.wait(timeout=60) for child in children] == [0] * 4

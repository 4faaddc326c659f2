"""What only the Valkey store must do: be shared, heal what a dead writer left, outlive its server, say what is wrong."""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsteward.errors import (
    ConfigError,
    CorruptLogError,
    InvariantError,
    KVStewardError,
    NotFoundError,
    StateError,
    StoreError,
    StoreUnavailableError,
)
from kvsteward.sessions import Decision, MemoryStore, Space, SqliteStore, open_store
from kvsteward.sessions.valkey import ValkeyStore, ending, logs
from kvsteward.sessions.valkey.reader import sized
from kvsteward.sessions.valkey.rows import Meta
from kvsteward.wire import fingerprint
from valkey_server import PATIENCE_S, Server, free_port


@pytest.fixture
def one(valkey_server: Server):
    with closing(ValkeyStore(valkey_server.url)) as store:
        yield store


@pytest.fixture
def two(valkey_server: Server):
    """Another gateway's."""
    with closing(ValkeyStore(valkey_server.url)) as store:
        yield store


@pytest.fixture
def server(valkey_server: Server) -> Server:
    return valkey_server


@pytest.fixture
def own_server(tmp_path: Path):
    """One to kill, with an append-only file."""
    server = Server(tmp_path, "--appendonly", "yes")
    yield server
    server.kill()


def fill(store, make, *texts, id_="s1", **fields):
    session = make.session(id_, **fields)
    store.create(session)
    entries = make.chain(*texts, tenant=session.tenant)
    session = replace(session, head=entries[-1].hash)
    store.append(session, entries)
    return session, entries


class Died(BaseException):
    """The process of the writer is no more."""


def dies_at(monkeypatch, store, name: str, call: int = 1):
    """The process dies as it calls a method for the `call`th time."""
    method, calls = getattr(store, name), [0]

    def die(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            raise Died
        return method(*args, **kwargs)

    monkeypatch.setattr(store, name, die)


# --- shared by several


def test_what_one_writes_the_other_reads(one, two, make):
    session, entries = fill(one, make, "a", "b", tenant="t")
    one.append(session, [], [Decision(entries[0].hash, "distil", b"{}", 1.0)])
    assert two.get("s1") == session
    assert two.path("s1") == entries
    assert len(two.decisions("s1")) == 1
    assert [found.session_id for found in two.find([entries[1].hash])] == ["s1"]
    assert two.list(tenant="t") == [session]
    assert two.delete("s1")
    assert one.get("s1") is None


def test_two_that_append_to_one_parent_make_two_branches(one, two, make):
    """As with one writer: nothing is refused, nothing is lost, and the head is the later one's."""
    session, entries = fill(one, make, "a")
    mine, theirs = make.chain("mine", after=entries[0]), make.chain("theirs", after=entries[0])
    one.append(replace(session, head=mine[0].hash), mine)
    two.append(replace(session, head=theirs[0].hash), theirs)
    assert one.get("s1").head == theirs[0].hash
    assert one.path("s1") == [*entries, *theirs]
    assert one.path("s1", mine[0].hash) == [*entries, *mine]
    assert one.verify() == []


def test_a_row_that_another_has_written_meanwhile_is_read_again(one, two, make):
    session, entries = fill(one, make, "a")
    mine, theirs = make.chain("mine", after=entries[0]), make.chain("theirs", after=entries[0])
    seen = []

    def change(stored):
        seen.append(stored.turns)
        if len(seen) == 1:  # in between
            two.append(replace(session, head=theirs[0].hash, turns=7), theirs)
        return replace(stored, head=mine[0].hash, turns=stored.turns + 1)

    assert one.amend("s1", change, mine).turns == 8
    assert seen == [0, 7]
    assert one.path("s1", theirs[0].hash) == [*entries, *theirs]
    assert one.path("s1") == [*entries, *mine]
    assert one.verify() == []


def test_no_change_is_lost_among_many_writers(one, two, make):
    fill(one, make, "a")
    problems: list[BaseException] = []

    def work(store) -> None:
        try:
            for _ in range(40):
                store.amend("s1", lambda session: replace(session, turns=session.turns + 1))
        except BaseException as problem:  # noqa: BLE001 - carried to the test's thread
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(store,)) for store in (one, two, one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert two.get("s1").turns == 160


def test_a_session_that_is_deleted_under_a_writer_stays_deleted(one, two, server, make):
    _, entries = fill(one, make, "a")

    def change(stored):
        two.delete("s1")
        return replace(stored, turns=1)

    assert one.amend("s1", change, make.chain("b", after=entries[0])) is None
    assert one.get("s1") is None
    assert one.find([entries[0].hash]) == []
    assert left(server) == []


def test_one_of_two_that_create_a_session_is_told(one, two, make, monkeypatch):
    places = one._link.ask_all

    def slow(commands):
        monkeypatch.undo()
        two.create(make.session("s1", title="theirs"))
        return places(commands)

    monkeypatch.setattr(one._link, "ask_all", slow)
    with pytest.raises(StateError):
        one.create(make.session("s1", title="mine"))
    assert one.get("s1").title == "theirs"


def left(server: Server) -> list[bytes]:
    """Keys that belong to sessions."""
    return sorted(key for key in server.client.keys("*") if not key.startswith((b"kvs:1:owners", b"kvs:1:lease:")))


# --- writers that die


def test_a_writer_that_dies_before_its_write_leaves_no_trace_that_is_believed(one, two, make, monkeypatch):
    session, entries = fill(one, make, "a")
    more = make.chain("b", after=entries[0], response_id="r1")
    dies_at(monkeypatch, one._writer, "commit")
    with pytest.raises(Died):
        one.append(replace(session, head=more[0].hash, last_used_s=900.0), more)
    assert two.find([more[0].hash]) == []
    assert two.find_response("", "r1") is None
    assert two.get("s1") == session
    assert two.verify() == []
    two.append(replace(session, head=more[0].hash), more)  # the client sends it again, to the other
    assert [found.hash for found in two.find([more[0].hash])] == [more[0].hash]
    assert two.find_response("", "r1").hash == more[0].hash
    assert two.verify() == []


def test_a_session_whose_maker_died_is_not_listed_and_is_swept(one, two, server, make, monkeypatch):
    dies_at(monkeypatch, one._writer, "commit")
    with pytest.raises(Died):
        one.create(make.session("s1", tenant="t"))
    assert b"kvs:1:due" in left(server)
    assert two.get("s1") is None
    assert two.list() == two.list(tenant="t") == []
    assert two.sweep(now=1000.0, log_retention_s=1e9) == []
    assert left(server) == []
    two.create(make.session("s1", tenant="t"))
    assert len(two.list(tenant="t")) == 1


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_branch_whose_maker_died_is_not_seen_and_is_swept(one, two, server, make, monkeypatch, call):
    session, entries = fill(one, make, "a", "b", ttl_s=1e6)
    one.append(session, [], [Decision(entries[0].hash, "distil", b"{}", 1.0)])
    before = left(server)
    dies_at(monkeypatch, one._writer, "commit", call)
    with pytest.raises(Died):
        one.branch(make.session("s2"), "s1", entries[1].hash)
    assert two.get("s2") is None
    assert [found.session_id for found in two.find([entries[0].hash])] == ["s1"]
    assert two.verify() == []
    assert two.list() == [session]
    two.sweep(now=1000.0, log_retention_s=1e9)
    assert left(server) == before
    two.branch(make.session("s2"), "s1", entries[1].hash)
    assert two.path("s2") == entries
    assert two.verify() == []


def test_an_id_whose_maker_died_may_be_used_at_once(one, two, make, monkeypatch):
    _, entries = fill(one, make, "a", "b")
    dies_at(monkeypatch, one._writer, "commit", 2)
    with pytest.raises(Died):
        one.branch(make.session("s2"), "s1", entries[1].hash)
    two.create(make.session("s2"))
    assert two.path("s2") == []
    assert two.verify() == []


@pytest.mark.parametrize("step", ["purge", "forget"])
def test_a_wipe_whose_process_died_is_a_wipe_and_is_ended(one, two, server, make, monkeypatch, step):
    session, entries = fill(one, make, "a secret", "another secret", tenant="t")
    one.append(session, make.chain("x", after=entries[1], response_id="r"))
    dies_at(monkeypatch, *((one._ender, "purge") if step == "purge" else (ending, "forget")))
    with pytest.raises(Died):
        one.delete("s1")
    monkeypatch.undo()
    assert two.get("s1") is None
    assert two.list() == []
    assert two.find([entry.hash for entry in entries]) == []
    assert two.find_response("t", "r") is None
    assert two.verify() == []
    for key in server.client.keys("*"):
        assert b"secret" not in server.client.dump(key)
    two.sweep(now=1000.0, log_retention_s=1e9)
    two.list(tenant="t")
    assert left(server) == []


def test_a_holder_of_another_life_of_the_session_leaves_the_index(one, server, make):
    _, entries = fill(one, make, "a")
    key = b"kvs:1:entry:" + entries[0].hash.encode()
    [member] = server.client.smembers(key)
    one.delete("s1")
    server.client.sadd(key, member, b"nonsense")
    fill(one, make, "b")
    assert one.find([entries[0].hash]) == []
    assert set(server.client.smembers(key)) == {b"nonsense"}


def test_nothing_is_left_of_what_is_deleted(one, server, make):
    url = "data:image/png;base64," + "QUJD" * 100
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    session = make.session("s1", tenant="t", state="active")
    one.create(session)
    entry = make.entry(image, fingerprint.root("t"), 1, response_id="r")
    one.append(replace(session, head=entry.hash), [entry], [Decision(entry.hash, "distil", b"{}", 1.0)])
    one.draft("s1", "t1", entry.hash, b"{}", now=1.0)
    with closing(one.vectors()) as vectors:
        assert vectors.add("s1", Space("m", 2), entry.hash, [[1, 0]])
    assert len(left(server)) > 10
    one.delete("s1")
    one.sweep(now=1.0, log_retention_s=1e9)
    assert left(server) == []


# --- turns of others


def test_turns_of_a_gateway_that_lives_are_left_to_it(one, two, make):
    session, entries = fill(one, make, "q", state="active")
    one.draft("s1", "t1", entries[0].hash, b'{"role":"assistant","content":"ha"}', now=1.0)
    assert two.recover(now=2.0) == 0
    assert two.sweep(now=100.0, log_retention_s=1e9) == []
    assert two.get("s1") == session
    answer = make.chain("half", after=entries[0])
    one.append(replace(session, state="idle", head=answer[0].hash), answer, end_draft="t1")
    assert one.recover(now=3.0) == 0
    assert two.path("s1") == [*entries, *answer]


@pytest.mark.parametrize("how", ["recover", "sweep"])
def test_turns_of_a_gateway_that_died_are_ended(server, two, make, how):
    one = ValkeyStore(server.url, lease_s=0.05)
    session, entries = fill(one, make, "q", state="active")
    one.draft("s1", "t1", entries[0].hash, b'{"role":"assistant","content":"ha"}', now=1.0)
    until(lambda: not server.client.keys("kvs:1:lease:*"), "the lease did not end")
    if how == "recover":
        assert two.recover(now=300.0) == 1
    else:
        assert two.sweep(now=110.0, log_retention_s=1e9) == []
    answer = two.path("s1")[-1]
    assert (answer.finish, answer.parent) == ("interrupted", entries[0].hash)
    assert two.get("s1") == replace(session, state="idle", head=answer.hash)
    assert two.verify() == []
    assert not server.client.keys("kvs:1:open:*")
    assert not server.client.exists("kvs:1:owners")
    # It was only slow: what it says now is a branch, and nothing is lost.
    late = make.chain("half an answer", after=entries[0])
    one.append(replace(session, state="idle"), late, end_draft="t1")
    assert two.path("s1", late[0].hash) == [*entries, *late]
    assert two.verify() == []
    one.close()


def test_a_gateway_that_closes_leaves_its_turns_to_others_at_once(server, two, make):
    one = ValkeyStore(server.url)
    _, entries = fill(one, make, "q", state="active")
    one.draft("s1", "t1", entries[0].hash, b'{"role":"assistant","content":"ha"}', now=1.0)
    one.close()
    assert two.recover(now=2.0) == 1
    assert two.get("s1").state == "idle"


def test_another_writer_does_not_take_over_a_turn(server, two, make):
    one = ValkeyStore(server.url, lease_s=0.05)
    fill(one, make, "q", state="active")
    two.amend("s1", lambda session: replace(session, engine="e"))
    until(lambda: not server.client.exists(f"kvs:1:lease:{one._turns.owner}"), "the lease did not end")
    assert two.recover(now=2.0) == 0
    assert two.get("s1").state == "idle"
    one.close()


def test_what_is_not_open_any_more_is_taken_back_at_a_sweep(one, server, make):
    for n in range(3):
        session, _ = fill(one, make, f"q{n}", id_=f"s{n}", state="active")
        if n:
            one.put(replace(session, state="idle"))
    [key] = server.client.keys("kvs:1:open:*")
    assert set(server.client.smembers(key)) == {b"s0", b"s1", b"s2"}
    one.sweep(now=100.0, log_retention_s=1e9)
    assert set(server.client.smembers(key)) == {b"s0"}


def until(true, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.005)


# --- damage


TVO = fingerprint.body_hash(b'{"role": "user", "content": "tvo"}')


def swap(client, key, hash_, old, new):
    value = client.hget(key, hash_)
    assert old in value
    client.hset(key, hash_, value.replace(old, new))


DAMAGE = {
    "a flipped byte": (lambda c, k, e: swap(c, k("raw"), e[1].hash, b"two", b"tvo"), "bytes"),
    "a flipped byte, body hash mended": (
        lambda c, k, e: (
            swap(c, k("raw"), e[1].hash, b"two", b"tvo"),
            swap(c, k("entries"), e[1].hash, fingerprint.body_hash(e[1].raw).encode(), TVO.encode()),
        ),
        "another hash",
    ),
    "no JSON any more": (lambda c, k, e: c.hset(k("raw"), e[1].hash, "x"), "not a message"),
    "no message": (lambda c, k, e: c.hdel(k("raw"), e[1].hash), "not a message"),
    "a deleted entry": (lambda c, k, e: c.hdel(k("entries"), e[1].hash), "its parent"),
    "a deleted head": (lambda c, k, e: c.hdel(k("entries"), e[2].hash), "head"),
    "a deleted leaf of another branch": (lambda c, k, e: c.hdel(k("entries"), e[3].hash), "were written"),
    "an entry out of its order": (lambda c, k, e: c.lrem(k("order"), 1, e[3].hash), "in their order"),
    "an entry without its name": (lambda c, k, e: c.zrem(k("names"), e[3].hash), "by their names"),
    "an entry beside the index": (lambda c, k, e: c.delete(f"kvs:1:entry:{e[1].hash}"), "not in the index"),
    "a wrong depth": (lambda c, k, e: swap(c, k("entries"), e[2].hash, b",3,", b",7,"), "depth is 7"),
    "an entry that cannot be read": (lambda c, k, e: c.hset(k("entries"), e[2].hash, "x"), "cannot be read"),
    "a lost head": (lambda c, k, e: swap(c, k("row"), "s", e[2].hash.encode(), b"f" * 32), "head"),
    "a row that cannot be read": (lambda c, k, e: c.hset(k("row"), "s", "{"), "its row"),
    "another tenant": (lambda c, k, e: swap(c, k("row"), "s", b'"tenant":""', b'"tenant":"x"'), "its parent"),
    "a decision that points nowhere": (
        lambda c, k, e: c.lset(k("decisions"), 0, b'["ffff","distil",1.0,"ff"]\n{}'),
        "not there",
    ),
    "a changed decision": (
        lambda c, k, e: c.lset(k("decisions"), 0, c.lindex(k("decisions"), 0) + b" "),
        "does not match",
    ),
    "a decision that cannot be read": (lambda c, k, e: c.lset(k("decisions"), 0, "x"), "a decision"),
    "a deleted decision": (lambda c, k, e: c.delete(k("decisions")), "1 were written"),
    "a draft that cannot be read": (lambda c, k, e: c.hset(k("drafts"), "t1", "x"), "a draft"),
    "a draft of no parent": (lambda c, k, e: c.hset(k("drafts"), "t1", '1 ["o","gone"]\nx'), "draft"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_finds(one, server, make, damage):
    session, entries = fill(one, make, "one", "two", "three")
    leaf = make.chain("leaf", after=entries[0])
    one.append(session, leaf, [Decision(entries[0].hash, "distil", b'{"n":1}', 1.0)])
    one.draft("s1", "t1", entries[2].hash, b'{"role":"assistant"}', now=1.0)
    assert one.verify() == one.verify("s1") == []
    spoil, problem = DAMAGE[damage]
    spoil(server.client, lambda name: f"kvs:1:{{s1}}:{name}", [*entries, *leaf])
    assert any(problem in fault.problem for fault in one.verify())


def test_a_flipped_byte_is_never_served(one, server, make):
    _, entries = fill(one, make, "one", "two", "three")
    swap(server.client, "kvs:1:{s1}:raw", entries[1].hash, b"two", b"tvo")
    for read in (
        lambda: one.path("s1"),
        lambda: one.item("s1", entries[1].hash),
        lambda: one.search("s1", "tvo"),
        lambda: one.lookup("s1", "tvo"),
    ):
        with pytest.raises(CorruptLogError):
            read()
    assert one.path("s1", entries[0].hash) == entries[:1]


def test_vectors_that_were_cut_are_passed_over(one, server, make):
    space = Space("m", 2)
    _, (a, b) = fill(one, make, "a", "b")
    with closing(one.vectors()) as vectors:
        vectors.add("s1", space, a.hash, [[0, 1], [1, 0]])
        vectors.add("s1", space, b.hash, [[1, 0.1]])
        key = "kvs:1:{s1}:vectors"
        [field] = [name for name in server.client.hkeys(key) if name.endswith(a.hash.encode())]
        server.client.hset(key, field, server.client.hget(key, field)[:-1])
        found = vectors.nearest("s1", space, [1, 0], limit=9)
        assert [(one.hash, round(one.cosine, 1)) for one in found] == [(b.hash, 1.0), (a.hash, 0.0)]
        server.client.hdel(key, field)
        assert [one.hash for one in vectors.nearest("s1", space, [1, 0], limit=9)] == [b.hash]
    assert one.verify() == []


@pytest.mark.parametrize("how", ["gone", "its own parent", "no depth"])
def test_a_broken_chain_is_not_served(one, server, make, how):
    _, entries = fill(one, make, "one", "two", "three")
    key, at = "kvs:1:{s1}:entries", entries[1].hash
    if how == "gone":
        server.client.hdel(key, at)
    elif how == "its own parent":
        swap(server.client, key, at, entries[0].hash.encode(), at.encode())
    else:
        swap(server.client, key, at, b",2,", b",9,")
    with pytest.raises(CorruptLogError):
        one.path("s1")
    with pytest.raises(CorruptLogError):
        one.branch(make.session("s2"), "s1", entries[2].hash)
    assert one.get("s2") is None


def test_a_damaged_session_does_not_keep_the_others_from_the_sweep(one, server, make):
    fill(one, make, "a", id_="bad", state="idle")
    fill(one, make, "b", id_="good", state="idle")
    server.client.hset("kvs:1:{bad}:row", "s", "{")
    assert [session.id for session in one.sweep(now=1000.0, log_retention_s=1e9)] == ["good"]
    assert one.sweep(now=1000.0, log_retention_s=10.0) == []
    assert one.get("good") is None


# --- the server


def test_what_was_acknowledged_outlives_kill_9_of_the_server(own_server, make):
    with closing(ValkeyStore(own_server.url)) as store:
        acknowledged: list[str] = []
        session, head = make.session(), None
        store.create(session)
        killer = threading.Timer(0.25, own_server.kill)
        killer.start()
        with pytest.raises(StoreUnavailableError) as caught:
            while True:
                entry = make.chain(f"{len(acknowledged)} " + "x" * (len(acknowledged) * 97 % 3000), after=head)[0]
                store.append(replace(session, head=entry.hash), [entry], end_draft="t")
                acknowledged.append(entry.hash)
                head = entry
        killer.join()
        assert acknowledged
        assert caught.value.status == 503
        assert caught.value.retry_after_s
        for read in (lambda: store.get("s1"), lambda: store.list(), lambda: store.recover(now=1.0)):
            with pytest.raises(StoreUnavailableError, match="cannot be reached"):
                read()
        own_server.start()
        until(lambda: reached(store), "it did not find the server again")
        kept = [entry.hash for entry in store.path("s1")]
        assert kept[: len(acknowledged)] == acknowledged
        assert len(kept) <= len(acknowledged) + 1
        assert store.verify() == []
        store.append(store.get("s1"), make.chain("more"))


def reached(store) -> bool:
    try:
        store.get("s1")
    except StoreUnavailableError:
        return False
    return True


def test_a_server_that_does_not_answer_is_a_timeout_and_nothing_is_half(own_server, make):
    with closing(ValkeyStore(own_server.url, timeout_s=0.1)) as store:
        session, entries = fill(store, make, "a")
        more = make.chain("b", "c", after=entries[0])
        own_server.process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        for _ in range(20):
            with pytest.raises(StoreUnavailableError):
                store.append(replace(session, head=more[1].hash), more)
        assert time.monotonic() - start < 19 * 0.1, "those that come soon after wait for no timeout of their own"
        own_server.process.send_signal(signal.SIGCONT)
        until(lambda: reached(store), "it did not find the server again")
        assert store.path("s1") in (entries, [*entries, *more])
        store.append(replace(session, head=more[1].hash), more)
        assert store.path("s1") == [*entries, *more]
        assert store.verify() == []


def test_a_full_server_takes_nothing_half_and_still_wipes(one, server, make):
    session, entries = fill(one, make, "a", "b")
    server.client.config_set("maxmemory", 1)
    more = make.chain("c", after=entries[1])
    with pytest.raises(StoreError, match="memory") as caught:
        one.append(replace(session, head=more[0].hash), more)
    assert caught.value.status == 507
    assert "maxmemory" in caught.value.hint
    assert one.path("s1") == entries
    assert one.verify() == []
    assert one.delete("s1")
    assert left(server) == []


def test_a_server_that_became_a_replica_is_away_until_another_takes_its_place(own_server, make):
    with closing(ValkeyStore(own_server.url)) as store:
        session, entries = fill(store, make, "a")
        own_server.client.execute_command("REPLICAOF", "127.0.0.1", free_port())
        with pytest.raises(StoreUnavailableError, match="replica"):
            store.put(replace(session, turns=1))
        own_server.client.execute_command("REPLICAOF", "NO", "ONE")
        store.put(replace(session, turns=2))
        assert store.get("s1").turns == 2
        assert store.path("s1") == entries


def test_nobody_listens():
    with pytest.raises(StoreUnavailableError) as caught:
        open_store(f"valkey://:hush@127.0.0.1:{free_port()}/0")
    assert "127.0.0.1" in caught.value.message
    assert "hush" not in caught.value.message
    assert caught.value.hint


def test_a_password_that_is_asked_for(own_server):
    own_server.client.config_set("requirepass", "open sesame")
    for wrong in (own_server.url, own_server.url.replace("//", "//:wrong@")):
        with pytest.raises(StoreError) as caught:
            open_store(wrong)
        assert "wrong" not in caught.value.message.replace("WRONGPASS", "")
        assert "password" in caught.value.hint
    open_store(own_server.url.replace("//", "//:open%20sesame@")).close()


def test_a_server_that_throws_keys_away_is_refused(server):
    server.client.config_set("maxmemory", "100mb")
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ConfigError, match="throws keys away") as caught:
            open_store(server.url)
        assert "noeviction" in caught.value.hint
    finally:
        server.client.config_set("maxmemory-policy", "noeviction")


def test_a_server_without_a_file_is_warned_of(server, own_server, caplog):
    open_store(own_server.url).close()
    assert not caplog.records
    open_store(server.url).close()
    assert "appendonly yes" in caplog.text


def test_without_the_client_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kvsteward.sessions.valkey")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_store("valkey://localhost")
    assert caught.value.hint == "Run pip install 'kvsteward[valkey]'."


@pytest.mark.parametrize("url", ["valkey://host:port", "valkey://host:99999999/0"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError):
        open_store(url)


def test_a_closed_store_says_so(server, make):
    store = ValkeyStore(server.url)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("s1")


def test_a_unix_socket_and_a_database_of_its_own(tmp_path, make):
    server = Server(tmp_path, "--unixsocket", str(tmp_path / "v.sock"))
    try:
        with (
            closing(open_store(f"unix://{tmp_path / 'v.sock'}?db=1")) as store,
            closing(open_store(server.url + "/2")) as other,
        ):
            _, entries = fill(store, make, "a")
            assert store.path("s1") == entries
            assert other.list() == []
            assert server.client.dbsize() == 0
    finally:
        server.kill()


def test_a_cluster_works(tmp_path, make):
    """One node that has all slots: it refuses what would touch two of them at once."""
    server = Server(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    try:
        server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until(lambda: server.client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", "no cluster")
        with closing(open_store(server.url + "?cluster=true")) as store:
            session, entries = fill(store, make, "a green tea", "b", state="active", tenant="t")
            store.append(session, [], [Decision(entries[0].hash, "distil", b"{}", 1.0)])
            store.draft("s1", "t1", entries[1].hash, b'{"role":"assistant"}', now=1.0)
            store.branch(make.session("s2", tenant="t"), "s1", entries[1].hash)
            assert store.path("s2") == entries
            assert {found.session_id for found in store.find([entries[0].hash])} == {"s1", "s2"}
            assert len(store.lookup("s1", "tea, green")) == 1
            assert store.recover(now=2.0) == 1
            assert [s.id for s in store.sweep(now=1000.0, log_retention_s=1e9)] == ["s1"]
            assert len(store.list(tenant="t")) == 2
            assert store.verify() == []
            assert store.delete("s1")
            assert store.delete("s2")
            store.sweep(now=1000.0, log_retention_s=1e9)
            assert left(server) == []
    finally:
        server.kill()


# --- names and sizes


@pytest.mark.parametrize("id_", ["a/b:c", "{x}", "}{", "späte\n Sitzung 漢", "x" * 5000, "~", "", "a b", "\0"])
def test_any_id_works(one, make, id_):
    session, entries = fill(one, make, "a", id_=id_, tenant=id_, title=id_)
    one.draft(id_, id_, entries[0].hash, b'{"role":"assistant"}', now=1.0)
    assert one.get(id_) == session
    assert one.find([entries[0].hash])[0].session_id == id_
    assert one.list(tenant=id_) == [session]
    assert one.recover(now=1.0) == 1
    assert one.verify() == []
    assert one.delete(id_)


def test_pages_are_bounded_in_bytes():
    def meta(size_bytes: int, blobs: int = 0) -> Meta:
        return Meta("h", "p", 1, "client", 1.0, 1, None, None, "b", ((0, "x"),) * blobs, size_bytes)

    mib = 2**20
    assert [len(page) for page in sized([meta(3 * mib)] * 5)] == [2, 2, 1]
    assert [len(page) for page in sized([meta(1)] * 1200)] == [500, 500, 200]
    assert [len(page) for page in sized([meta(20 * mib), meta(1), meta(1)])] == [1, 2]
    assert [len(page) for page in sized([meta(1, blobs=5)] * 3)] == [1, 1, 1]
    assert list(sized([])) == []


def test_more_sessions_than_a_page(one, make):
    for n in range(520):
        one.create(make.session(f"s{n:04}", used_s=float(n), state="idle", ttl_s=1.0))
    assert [s.id for s in one.list(limit=2000)] == [f"s{n:04}" for n in reversed(range(520))]
    assert len(one.verify()) == 0
    over = one.sweep(now=1e4, log_retention_s=1e9)
    assert [s.id for s in over] == [f"s{n:04}" for n in range(520)]
    assert one.sweep(now=1e4, log_retention_s=1e4 - 50.5) == []
    assert len(one.list(limit=2000)) == 469


# --- what a query finds, compared with SQLite


WORDS = st.sampled_from(["tea", "tea,", "green", "Green", "#W-1", "a_b", "naïve", "漢字", '"x"', "the", "\n", "é"])
TEXT = st.lists(WORDS, max_size=12).map(" ".join)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(TEXT, min_size=1, max_size=10),
    queries=st.lists(TEXT, min_size=1, max_size=4),
    cut_at=st.integers(0, 9),
)
def test_a_query_finds_what_it_finds_in_sqlite(one, make, tmp_path_factory, texts, queries, cut_at):
    root = tmp_path_factory.mktemp("sqlite") / "log.db"
    with closing(SqliteStore(root)) as sqlite:
        for store in (sqlite, one):
            session, entries = fill(store, make, *texts)
            branch = make.chain("another green branch", after=entries[cut_at % len(entries)])
            store.append(replace(session, head=branch[0].hash), branch)
        for query in queries:
            for head in (None, entries[-1].hash, branch[0].hash, "f" * 32):
                for limit in (1, 20):
                    asked = {"head": head, "limit": limit}
                    assert one.lookup("s1", query, **asked) == sqlite.lookup("s1", query, **asked), (query, asked)
            assert one.search("s1", query) == sqlite.search("s1", query)
    one.delete("s1")


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("looked_at_bytes", [1, 10**6])
def test_pages_of_any_size_make_the_same_answers(one, make, tmp_path, monkeypatch, step, looked_at_bytes):
    monkeypatch.setattr(logs, "_STEP", step)
    monkeypatch.setattr(logs, "_SEARCH_BYTES", looked_at_bytes)
    url = "data:image/png;base64," + "QUJD" * 100
    image = {
        "role": "user",
        "content": [{"type": "text", "text": "x 5"}, {"type": "image_url", "image_url": {"url": url}}],
    }
    long = "a very long text, " * 12
    with closing(SqliteStore(tmp_path / "log.db")) as sqlite:
        for store in (sqlite, one):
            session, entries = fill(store, make, *(f"x {n}" for n in range(6)), long + "b", "%d [x] .*", "")
            shown = make.entry(image, entries[-1].hash, 10)
            branch = make.chain("x 1 again", after=entries[3])
            store.append(replace(session, head=branch[0].hash), [shown, *branch])
        for head in (None, shown.hash, entries[0].hash, fingerprint.root()):
            assert one.path("s1", head) == sqlite.path("s1", head)
        for text in ("x 1", "x", "nothing", long, long + "b", long + "c", "%d", ".*", "[x]", "", "again, 5", "x, 5!"):
            for limit in (0, 2, 20):
                assert one.search("s1", text, limit=limit) == sqlite.search("s1", text, limit=limit), text
                for head in (None, shown.hash):
                    asked = {"head": head, "limit": limit}
                    assert one.lookup("s1", text, **asked) == sqlite.lookup("s1", text, **asked), (text, asked)
        assert one.on_path("s1", shown.hash, [e.hash for e in (*entries, *branch)]) == {e.hash for e in entries}


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.path("s1"),
        lambda store: store.search("s1", "a"),
        lambda store: store.lookup("s1", "b, a"),
        lambda store: store.on_path("s1", "f" * 32, []),
        lambda store: store.item("s1", "f" * 8),
    ],
)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_session_that_is_wiped_while_it_is_read_is_not_found(one, two, make, monkeypatch, read, call):
    """Between any two questions to the server: what was read, or that there is none; never damage."""
    fill(one, make, "a", "b")
    expected = read(one)
    calls = 0

    def counted(method):
        def ask(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                two.delete("s1")
            return method(*args, **kwargs)

        return ask

    for name in ("ask", "ask_all", "run"):
        monkeypatch.setattr(one._link, name, counted(getattr(one._link, name)))
    try:
        found = read(one)
    except NotFoundError:
        assert calls >= call
    else:
        assert found in (expected, None)
    assert one.get("s1") is None or calls < call


NAMES = ("create", "append", "append", "append", "put", "branch", "draft", "draft", "end", "recover", "delete", "sweep")
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from("ab"), st.integers(0, 5)), min_size=5, max_size=30)


def done(store, make, what: str, id_: str, n: int, at: int):
    """One step; what it returned or raised."""
    now, turn = 100.0 + 10 * at, f"t{n % 2}"
    state = ("new", "active", "idle", "parked", "expired", "closed")[n]
    session = store.get(id_)
    parents = [None, *store.path(id_)] if session else [None]
    after = parents[n % len(parents)]
    parent = after.hash if after else fingerprint.root()
    entries = make.chain(f"x{n}", f"y{at}", after=after, response_id="r" if n == 3 else None)
    decisions = [Decision(entries[0].hash, "distil", b"{}", now)] if n % 2 else []

    def change(row):
        return replace(row, head=entries[n % 2].hash, state=state, turns=row.turns + 1, last_used_s=now)

    steps = {
        "create": lambda: store.create(make.session(id_, used_s=now, ttl_s=5.0 * (n + 1))),
        "append": lambda: store.amend(id_, change, entries, decisions),
        "put": lambda: store.put(replace(session or make.session(id_), state=state, last_used_s=now)),
        "branch": lambda: store.branch(make.session("b" if id_ == "a" else "a", used_s=now), id_, parent),
        "draft": lambda: store.draft(id_, turn, parent, b'{"role":"assistant","content":"%d"}' % at, now=now),
        "end": lambda: store.amend(id_, lambda row: row, end_draft=turn),
        "recover": lambda: store.recover(now=now),
        "delete": lambda: store.delete(id_),
        "sweep": lambda: store.sweep(now=now, log_retention_s=20.0 * (n + 1)),
    }
    try:
        return steps[what]()
    except KVStewardError as error:
        return type(error)


def seen(store):
    """All that a reader can see."""
    sessions = [*store.list(), *store.list(tenant="")]
    logs = [(store.path(s.id), store.decisions(s.id), store.search(s.id, "x")) for s in sessions]
    hashes = [entry.hash for path, _, _ in logs for entry in path]
    return sessions, logs, store.find(hashes), store.find_response("", "r"), store.verify()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_whatever_is_done_it_does_what_the_store_in_memory_does(one, server, make, steps):
    server.client.flushall()
    memory = MemoryStore()
    for at, step in enumerate([("create", "a", 0), *steps]):
        assert done(one, make, *step, at) == done(memory, make, *step, at), step
        assert seen(one) == seen(memory), step
    for id_ in ("a", "b"):
        one.delete(id_)
    one.sweep(now=1e9, log_retention_s=1e9)
    assert left(server) == []


def test_what_must_be_there_is_asked_for(one, make):
    session, entries = fill(one, make, "a")
    for call in (lambda: one.branch(make.session("s2", tenant="t"), "s1", entries[0].hash),):
        with pytest.raises(InvariantError):
            call()
    with pytest.raises(NotFoundError):
        one.branch(make.session("s2"), "s1", "f" * 32)
    assert one.get("s2") is None
    assert one.list() == [session]

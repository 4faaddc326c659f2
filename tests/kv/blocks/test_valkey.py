"""The Valkey tier: a server that dies, is slow, is full, is a cluster; and what stands in it."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from kv_proxy import Trap, own_certificate, proxied, tls_server
from support import OURS, PATIENCE_S, Server, block, free_port, keys, loaded, wait

from kvsteward.errors import ConfigError
from kvsteward.kv.blocks import BlockStore, HostPool, Miss, Reason
from kvsteward.kv.blocks.breaker import Breaker
from kvsteward.kv.blocks.record import encode_header
from kvsteward.kv.blocks.tier import Write
from kvsteward.kv.blocks.users import MAX_USERS
from kvsteward.kv.blocks.valkey import ValkeyTier, name_of

KEYS = keys(24)
BLOCKS = [block(key) for key in KEYS]
LARGE = 2 << 20


def record(n: int, content: bytes | None = None) -> bytes:
    content = content or BLOCKS[n]
    return encode_header(KEYS[n], content, codec=0, raw_bytes=len(content)) + content


def until(true, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.005)


@contextlib.contextmanager
def opened(url: str, **options) -> Iterator[ValkeyTier]:
    tier = ValkeyTier(url, namespace="ns", **options)
    try:
        yield tier
    finally:
        tier.close()


# what stands in the server


def test_a_block_is_one_value_under_a_name_that_people_can_read(server, make):
    with opened(server.url) as tier:
        store = make([tier])
        store.put(KEYS[0], memoryview(BLOCKS[0]), "agent-7")
        assert store.flush(PATIENCE_S)
        digest, block_hash = OURS.digest().hex(), KEYS[0][20:].hex()
        name = f"kv:1:{digest}:0:{block_hash}".encode()
        assert name == name_of(KEYS[0])
        users = b"kv:1:users:{%s}" % name
        assert set(server.client.keys()) == {name, users, b"kv:1:ns:session:agent-7"}
        assert server.client.zcard(users) == 1
        assert server.client.get(name) == record(0)
        assert set(server.client.smembers("kv:1:ns:session:agent-7")) == {KEYS[0]}


def test_times_to_live_are_each_put_s_own(server, make):
    with opened(server.url, ttl_s=1000) as tier, opened(server.url, ttl_s=None, name="other") as for_ever:
        store = make([tier])
        store.put(KEYS[0], memoryview(BLOCKS[0]), "a")
        store.put(KEYS[1], memoryview(BLOCKS[1]), "a", ttl_s=5000)
        store.put(KEYS[2], memoryview(BLOCKS[2]), "b", ttl_s=50)
        assert store.flush(PATIENCE_S)
        lives = [server.client.ttl(name_of(key)) for key in KEYS[:3]]
        assert [round(life, -1) for life in lives] == [1000, 5000, 50]
        assert round(server.client.ttl("kv:1:ns:session:b"), -1) == 1000
        assert for_ever.write([Write(KEYS[3], (record(3),), "c")]) == [None]
        assert server.client.ttl(name_of(KEYS[3])) == server.client.ttl("kv:1:ns:session:c") == -1


def test_a_block_that_expired_is_absent(server):
    with opened(server.url) as tier:
        tier.write([Write(KEYS[0], (record(0),), "", time.time() + 0.05)])
        until(lambda: tier.holds(KEYS[:1]) == [False], "the block did not expire")


def test_a_long_or_strange_session_id_works(server):
    with opened(server.url) as tier:
        for session in ("x" * 5000, "späte\n Sitzung {1}", "\ud800"):
            tier.write([Write(KEYS[0], (record(0),), session)])
            assert tier.forget_session(session, lambda found: set()) == 1
        assert server.client.keys() == []


def test_namespaces_keep_the_sessions_of_tenants_apart(server):
    with opened(server.url) as ours, contextlib.closing(ValkeyTier(server.url, namespace="other")) as theirs:
        ours.write([Write(KEYS[0], (record(0),), "s")])
        theirs.write([Write(KEYS[1], (record(1),), "s")])
        assert theirs.forget_session("s", lambda found: set()) == 1
        assert ours.holds(KEYS[:2]) == [True, False]


# sessions of several processes


@pytest.fixture
def two(server, make):
    """The stores of two replicas that share a server."""
    with opened(server.url) as mine, opened(server.url) as theirs:
        yield make([mine]), make([theirs])


def turn(store: BlockStore, session: str, chain) -> None:
    """As the connector does it: tells what it uses, loads what is there, puts what is new, touches the chain."""
    store.use(chain, session)
    ticket = store.stage(chain, PATIENCE_S, session)
    for key in chain[wait(ticket) :]:
        assert store.put(key, memoryview(BLOCKS[KEYS.index(key)]), session)
    ticket.release()
    store.touch(chain, session)
    assert store.flush(PATIENCE_S)


def end(store: BlockStore, session: str) -> None:
    store.forget_session(session)
    assert store.flush(PATIENCE_S)


def stored(server) -> list[int]:
    return [n for n, key in enumerate(KEYS) if server.client.exists(name_of(key))]


def test_what_a_session_of_another_replica_uses_outlives_the_one_that_wrote_it(server, two):
    a, b = two
    turn(a, "s1", KEYS[:4])
    turn(b, "s2", [*KEYS[:2], *KEYS[5:7]])  # the same first two blocks, which it loads
    end(a, "s1")
    assert stored(server) == [0, 1, 5, 6]
    b.host.clear()
    assert loaded(b, [*KEYS[:2], *KEYS[5:7]]) == [*BLOCKS[:2], *BLOCKS[5:7]]
    end(b, "s2")
    assert server.client.keys() == [], "the last one takes all of it"


def test_it_outlives_it_too_where_the_replica_had_the_block_already(server, two):
    """The block was put or loaded for another session of that replica, whose end comes first."""
    a, b = two
    turn(a, "s1", KEYS[:2])
    turn(b, "first", KEYS[:2])
    turn(b, "second", KEYS[:3])
    end(b, "first")
    end(a, "s1")
    assert stored(server) == [0, 1, 2]
    end(b, "second")
    assert server.client.keys() == []


def test_it_outlives_it_too_where_the_replica_s_host_memory_has_lost_it(server, two):
    _, b = two
    turn(b, "s1", KEYS[:2])
    b.host.clear()
    b.touch(KEYS[:2], "s2")  # found in the engine's own cache
    assert b.flush(PATIENCE_S)
    end(b, "s1")
    assert stored(server) == [0, 1]
    end(b, "s2")
    assert server.client.keys() == []


def test_a_session_that_moved_is_forgotten_whole_by_the_replica_that_ends_it(server, two):
    a, b = two
    turn(a, "s1", KEYS[:3])
    turn(b, "s1", KEYS[:5])
    end(b, "s1")
    assert server.client.keys() == []


def test_a_block_that_many_sessions_use_is_nobodys(server, two):
    a, b = two
    for n in range(MAX_USERS + 2):
        turn((a, b)[n % 2], f"s{n}", KEYS[:1])
    [users] = server.client.keys("kv:1:users:*")
    assert server.client.zrange(users, 0, -1) == [b"*"]
    assert 0 < server.client.ttl(users) <= 24 * 3600
    for n in range(MAX_USERS + 2):
        end((a, b)[n % 2], f"s{n}")
    assert stored(server) == [0]


def test_what_a_session_uses_is_told_once_and_again_on_another_branch(server, two, monkeypatch):
    _, b = two
    told = []
    use = ValkeyTier.use
    monkeypatch.setattr(
        ValkeyTier, "use", lambda self, session, keys: (told.append(len(keys)), use(self, session, keys))
    )
    for chain in (KEYS[:3], KEYS[:3], KEYS[:5], [*KEYS[:2], *KEYS[6:8]], KEYS[:2]):
        b.use(chain, "s")
    b.use([], "s")
    b.use(KEYS[:3], "")
    assert b.flush(PATIENCE_S)
    assert told == [3, 2, 4, 2]


def test_a_use_counts_as_long_as_its_block_may_live(server):
    now = [1000.0]
    with opened(server.url, ttl_s=100, wall=lambda: now[0]) as a, opened(server.url, ttl_s=None, name="b") as for_ever:
        assert a.write([Write(KEYS[0], (record(0),), "s1"), Write(KEYS[1], (record(1),), "s1", 1500.0)]) == [None, None]
        a.use("s2", KEYS[:1])
        now[0] += 101
        assert a.forget_session("s1", lambda _: set()) == 2, "s2 used it too long ago"
        assert server.client.keys("kv:1:users:*") == []
        a.use("s2", KEYS[:1])
        for_ever.use("s3", KEYS[:1])
        a.use("s2", KEYS[:1])
        assert server.client.pttl(b"kv:1:users:{%s}" % name_of(KEYS[0])) == -1
        assert 99_000 < server.client.pttl("kv:1:ns:session:s2") <= 100_000


def test_blocks_without_users_go_with_the_session_that_wrote_them(server):
    """As a version before wrote them."""
    with opened(server.url) as tier:
        server.client.set(name_of(KEYS[0]), record(0))
        server.client.sadd("kv:1:ns:session:s1", KEYS[0])
        assert tier.forget_session("s1", lambda _: set()) == 1
    assert server.client.keys() == []


def test_a_server_that_forgot_the_scripts_is_given_them_again(server, two):
    a, b = two
    turn(a, "s1", KEYS[:2])
    server.client.script_flush()
    turn(b, "s2", KEYS[:2])
    server.client.script_flush()
    end(a, "s1")
    assert stored(server) == [0, 1]


# a server in trouble


def test_a_full_server_refuses_and_is_not_taken_for_dead(server, make):
    with opened(server.url) as tier:
        tier.write([Write(KEYS[0], (record(0),))])
        server.client.config_set("maxmemory", 1)
        assert tier.write([Write(KEYS[1], (record(1),), "s")] * 5) == [Reason.FULL] * 5
        assert tier.figures().up
        assert loaded(make([tier]), KEYS[:1]) == BLOCKS[:1]


def test_a_value_of_another_type_is_a_miss(server, make):
    with opened(server.url) as tier:
        server.client.rpush(name_of(KEYS[0]), "x")
        assert loaded(make([tier]), KEYS[:1]) == []
        assert tier.figures().misses == {"error": 1}
        assert tier.figures().up


# a server that fails


def test_kill_in_the_middle_of_a_load(own_server, monkeypatch):
    """Of 200 MiB: the ticket ends with whole blocks or none, the store goes on, and finds the server again."""
    count = 100
    names = keys(count, name="large")
    body = block("large", LARGE)
    with opened(own_server.url, backoff_s=0.05, timeout_s=5) as tier:
        for name in names:
            header = encode_header(name, body, codec=0, raw_bytes=LARGE)
            assert tier.write([Write(name, (header, body))]) == [None]
        read = tier.read
        monkeypatch.setattr(tier, "read", lambda *arguments: time.sleep(0.03) or read(*arguments))  # time to kill it
        store = BlockStore(HostPool(LARGE, (count + 1) * (LARGE + 4096)), [tier])
        ticket = store.stage(names, PATIENCE_S)
        until(lambda: tier.figures().read_blocks >= 8, "nothing was read")
        own_server.kill()
        found = wait(ticket)
        assert found < count
        assert len(ticket.blocks()) == found
        assert all(bytes(view) == body for view in ticket.blocks())
        until(lambda: store.figures().staged.get("valkey", 0) >= 8, "nothing was kept")
        ticket.release()
        store.check()
        assert not {"checksum", "truncated"} & set(store.figures().misses)
        again = store.stage(names, PATIENCE_S)
        assert wait(again) < count
        again.release()
        until(lambda: isinstance(tier.holds(names[:1]), Miss) and not tier.figures().up, "it was not left alone")
        assert tier.figures().state.startswith("down: ")
        own_server.start()
        until(lambda: tier.holds(names[:1]) == [False], "the server was not found again")
        assert tier.figures().up
        store.close(0)
        assert store.host.figures().pinned == 0


def test_kill_in_the_middle_of_a_store(own_server, make):
    """Blocks that cannot be written are dropped and counted; everything stays usable in host memory."""
    with opened(own_server.url, backoff_s=0.05, timeout_s=5) as tier:
        store = make([tier], slots=24, queue_blocks=24, batch_blocks=2)
        for n in range(12):
            assert store.put(KEYS[n], memoryview(BLOCKS[n]), "s")
        until(lambda: tier.figures().written_blocks >= 2, "nothing was written")
        own_server.kill()
        for n in range(12, 24):
            assert store.put(KEYS[n], memoryview(BLOCKS[n]), "s")
        assert store.flush(PATIENCE_S)
        figures = tier.figures()
        assert figures.written_blocks + sum(figures.refused.values()) == 24
        assert sum(figures.refused.values()) >= 12
        assert set(figures.refused) <= {"error", "down"}
        assert store.lookup(KEYS) == 24
        store.check()
        own_server.start()
        until(lambda: tier.write([Write(KEYS[0], (record(0),))]) == [None], "the server was not found again")


def test_200_ms_more_cost_time_and_nothing_else(server, make):
    """The deadline is kept; with time enough the blocks come."""
    with proxied(server.port) as proxy, opened(proxy.url, timeout_s=5) as tier:
        proxy.late_s = 0.2
        store = make([tier], slots=8)
        for n in range(4):
            assert store.put(KEYS[n], memoryview(BLOCKS[n]))
        assert store.flush(PATIENCE_S)
        store.host.clear()
        hurried = store.stage(KEYS[:4], 0.05)
        assert wait(hurried) == 0
        hurried.release()
        assert store.figures().misses == {"late": 1}
        assert loaded(store, KEYS[:4]) == BLOCKS[:4]
        assert tier.figures().up


def test_a_server_that_does_not_answer_is_a_timeout_and_then_left_alone(make):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"valkey://127.0.0.1:{silent.getsockname()[1]}"
        with opened(url, timeout_s=0.05, failures=2, backoff_s=60) as tier:
            store = make([tier])
            for _ in range(2):
                assert loaded(store, KEYS[:1]) == []
            assert store.figures().misses == {"timeout": 2}
            assert not tier.figures().up
            assert loaded(store, KEYS[:1]) == []
            assert store.figures().misses == {"timeout": 2, "down": 1}
            assert store.put(KEYS[0], memoryview(BLOCKS[0]))
            assert store.flush(PATIENCE_S)
            assert tier.figures().refused == {"down": 1}


def test_nobody_listens(make):
    with opened(f"valkey://127.0.0.1:{free_port()}") as tier:
        assert isinstance(tier.holds(KEYS[:1]), Miss)
        assert loaded(make([tier]), KEYS[:2]) == []
        assert tier.forget(KEYS[:1]) == 0
        assert tier.forget_session("s", lambda found: set()) == 0


def test_a_server_that_talks_nonsense_is_a_miss(make):
    def answer(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.recv(4096)
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        with opened(f"valkey://127.0.0.1:{listener.getsockname()[1]}") as tier:
            assert loaded(make([tier]), KEYS[:1]) == []
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize("tls", [False, True])
def test_a_cluster_works_with_the_same_keys(tmp_path, make, tls, request):
    """One node that has all slots; commands for several slots go in one pipeline."""
    server = Server(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        url = server.url
        server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until(lambda: server.client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", "no cluster")
        if tls:
            pair = request.getfixturevalue("certificate")
            proxy = stack.enter_context(proxied(server.port, tls_server(*pair)))
            server.client.config_set("cluster-announce-port", proxy.port)
            url = f"{proxy.url}?ssl_ca_certs={pair[0]}"
        with opened(url, cluster=True) as tier:
            store = make([tier], slots=16)
            for n in range(12):
                assert store.put(KEYS[n], memoryview(BLOCKS[n]), "s")
            assert store.flush(PATIENCE_S)
            store.host.clear()
            assert loaded(store, KEYS[:13]) == BLOCKS[:12]
            assert tier.forget_session("s", lambda found: {KEYS[0]}) == 11
            assert tier.holds(KEYS[:2]) == [True, False]
            server.kill()
            store.host.clear()
            assert loaded(store, KEYS[:1]) == []
            server.start()


# settings


def test_without_the_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        ValkeyTier("valkey://localhost")
    assert caught.value.hint == "Run pip install 'kvsteward[valkey]'."


def test_a_url_that_is_none_is_refused_without_its_password():
    with pytest.raises(ConfigError) as caught:
        ValkeyTier("http://:secret@localhost")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("cluster", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        "valkey://localhost?nonsense=1",
        "unix:///tmp/socket?ssl_ca_certs=/dev/null",
        "valkeys://localhost?ssl_ca_certs=/no/such/file",
        "valkeys://localhost?ssl_cert_reqs=maybe",
        "valkey://localhost?socket_timeout=soon",
    ],
)
def test_a_url_that_cannot_work_is_refused_at_the_start(wrong, cluster):
    with pytest.raises(ConfigError, match="Valkey URL"):
        ValkeyTier(wrong, cluster=cluster)


# TLS


def test_a_server_with_a_certificate_that_nobody_trusts_gets_and_gives_nothing(server, certificate, make):
    with proxied(server.port, tls_server(*certificate)) as proxy:
        with opened(proxy.url) as tier:
            store = make([tier])
            assert store.put(KEYS[0], memoryview(BLOCKS[0]))
            assert store.flush(PATIENCE_S)
            assert tier.figures().refused == {"error": 1}
            assert loaded(store, KEYS[1:2]) == []
            assert store.figures().misses == {"error": 1}
            assert server.client.dbsize() == 0
        with opened(f"{proxy.url}?ssl_cert_reqs=none") as tier:
            assert tier.write([Write(KEYS[0], (record(0),))]) == [None]


@pytest.mark.parametrize("cluster", [False, True])
def test_a_certificate_of_another_host_is_no_good(server, tmp_path, certificate, cluster):
    pair = own_certificate(tmp_path, "127.0.0.2")
    with proxied(server.port, tls_server(*pair)) as proxy:
        url = f"{proxy.url}?ssl_ca_certs={pair[0]}"
        with opened(url, cluster=cluster) as tier:
            answer = tier.holds(KEYS[:1])
            assert isinstance(answer, Miss)
            assert answer.reason is Reason.ERROR
            assert cluster or "IP address mismatch" in answer.detail
        if not cluster:
            with opened(f"{url}&ssl_check_hostname=false") as tier:
                assert tier.holds(KEYS[:1]) == [False]


def test_plain_words_to_a_server_that_wants_tls_are_a_miss(server, certificate):
    with proxied(server.port, tls_server(*certificate)) as proxy, opened(f"valkey://127.0.0.1:{proxy.port}") as tier:
        assert isinstance(tier.holds(KEYS[:1]), Miss)


def test_large_blocks_and_a_kill_in_the_middle_of_a_load_over_tls(own_server, certificate):
    """What came before the kill is whole, the rest is missed."""
    contents = [block(("large", n), LARGE) for n in range(8)]
    with (
        proxied(own_server.port, tls_server(*certificate)) as proxy,
        opened(f"{proxy.url}?ssl_ca_certs={certificate[0]}") as tier,
    ):
        assert tier.write([Write(KEYS[n], (record(n, contents[n]),)) for n in range(8)]) == [None] * 8
        rooms = [memoryview(bytearray(LARGE + 4096)) for _ in range(8)]
        assert tier.read(KEYS[:8], rooms) == [record(n, contents[n]) for n in range(8)]
        proxy.answers = Trap(3 * LARGE + LARGE // 2, own_server.kill)
        assert {type(answer) for answer in tier.read(KEYS[:8], rooms)} == {Miss}
        assert proxy.answers.sprung.is_set()
        own_server.start()
        until(lambda: tier.write([Write(KEYS[0], (record(0),))]) == [None], "the server was not found again")


def test_redis_urls_name_the_same_server(server):
    with opened(server.url.replace("valkey://", "redis://")) as tier:
        assert tier.holds(KEYS[:1]) == [False]


def test_a_breaker_opens_tries_once_and_backs_off():
    breaker = Breaker(failures=2, backoff_s=1.0, max_backoff_s=3.0)
    breaker.failed(0.0, "first")
    assert breaker.allows(0.0)
    assert breaker.state() == "up"
    breaker.failed(0.0, "second")
    assert breaker.state() == "down: second"
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)
    assert not breaker.allows(1.5)  # one try at a time
    breaker.failed(1.6, "third")
    breaker.failed(1.7, "late")  # of a call from before; it makes the wait no longer
    assert not breaker.allows(3.5)
    assert breaker.allows(3.6)
    breaker.failed(3.6, "fourth")
    assert not breaker.allows(6.5)  # three seconds at most
    assert breaker.allows(6.6)
    breaker.succeeded()
    assert breaker.up
    assert breaker.allows(6.6)
    assert breaker.opened == 1


def test_a_server_behind_a_unix_socket(tmp_path):
    server = Server(tmp_path, "--unixsocket", str(tmp_path / "valkey.sock"))
    tier = ValkeyTier(f"unix://{tmp_path / 'valkey.sock'}")
    store = BlockStore(HostPool(len(BLOCKS[0]), 8 * 4096), [tier])
    try:
        assert store.put(KEYS[0], BLOCKS[0])
        assert store.flush(PATIENCE_S)
        store.host.clear()
        assert loaded(store, KEYS[:2]) == BLOCKS[:1]
    finally:
        store.close()
        server.kill()

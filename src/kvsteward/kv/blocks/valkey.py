"""Blocks in Valkey (or Redis): one value per block, header and checksum in it, so each key works on its own.

    kv:1:DIGEST:GROUP:HASH                a record, with its time to live
    kv:1:users:{kv:1:DIGEST:GROUP:HASH}   which sessions use it (see `users`)
    kv:1:NAMESPACE:session:ID             set of the keys that a session wrote or used, with the longest of their times

A session that ends takes the blocks that only it uses, whichever process wrote them.

Every command names keys of one slot, so a cluster works as well as a single server; commands go in pipelines. Each wait
on the socket is bounded. A server that fails `failures` times in a row is down for a while (see `breaker`): all calls
are misses at once, and `figures` says so.

Needs the package `valkey` (`pip install 'kvsteward[valkey]'`). Invariant: nothing that the server or the network does
is raised, and no record is believed that its checksum does not hold.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvsteward.errors import ConfigError
from kvsteward.kv.blocks import users
from kvsteward.kv.blocks.breaker import Breaker
from kvsteward.kv.blocks.fingerprint import DIGEST_BYTES, GROUP_BYTES
from kvsteward.kv.blocks.record import HEADER_BYTES, Miss, Reason, claimed_key
from kvsteward.kv.blocks.replies import Replies
from kvsteward.kv.blocks.tier import Meter, Tier, TierFigures, Write
from kvsteward.kv.blocks.users import PREFIX, Command

log = logging.getLogger("kvsteward.blocks")
MAX_SESSION_BYTES = 256
"""A longer session id is hashed in the name of its index."""
FORGET_KEYS = 512
MAX_FOREIGN_BYTES = 64 << 20
"""A larger value that is not in its place is read past, not into memory."""


def client_module() -> ModuleType:
    """The package `valkey`. Raises ConfigError where it is missing."""
    try:
        return importlib.import_module("valkey")
    except ImportError as error:
        raise ConfigError(
            "the package 'valkey' is not installed", hint="Run pip install 'kvsteward[valkey]'."
        ) from error


class ValkeyTier(Tier):
    """`url` as the client takes it (`valkey://`, `valkeys://` for TLS, `unix://`; `redis://` too); with `cluster` it
    names one node. TLS takes `ssl_ca_certs`, `ssl_certfile` and `ssl_keyfile` in its query; the certificate must be
    valid and for that host, unless `ssl_check_hostname=false` or `ssl_cert_reqs=none` are there too. `namespace` keeps
    the session indexes of deployments and tenants apart: give the fingerprint's digest in hex. Raises ConfigError on a
    URL that cannot work.

    `ttl_s` is the time to live of blocks that are put without one, None for none. `timeout_s` bounds each wait on a
    socket, `connect_timeout_s` a connection. `failures`, `backoff_s`, `max_backoff_s`: see `breaker`.
    """

    writers = 2
    """One makes checksums while the other sends."""
    shared = True

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "",
        ttl_s: float | None = 24 * 3600.0,
        timeout_s: float = 2.0,
        connect_timeout_s: float = 0.5,
        failures: int = 3,
        backoff_s: float = 1.0,
        max_backoff_s: float = 30.0,
        cluster: bool = False,
        name: str = "valkey",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        valkey = client_module()
        self.name = name
        self._namespace, self._ttl_s, self._clock, self._wall = namespace.encode(), ttl_s, clock, wall
        self._breaker = Breaker(failures, backoff_s, max_backoff_s)
        self._lock, self._connecting = threading.Lock(), threading.Lock()
        self._meter = Meter()
        errors = valkey.exceptions
        self._errors = (errors.ValkeyError, errors.ValkeyClusterException, OSError)
        self._timeouts = (errors.TimeoutError, TimeoutError)
        self._no_memory, self._no_script = errors.OutOfMemoryError, errors.NoScriptError
        settings: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": connect_timeout_s,
            **({} if url.startswith("unix://") else {"socket_keepalive": True}),
            "decode_responses": False,
        }
        self._client: Any = None
        self._expected = threading.local()
        for foreign, ours in (("redis://", "valkey://"), ("rediss://", "valkeys://")):
            if url.startswith(foreign):
                url = ours + url.removeprefix(foreign)
        if url.startswith("valkeys://"):
            settings["connection_class"] = _secured(valkey.SSLConnection, url)
            url = "valkey://" + url.removeprefix("valkeys://")  # the URL's own class would win
        if not cluster and "protocol=" not in url and hasattr(valkey.Connection(), "_sock"):
            settings["parser_class"] = functools.partial(
                Replies,
                self._room_for,
                HEADER_BYTES,
                valkey.connection.DefaultParser.parse_error,
                errors.ConnectionError,
            )
        try:
            valkey.Valkey.from_url(url, **settings).connection_pool.make_connection()  # connects to nobody
            self._client = None if cluster else valkey.Valkey.from_url(url, **settings)
        except (TypeError, ValueError, errors.ValkeyError) as error:
            raise ConfigError(f"the Valkey URL cannot be used: {error}") from error
        settings |= {"cluster_error_retry_attempts": 1}
        self._connect: Callable[[], Any] = lambda: valkey.ValkeyCluster.from_url(url, **settings)

    def _run(self, commands: Sequence[Command]) -> list[Any] | Miss:
        """The answers, an error answer among them as an exception; Miss where the server could not be asked."""
        answers = self._sent(commands)
        if isinstance(answers, Miss):
            return answers
        unknown = [n for n, answer in enumerate(answers) if isinstance(answer, self._no_script)]
        if unknown:  # the server is new, or has forgotten them: nothing was done
            again = self._sent([users.with_text(commands[n]) for n in unknown])
            if isinstance(again, Miss):
                return again
            for n, answer in zip(unknown, again, strict=True):
                answers[n] = answer
        return answers

    def _sent(self, commands: Sequence[Command]) -> list[Any] | Miss:
        if not self._breaker.allows(self._clock()):
            return Miss(Reason.DOWN)
        try:
            with self._connecting:
                if self._client is None:
                    self._client = self._connect()
            pipe = self._client.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = pipe.execute(raise_on_error=False)
        except self._errors as error:
            self._breaker.failed(self._clock(), type(error).__name__)
            if not self._breaker.up:
                log.warning("kvsteward: %s is left alone for a while: %s", self.name, error)
            return Miss(Reason.TIMEOUT if isinstance(error, self._timeouts) else Reason.ERROR, str(error))
        self._breaker.succeeded()
        return answers

    # reading

    def holds(self, keys: Sequence[bytes]) -> list[bool] | Miss:
        answers = self._run([("EXISTS", name_of(key)) for key in keys])
        return answers if isinstance(answers, Miss) else [answer == 1 for answer in answers]

    def read(self, keys: Sequence[bytes], rooms: Sequence[memoryview]) -> list[memoryview | Miss]:
        start = self._clock()
        self._expected.rooms = dict(zip(keys, rooms, strict=True))
        try:
            answers = self._run([("GET", name_of(key)) for key in keys])
        finally:
            self._expected.rooms = {}
        if isinstance(answers, Miss):
            return [answers for _ in keys]
        found = [self._answer(answer) for answer in answers]
        with self._lock:
            self._meter.read_s += self._clock() - start
            for record in found:
                if isinstance(record, memoryview):
                    self._meter.read_blocks += 1
                    self._meter.read_bytes += record.nbytes
        return found

    def _room_for(self, head: memoryview, length: int) -> memoryview | None:
        """The slot whose key stands in the header; a value that fits no block is not kept."""
        rooms: dict[bytes, memoryview] = getattr(self._expected, "rooms", {})
        room = rooms.pop(claimed_key(head), None)
        if room is not None and length <= room.nbytes:
            return room
        return None if length <= MAX_FOREIGN_BYTES else memoryview(b"")

    def _answer(self, answer: object) -> memoryview | Miss:
        if isinstance(answer, bytes | memoryview):
            return memoryview(answer)
        return Miss(Reason.ABSENT) if answer is None else Miss(Reason.ERROR, str(answer))

    # writing

    def write(self, writes: Sequence[Write]) -> list[Reason | None]:
        start, now_s = self._clock(), self._wall()
        members: dict[str, list[Write]] = {}
        for write in writes:
            if write.session:
                members.setdefault(write.session, []).append(write)
        index: list[Command] = []
        for session, its in members.items():
            longest_ms = [self._ttl_ms(write.expires_s, now_s) for write in its] + [self._ttl_ms(0.0, now_s)]
            ttl_ms = None if None in longest_ms else max(ms for ms in longest_ms if ms is not None)
            index += self._used(session, [write.key for write in its], ttl_ms, now_s)
        sets: list[tuple[Any, ...]] = []
        for write in writes:
            ttl_ms = self._ttl_ms(write.expires_s, now_s)
            value = write.parts[0] if len(write.parts) == 1 else b"".join(write.parts)
            sets.append(("SET", name_of(write.key), value, *(("PX", ttl_ms) if ttl_ms is not None else ())))
        answers = self._run([*index, *sets])
        reasons: list[Reason | None]
        if isinstance(answers, Miss):
            reasons = [answers.reason for _ in writes]
        else:
            reasons = [self._refusal(answer) for answer in answers[len(index) :]]
        with self._lock:
            self._meter.written_s += self._clock() - start
            for write, reason in zip(writes, reasons, strict=True):
                if reason is None:
                    self._meter.written_blocks += 1
                    self._meter.written_bytes += write.nbytes
                else:
                    self._meter.refused[reason] += 1
        return reasons

    def _refusal(self, answer: object) -> Reason | None:
        if not isinstance(answer, Exception):
            return None
        return Reason.FULL if isinstance(answer, self._no_memory) else Reason.ERROR

    def _ttl_ms(self, expires_s: float, now_s: float) -> int | None:
        if expires_s:
            return max(1, math.ceil(1e3 * (expires_s - now_s)))
        return None if self._ttl_s is None else max(1, math.ceil(1e3 * self._ttl_s))

    def _index(self, session: str) -> bytes:
        name = session.encode("utf-8", "surrogatepass")
        if len(name) > MAX_SESSION_BYTES:
            name = hashlib.blake2b(name, digest_size=16).hexdigest().encode()
        return PREFIX + self._namespace + b":session:" + name

    def forget(self, keys: Sequence[bytes]) -> int:
        dropped = 0
        for start in range(0, len(keys), FORGET_KEYS):
            answers = self._run([("UNLINK", name_of(key)) for key in keys[start : start + FORGET_KEYS]])
            if isinstance(answers, Miss):
                break
            dropped += sum(answer == 1 for answer in answers)
        return dropped

    def use(self, session: str, keys: Sequence[bytes]) -> None:
        now_s = self._wall()
        ttl_ms = self._ttl_ms(0.0, now_s)
        for start in range(0, len(keys), FORGET_KEYS):
            page = keys[start : start + FORGET_KEYS]
            if isinstance(self._run(self._used(session, page, ttl_ms, now_s)), Miss):
                break

    def _used(self, session: str, keys: Sequence[bytes], ttl_ms: int | None, now_s: float) -> list[Command]:
        """Commands that list the blocks for their session, and the session for each block."""
        uses = (users.use(name_of(key), session, now_s=now_s, ttl_ms=ttl_ms) for key in keys)
        return [users.listed(self._index(session), keys, ttl_ms=ttl_ms), *uses]

    def forget_session(self, session: str, spare: Callable[[Sequence[bytes]], set[bytes]]) -> int:
        answers = self._run([("SMEMBERS", self._index(session))])
        if isinstance(answers, Miss) or isinstance(answers[0], Exception):
            return 0
        keys, dropped = sorted(answers[0]), 0
        spared = spare(keys)
        for start in range(0, len(keys), FORGET_KEYS):
            page, now_s = keys[start : start + FORGET_KEYS], self._wall()
            done = self._run([users.leave(name_of(k), session, now_s=now_s, spared=k in spared) for k in page])
            if isinstance(done, Miss):
                return dropped
            dropped += sum(answer == 1 for answer, key in zip(done, page, strict=True) if key not in spared)
        self._run([("UNLINK", self._index(session))])
        return dropped

    # the account

    def missed(self, reason: Reason) -> None:
        with self._lock:
            self._meter.misses[reason] += 1

    def figures(self) -> TierFigures:
        up, state = self._breaker.up, self._breaker.state()
        with self._lock:
            return self._meter.figures(self.name, up=up, state=state)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _secured(connection: Any, url: str) -> type:
    """A TLS connection that asks for a certificate of that host; the client's own takes one of any host. Raises
    ConfigError where a file is missing."""
    query = dict(parse_qsl(urlsplit(url).query))
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in query and not Path(query[name]).is_file():
            raise ConfigError(f"{name} of the Valkey URL is no file: {query[name]}")
    for_host = query.get("ssl_check_hostname", "true").lower() not in ("false", "no", "0")
    for_host &= query.get("ssl_cert_reqs") != "none"

    class Secured(connection):  # type: ignore[misc]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**{**settings, "ssl_check_hostname": for_host})

    return Secured


def name_of(key: bytes) -> bytes:
    """A block's name in Valkey, for people too."""
    digest, group = key[:DIGEST_BYTES], key[DIGEST_BYTES : DIGEST_BYTES + GROUP_BYTES]
    block_hash = key[DIGEST_BYTES + GROUP_BYTES :]
    return b"%s%s:%d:%s" % (PREFIX, digest.hex().encode(), int.from_bytes(group, "big"), block_hash.hex().encode())

"""The line to a Valkey server or cluster: one client, bounded waits, its errors as ours, and the few scripts.

Knows no sessions. Invariants: nothing is sent twice; an error of the client or the server is raised as StoreError (as
StoreUnavailableError where to wait may help); no password stands in a message.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import valkey
from valkey import exceptions

from kvsteward.errors import ConfigError, StoreError, StoreUnavailableError

log = logging.getLogger("kvsteward")

Command = tuple[Any, ...]

_MIN_VERSION = (7,)
_OURS = {"redis": "valkey", "rediss": "valkeys"}

_AWAY = (
    exceptions.ConnectionError,  # LOADING, too
    exceptions.TimeoutError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.ValkeyClusterException,
    OSError,
)


class Script:
    """A script that runs as one step in the server. All of its keys are in one slot."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Link:
    """`url` as the client takes it: `valkey://[[USER]:PASSWORD@]HOST:PORT/DB`, `valkeys://` with TLS, `unix://PATH`;
    `redis://` and `rediss://` too. With `?cluster=true` it names one node of a cluster.

    `timeout_s` bounds each wait on a socket. A server that could not be reached is left alone for `pause_s`: what is
    asked meanwhile fails at once, so that a queue of turns does not wait one timeout after the other.

    Raises ConfigError for a URL that cannot be used.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 5.0, connect_timeout_s: float = 2.0, pause_s: float = 0.25
    ) -> None:
        self._again = partial(Link, url, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, pause_s=pause_s)
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self.cluster = query.pop("cluster", ["false"])[-1].lower() in {"true", "yes", "1"}
        scheme = _OURS.get(parts.scheme, parts.scheme)
        url = urlunsplit(parts._replace(scheme=scheme, query=urlencode(query, doseq=True)))
        self.place = f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._pause_s, self._away_until_s = pause_s, 0.0
        self._lock = threading.Lock()
        self._closed = False
        settings: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": connect_timeout_s}
        if scheme != "unix":
            settings["socket_keepalive"] = True
        self._url, self._settings = url, settings
        self._client: Any = None
        if not self.cluster:
            try:
                self._client = valkey.Valkey.from_url(url, **settings)
            except ValueError as error:
                raise ConfigError(f"the store's URL cannot be used: {error}", param="store") from error

    def ask(self, *command: Any) -> Any:
        with self._asking() as client:
            return client.execute_command(*command)

    def ask_all(self, commands: Sequence[Command]) -> list[Any]:
        """In one round trip (one for each node of a cluster, in no order among them)."""
        if not commands:
            return []
        with self._asking() as client:
            pipe = client.pipeline() if self.cluster else client.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = pipe.execute()
            return answers

    def run(self, script: Script, keys: Sequence[str | bytes], words: Sequence[Any]) -> Any:
        with self._asking() as client:
            try:
                return client.execute_command("EVALSHA", script.sha, len(keys), *keys, *words)
            except exceptions.NoScriptError:  # the server is new, or has forgotten it: nothing was done
                return client.execute_command("EVAL", script.text, len(keys), *keys, *words)

    def another(self) -> Link:
        """A link to the same server, with connections of its own."""
        return self._again()

    def close(self) -> None:
        self._closed = True
        if self._client is not None:
            self._client.close()

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        if self._closed:
            raise StoreError(f"the session store {self.place} is closed")
        if time.monotonic() < self._away_until_s:
            raise self._away("it could not be reached a moment ago")
        try:
            with self._lock:
                if self._client is None:
                    self._client = valkey.ValkeyCluster.from_url(
                        self._url, **self._settings, cluster_error_retry_attempts=1
                    )
            yield self._client
        except exceptions.AuthenticationError as error:
            hint = "Check the user and the password in the URL of --store."
            raise StoreError(f"{self.place}: {error}", hint=hint) from error
        except exceptions.OutOfMemoryError as error:
            hint = "Valkey's memory is full: raise its maxmemory, or keep logs for fewer days (--log-days)."
            raise StoreError(f"{self.place}: {error}", hint=hint) from error
        except exceptions.ReadOnlyError as error:  # it was made a replica: by its name another may be found now
            if not self.cluster:
                self._client.connection_pool.disconnect()
            raise self._away("it is a replica, which takes no writes") from error
        except _AWAY as error:
            self._away_until_s = time.monotonic() + self._pause_s
            raise self._away(str(error) or type(error).__name__) from error
        except exceptions.ValkeyError as error:
            hint = "Look at the log of the Valkey server; nothing was acknowledged that is not stored."
            raise StoreError(f"{self.place}: {error}", hint=hint) from error

    def _away(self, why: str) -> StoreUnavailableError:
        return StoreUnavailableError(f"the session store {self.place} cannot be reached: {why}", retry_after_s=1.0)


def check_server(link: Link) -> None:
    """Raises ConfigError for a server that is too old or may throw logs away; says so where it keeps no file."""
    link.ask("PING")
    if link.cluster:
        return
    try:
        info = link.ask("INFO")
    except StoreUnavailableError:
        raise
    except StoreError as error:  # a user who may not ask
        log.info("the settings of %s are not known: %s", link.place, error.message)
        return
    version = str(info.get("redis_version", "7"))
    if tuple(int(part) for part in version.split(".")[:1] if part.isdigit()) < _MIN_VERSION:
        raise ConfigError(f"{link.place} speaks version {version}", hint="Use Valkey 7.2 or later.", param="store")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if info.get("maxmemory") and policy.startswith("allkeys"):
        raise ConfigError(
            f"{link.place} throws keys away when its memory is full (maxmemory-policy {policy})",
            hint="Set maxmemory-policy noeviction: no log may be lost.",
            param="store",
        )
    if not info.get("aof_enabled"):
        log.warning("%s has no append-only file: a crash of it loses logs; set appendonly yes", link.place)

"""The log of each session, never lossy, and the stores that keep it."""

from __future__ import annotations

from pathlib import Path

from kvsteward.errors import ConfigError
from kvsteward.sessions.base import Decision, Entry, Fault, Found, Session, SessionStore, Source, State
from kvsteward.sessions.lifecycle import Event, allows, step
from kvsteward.sessions.memory import MemoryStore
from kvsteward.sessions.sqlite import SqliteStore
from kvsteward.sessions.vectors import Near, Space, VectorIndex

__all__ = [
    "Decision",
    "Entry",
    "Event",
    "Fault",
    "Found",
    "MemoryStore",
    "Near",
    "Session",
    "SessionStore",
    "Source",
    "Space",
    "SqliteStore",
    "State",
    "VectorIndex",
    "allows",
    "open_store",
    "step",
]


_VALKEY = ("valkey", "valkeys", "redis", "rediss", "unix")


def open_store(url: str) -> SessionStore:
    """The store at `url`: "memory:", "sqlite:///relative/path", "sqlite:////absolute/path", a plain path, or a Valkey
    server as "valkey://HOST:PORT/DB" ("valkeys://" with TLS, "unix://PATH").

    Raises ConfigError for another scheme or where the package `valkey` is needed and missing, StoreError if the file or
    the server cannot be used.
    """
    scheme, colon, rest = url.partition(":")
    if url == "memory:":
        return MemoryStore()
    if scheme == "sqlite" and rest.startswith("///") and len(rest) > 3:
        return SqliteStore(Path(rest[3:]).expanduser())
    if scheme in _VALKEY and rest.startswith("//"):
        return _valkey_store(url)
    is_path = not colon or "/" in scheme or len(scheme) == 1  # C:\...
    if is_path and url:
        return SqliteStore(Path(url).expanduser())
    raise ConfigError(
        f"no store is known for {url!r}; there are memory:, sqlite:///path, valkey://host:port/db, or a plain path"
    )


def _valkey_store(url: str) -> SessionStore:
    try:
        from kvsteward.sessions.valkey import ValkeyStore  # the client is an extra
    except ModuleNotFoundError as error:
        if error.name != "valkey":
            raise
        hint = "Run pip install 'kvsteward[valkey]'."
        raise ConfigError("the package 'valkey' is not installed", hint=hint, param="store") from error
    return ValkeyStore(url)

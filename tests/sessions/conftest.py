"""All stores behind one fixture, and short ways to make what they keep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsteward.sessions import Entry, MemoryStore, Session, SessionStore, SqliteStore, open_store
from kvsteward.wire import fingerprint


class Make:
    """Values for tests: sessions at their tenant's root, and true chains."""

    @staticmethod
    def session(id_: str = "s1", *, tenant: str = "", used_s: float = 100.0, **fields: Any) -> Session:
        fields = {"state": "new", "head": fingerprint.root(tenant), "ttl_s": 60.0} | fields
        return Session(id=id_, tenant=tenant, created_s=used_s, last_used_s=used_s, **fields)

    @staticmethod
    def entry(message: dict[str, Any], parent: str, depth: int, **fields: Any) -> Entry:
        raw = json.dumps(message).encode()
        return Entry(fingerprint.link(parent, message), parent, depth, "client", raw, 100.0 + depth, **fields)

    @classmethod
    def chain(cls, *texts: str, after: Entry | None = None, tenant: str = "", **fields: Any) -> list[Entry]:
        parent, depth = (fingerprint.root(tenant), 0) if after is None else (after.hash, after.depth)
        entries: list[Entry] = []
        for text in texts:
            depth += 1
            entries.append(cls.entry({"role": "user", "content": text}, parent, depth, **fields))
            parent = entries[-1].hash
        return entries


@pytest.fixture
def make() -> type[Make]:
    return Make


@pytest.fixture(params=["memory", "sqlite", "valkey"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionStore]:
    kinds: dict[str, Callable[[], SessionStore]] = {
        "memory": MemoryStore,
        "sqlite": lambda: SqliteStore(tmp_path / "log.db"),
        "valkey": lambda: open_store(request.getfixturevalue("valkey_server").url),
    }
    opened = kinds[request.param]()
    yield opened
    opened.close()

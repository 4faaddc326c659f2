"""A gateway is killed while it writes: what it was told is stored is there, in every store that outlives a process."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvsteward.sessions import open_store

WRITER = """
import json, sys
from dataclasses import replace
from kvsteward.sessions import Entry, Session, open_store
from kvsteward.wire import fingerprint

store = open_store(sys.argv[1])
head, depth = fingerprint.root(), 0
session = Session(sys.argv[2], "", "active", head, 1.0, 1.0, 60.0)
store.create(session)
while True:
    message = {"role": "user", "content": f"{depth} " + "x" * (depth * 97 % 3000)}
    store.draft(session.id, "t", head, json.dumps(message).encode(), now=1.0)
    depth += 1
    parent, head = head, fingerprint.link(head, message)
    entry = Entry(head, parent, depth, "client", json.dumps(message).encode(), 1.0)
    store.append(replace(session, head=head), [entry], end_draft="t")
    print(head, flush=True)
"""


@pytest.mark.parametrize("kind", ["sqlite", "valkey"])
def test_what_was_acknowledged_outlives_kill_9(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    server = request.getfixturevalue("valkey_server") if kind == "valkey" else None
    url = server.url if server else f"sqlite:///{tmp_path}/log.db"
    chance = random.Random(11)
    for id_ in ("s0", "s1", "s2"):
        command = [sys.executable, "-c", WRITER, url, id_]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            printed = [child.stdout.readline().strip()]
            time.sleep(chance.uniform(0.01, 0.4))
            child.send_signal(signal.SIGKILL)
            printed += [line.strip() for line in child.stdout if line.endswith("\n")]
        assert printed[0]
        with closing(open_store(url)) as store:
            kept = {entry.hash for entry in store.path(id_)}
            assert set(printed) <= kept
            assert len(kept) <= len(printed) + 1
            if server:
                assert store.recover(now=9.0) == 0, "its lease still runs"
                server.client.delete(*server.client.keys("kvs:1:lease:*"))
            assert store.recover(now=9.0) in (0, 1)
            session = store.get(id_)
            assert session is not None
            assert session.state == "idle"
            assert store.verify() == []

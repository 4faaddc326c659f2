"""How fast the gateway is, beside what else could stand in front of an engine.

In one run, before one upstream that answers at once (`_upstream.py`): kvsteward with `--mode passthrough`, kvsteward
managed (sessions in a SQLite file), a bare Starlette + uvicorn + aiohttp pass-through (`_bare.py`), and sglang-router
(Rust). The contenders take turns in each round and the medians of the rounds are compared, so that a change of the
machine's load meets all of them. Load: wrk (`_wrk.py`).

    python benchmarks/gateway.py --quick --json

sglang-router is installed into an environment of its own, `.venv-peers/sglang-router`, at the first run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import _wrk
from _upstream import ANSWER, CHUNKS

HERE: Final = Path(__file__).resolve().parent
PEERS: Final = HERE.parent / ".venv-peers"
ROUTER: Final = "sglang-router==0.3.2"
_START_S: Final = 60.0
KINDS: Final = {"whole": False, "streamed": True}


@dataclass(slots=True)
class Contender:
    """One server under test, and what was measured of it. Rates are requests per second."""

    name: str
    url: str
    pid: int
    rates: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    p50_ms: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    p99_ms: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    cpu_us: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    """Processor time of the server (all its threads, user and system) for one request."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server listens, and its process."""

    url: str
    pid: int


# -- the servers ----------------------------------------------------------------------------------------------------


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A child process that is ended with its block. What it writes to stderr goes to `log`."""
    with log.open("w") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=HERE)
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def printed_port(child: subprocess.Popen[str], log: Path) -> int:
    """The port that a server prints in its first line: the line itself, or the end of the first URL in it."""
    assert child.stdout is not None
    line = child.stdout.readline().strip()
    if not line:
        sys.exit(f"a server did not start: {log.read_text()[-2000:]}")
    return int(line) if line.isdigit() else int(line.split("http://", 1)[1].split(" ", 1)[0].rsplit(":", 1)[1])


def upstream(stack: ExitStack, folder: Path) -> Server:
    log = folder / "upstream.log"
    child = stack.enter_context(process([sys.executable, str(HERE / "_upstream.py")], log))
    return Server(f"http://127.0.0.1:{printed_port(child, log)}", child.pid)


def kvsteward(stack: ExitStack, folder: Path, engine: str, mode: str) -> Server:
    log = folder / f"{mode}.log"
    command = [sys.executable, "-m", "kvsteward", "serve", "--engine", f"openai={engine}", "--port", "0"]
    command += ["--mode", mode, "--store", str(folder / f"{mode}.db")]
    child = stack.enter_context(process(command, log))
    return Server(f"http://127.0.0.1:{printed_port(child, log)}", child.pid)


def bare(stack: ExitStack, folder: Path, engine: str) -> Server:
    log = folder / "bare.log"
    child = stack.enter_context(process([sys.executable, str(HERE / "_bare.py"), engine], log))
    return Server(f"http://127.0.0.1:{printed_port(child, log)}", child.pid)


def router(stack: ExitStack, folder: Path, engine: str) -> Server:
    port, metrics = free_port(), free_port()
    command = [str(router_python()), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", engine, "--policy", "cache_aware", "--prometheus-port", str(metrics)]
    command += ["--log-level", "warn"]
    child = stack.enter_context(process(command, folder / "router.log"))
    return Server(f"http://127.0.0.1:{port}", child.pid)


def router_python() -> Path:
    """The environment of sglang-router, made if absent."""
    home = PEERS / "sglang-router"
    python = home / "bin" / "python"
    if not (home / ".done").exists():
        print(f"installing {ROUTER} into {home}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", ROUTER], check=True)
        (home / ".done").touch()
    return python


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


# -- is the answer right? -------------------------------------------------------------------------------------------


def wait_until_ready(contender: Contender) -> None:
    """Waits until the answers of a contender are right. Ends the program with what was wrong, if they never are."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            check_answers(contender.url)
            return
        except (AssertionError, OSError, http.client.HTTPException) as error:
            if time.monotonic() > deadline:
                sys.exit(f"{contender.name}: {error or type(error).__name__}")
            time.sleep(0.3)


def check_answers(url: str) -> None:
    """Raises AssertionError unless both kinds of answer say all that the upstream said."""
    status, raw = post(url, stream=False)
    assert status == 200, f"status {status}: {raw[:300]!r}"
    assert json.loads(raw)["choices"][0]["message"]["content"] == ANSWER, raw[:300]
    status, raw = post(url, stream=True)
    assert status == 200, f"status {status}: {raw[:300]!r}"
    events = [event for event in raw.decode().split("\n\n") if event]
    assert events.pop() == "data: [DONE]", raw[-300:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    said = [chunk["choices"][0]["delta"]["content"] for chunk in chunks if chunk["choices"]]
    assert len(said) == CHUNKS and "".join(said) == ANSWER, f"{len(said)} chunks: {raw[-300:]!r}"


def post(url: str, *, stream: bool) -> tuple[int, bytes]:
    where = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=20)
    body = _wrk.body(f"check-{time.time_ns()}", stream=stream)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# -- measuring ------------------------------------------------------------------------------------------------------


def measure(contenders: list[Contender], args: argparse.Namespace, folder: Path) -> None:
    """All rounds. Within a round each contender is measured once for each kind of answer; the order turns."""
    for contender in contenders:  # once without counting: pools fill, pages are touched
        for stream in KINDS.values():
            _wrk.run(contender.url, stream=stream, connections=args.connections, seconds=args.seconds, folder=folder)
    for number in range(args.rounds):
        turned = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
        for kind, stream in KINDS.items():
            for contender in turned:
                measure_once(contender, kind, stream, args, folder)
        print(f"round {number + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)


def measure_once(contender: Contender, kind: str, stream: bool, args: argparse.Namespace, folder: Path) -> None:
    """Rate and processor time with all connections, then latency with one."""
    before_s = cpu_s(contender.pid)
    load = _wrk.run(contender.url, stream=stream, connections=args.connections, seconds=args.seconds, folder=folder)
    contender.cpu_us[kind].append((cpu_s(contender.pid) - before_s) / load.requests * 1e6)
    contender.rates[kind].append(load.per_second)
    alone = _wrk.run(contender.url, stream=stream, connections=1, seconds=args.seconds / 2, folder=folder)
    contender.p50_ms[kind].append(alone.p50_ms)
    contender.p99_ms[kind].append(alone.p99_ms)


def cpu_s(pid: int) -> float:
    """User and system time of a process with all its threads, in seconds; 0 where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(contenders: list[Contender], args: argparse.Namespace) -> dict[str, Any]:
    """All figures: medians, ratios, and every single round."""
    medians = {c.name: {kind: statistics.median(c.rates[kind]) for kind in KINDS} for c in contenders}
    return {
        "connections": args.connections,
        "seconds": args.seconds,
        "rounds": args.rounds,
        "chunks_per_stream": CHUNKS,
        "load_average": os.getloadavg(),
        "cpus": os.cpu_count(),
        "requests_per_s": medians,
        "chunks_per_s": {name: rates["streamed"] * CHUNKS for name, rates in medians.items()},
        "cpu_us_per_request": {c.name: {kind: statistics.median(c.cpu_us[kind]) for kind in KINDS} for c in contenders},
        "latency_ms": {c.name: latency(c) for c in contenders},
        "ratios": ratios(contenders),
        "rounds_measured": [asdict(c) for c in contenders],
    }


def latency(contender: Contender) -> dict[str, dict[str, float]]:
    """Medians over the rounds, at one connection."""
    return {
        kind: {"p50": statistics.median(contender.p50_ms[kind]), "p99": statistics.median(contender.p99_ms[kind])}
        for kind in KINDS
    }


def ratios(contenders: list[Contender]) -> dict[str, dict[str, float]]:
    """kvsteward to the others: the median over the rounds of the ratio within a round."""
    rates = {c.name: c.rates for c in contenders}
    return {
        f"{ours} / {other}": {
            kind: statistics.median(a / b for a, b in zip(rates[ours][kind], rates[other][kind], strict=True))
            for kind in KINDS
        }
        for ours in ("passthrough", "managed")
        for other in ("sglang-router", "bare")
        if ours in rates and other in rates
    }


def table(told: dict[str, Any]) -> str:
    """Rates, processor time and latency, then the ratios."""
    lines = [
        "                requests per s    SSE chunks  server CPU, us/request  latency, 1 connection, p50 / p99 ms",
        "               whole  streamed         per s       whole    streamed             whole          streamed",
    ]
    for name, rates in told["requests_per_s"].items():
        cpu, late = told["cpu_us_per_request"][name], told["latency_ms"][name]
        times = "".join(f"{late[kind]['p50']:10.2f} / {late[kind]['p99']:5.2f}" for kind in KINDS)
        chunks = told["chunks_per_s"][name]
        lines.append(
            f"{name:13}{rates['whole']:7,.0f}{rates['streamed']:10,.0f}{chunks:14,.0f}"
            f"{cpu['whole']:12,.0f}{cpu['streamed']:12,.0f}{times}"
        )
    lines.append("")
    for name, ratio in told["ratios"].items():
        lines.append(f"{name:32}{ratio['whole']:8.2f} whole {ratio['streamed']:8.2f} streamed")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 2 seconds: about two minutes")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object on the last line")
    parser.add_argument("--seconds", type=float, help="length of one measurement (default 6, quick 2)")
    parser.add_argument("--rounds", type=int, help="rounds (default 5, quick 3)")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--only", help="contenders, by comma: upstream, passthrough, managed, bare, sglang-router")
    args = parser.parse_args()
    args.seconds = args.seconds or (2.0 if args.quick else 6.0)
    args.rounds = args.rounds or (3 if args.quick else 5)
    return args


def main() -> None:
    args = arguments()
    _wrk.require()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteward-bench-")))
        source = upstream(stack, folder)
        engine = source.url
        starts: dict[str, Callable[[], Server]] = {
            "upstream": lambda: source,
            "passthrough": lambda: kvsteward(stack, folder, engine, "passthrough"),
            "managed": lambda: kvsteward(stack, folder, engine, "managed"),
            "bare": lambda: bare(stack, folder, engine),
            "sglang-router": lambda: router(stack, folder, engine),
        }
        wanted = args.only.split(",") if args.only else list(starts)
        servers = {name: starts[name]() for name in wanted}
        contenders = [Contender(name, server.url, server.pid) for name, server in servers.items()]
        for contender in contenders:
            wait_until_ready(contender)
        measure(contenders, args, folder)
    told = summary(contenders, args)
    print(table(told))
    if args.json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()

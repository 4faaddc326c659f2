"""From a description to an adapter, and what a URL turns out to be."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from kvsteward.engines.embedded import EmbeddedEngine
from kvsteward.engines.http import HttpOptions
from kvsteward.engines.llama import LlamaServerEngine
from kvsteward.engines.openai import OpenAIEngine
from kvsteward.engines.registry import EngineSpec, create_engine, detect, resolve
from kvsteward.engines.scripted import ScriptedEngine, ScriptedOptions
from kvsteward.engines.scripted_server import running_scripted
from kvsteward.engines.sglang import SglangEngine
from kvsteward.engines.vllm import VllmEngine
from kvsteward.errors import ConfigError, EngineError, EngineUnavailableError

BY_KIND = {"openai": OpenAIEngine, "vllm": VllmEngine, "sglang": SglangEngine, "llama-server": LlamaServerEngine}


@pytest.mark.parametrize("kind", BY_KIND)
async def test_auto_finds_out_what_a_url_is(kind: Any) -> None:
    async with running_scripted(ScriptedEngine(ScriptedOptions(imitates=kind))) as url:
        assert await detect(HttpOptions(url=url)) == kind
        engine = await resolve(EngineSpec(kind="auto", url=url + "/v1"))
        assert type(engine) is BY_KIND[kind]
        await engine.start()
        await engine.close()


async def test_what_the_user_says_wins() -> None:
    async with running_scripted(ScriptedEngine(ScriptedOptions(imitates="vllm"))) as url:
        engine = create_engine(EngineSpec(kind="vllm", url=url, context_tokens=1000, kv_tokens=5000, slots=3))
        info = await engine.start()
        await engine.close()
    assert (info.context_limit_tokens, info.kv_capacity_tokens, info.max_running) == (1000, 5000, 3)
    assert info.block_tokens == 16


async def test_nothing_there_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(EngineUnavailableError):
        await detect(HttpOptions(url=url))


async def test_something_that_never_answers_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = HttpOptions(url=f"http://127.0.0.1:{silent.getsockname()[1]}", probe_timeout_s=30)
        with pytest.raises(EngineUnavailableError, match="answered within"):
            await detect(options, within_s=0.2)


async def test_another_server_is_no_engine() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnope")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    with pytest.raises(EngineError, match="no engine that kvsteward knows"):
        await detect(HttpOptions(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    server.close()


@pytest.mark.parametrize(
    "spec",
    [
        EngineSpec(kind="vllm"),
        EngineSpec(kind="auto", url="http://x"),
        EngineSpec(kind="tgi", url="http://x"),  # type: ignore[arg-type]
        EngineSpec(kind="openai", url="x:8000"),
    ],
)
def test_a_spec_that_cannot_be_is_a_config_error(spec: EngineSpec) -> None:
    with pytest.raises(ConfigError):
        create_engine(spec)


def test_embedded_and_scripted_need_no_url() -> None:
    assert isinstance(create_engine(EngineSpec(model=Path("m.gguf"))), EmbeddedEngine)
    engine = create_engine(EngineSpec(kind="scripted", kv_tokens=1600, slots=2))
    assert (engine.info.kv_capacity_tokens, engine.info.context_limit_tokens, engine.info.max_running) == (
        1600,
        1600,
        2,
    )

"""What the tests of the engines share: requests, reading replies, and one engine of each kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from kvsteward.engines.base import Engine, EngineRequest
from kvsteward.engines.embedded import EmbeddedEngine, EmbeddedOptions
from kvsteward.engines.http import HttpOptions
from kvsteward.engines.llama import LlamaServerEngine
from kvsteward.engines.openai import OpenAIEngine
from kvsteward.engines.scripted import ScriptedEngine, ScriptedOptions
from kvsteward.engines.scripted_server import running_scripted
from kvsteward.engines.sglang import SglangEngine
from kvsteward.engines.vllm import VllmEngine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]
PLAIN = [{"role": "user", "content": "What is the capital of France?"}]
WITH_TOOL_RESULT = [
    {"role": "system", "content": "You are a careful assistant."},
    {"role": "user", "content": "Read a.txt and tell me what it says. Grüße, 你好!"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.txt"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "line 1: hello\nline 2: world"},
    {"role": "user", "content": "And what is on line 2?"},
]


def chat(
    messages: list[dict[str, Any]],
    request_id: str = "r1",
    session_id: str | None = "s1",
    *,
    stream: bool = True,
    **fields: Any,
) -> EngineRequest:
    """A chat request. Streamed ones ask for usage."""
    body: dict[str, Any] = {"messages": messages, "stream": stream, **fields}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return EngineRequest("/v1/chat/completions", orjson.dumps(body), request_id, session_id)


async def read(engine: Engine, request: EngineRequest) -> tuple[int, bytes]:
    """Sends a request and reads the whole answer."""
    async with engine.open(request) as reply:
        return reply.status, b"".join([chunk async for chunk in reply.chunks()])


def events(data: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream. Fails unless it ends with the end mark."""
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


def usage(data: bytes) -> dict[str, Any]:
    """The usage that the stream reports."""
    found = [event["usage"] for event in events(data) if event.get("usage")]
    assert found, "the stream has no usage"
    return dict(found[-1])


ADAPTERS: dict[str, tuple[str, type[OpenAIEngine]]] = {
    "openai": ("openai", OpenAIEngine),
    "vllm": ("vllm", VllmEngine),
    "sglang": ("sglang", SglangEngine),
    "llama-server": ("llama-server", LlamaServerEngine),
}
KINDS = [
    "scripted",
    *ADAPTERS,
    pytest.param("embedded", marks=pytest.mark.embedded),
    pytest.param("real-vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(400)]),
]


@asynccontextmanager
async def started(kind: str, vllm_url: str | None = None) -> AsyncIterator[Engine]:
    """One engine of a kind, started; closed at the end. The URL adapters talk to a scripted engine behind uvicorn."""
    if kind == "scripted":
        engine: Engine = ScriptedEngine(answers=long_or_short)
        await engine.start()
        yield engine
        await engine.close()
    elif kind == "embedded":
        engine = EmbeddedEngine(EmbeddedOptions(slots=2, context_tokens=2048, threads=1))
        await engine.start()
        yield engine
        await engine.close()
    elif kind == "real-vllm":
        assert vllm_url is not None
        engine = VllmEngine(HttpOptions(url=vllm_url, probe_timeout_s=20))
        await engine.start()
        yield engine
        await engine.close()
    else:
        imitates, adapter = ADAPTERS[kind]
        options = ScriptedOptions(imitates=imitates, decode_tokens_per_s=2000)  # type: ignore[arg-type]
        async with running_scripted(ScriptedEngine(options, answers=long_or_short)) as url:
            engine = adapter(HttpOptions(url=url))
            await engine.start()
            yield engine
            await engine.close()


def long_or_short(body: Any) -> str:
    """The scripted model: long if it may be, so that a client can leave in the middle."""
    return "word " * 4000 if (body.get("max_tokens") or 0) > 100 else "Paris is the capital."


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    vllm_url = request.getfixturevalue("vllm_server").url if request.param == "real-vllm" else None
    async with started(request.param, vllm_url) as one:
        yield one

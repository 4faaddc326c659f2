"""How likely a prompt's tokens are: what vLLM is asked, and what of its answers is believed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kvsteward.engines.http import HttpOptions
from kvsteward.engines.scripted import ScriptedEngine
from kvsteward.engines.vllm import VllmEngine

WHOLE = {"tokens": ["What", " failed", "?"], "token_logprobs": [None, -7.5, -1.25]}


def answer(logprobs: Any) -> dict[str, Any]:
    return {"object": "text_completion", "choices": [{"text": "What failed?", "logprobs": logprobs}]}


@asynccontextmanager
async def served(status: int, body: Any) -> AsyncIterator[tuple[VllmEngine, list[Any]]]:
    """A vLLM whose completions endpoint answers so, and what it was asked."""
    asked: list[Any] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append((await request.json(), request.headers.get("x-request-id"), request.headers.get("x-session-id")))
        return web.json_response(body, status=status)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "smol", "max_model_len": 4096}]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    engine = VllmEngine(HttpOptions(url=f"http://127.0.0.1:{port}"))
    try:
        await engine.start()
        yield engine, asked
    finally:
        await engine.close()
        await runner.cleanup()


async def test_the_prompt_comes_back_with_its_log_probabilities() -> None:
    async with served(200, answer(WHOLE)) as (engine, asked):
        pieces = await engine.prompt_logprobs("What failed?", model="", request_id="t-score")
    assert pieces == [("What", None), (" failed", -7.5), ("?", -1.25)]
    ((question, request_id, session_id),) = asked
    assert question == {
        "model": "smol",
        "prompt": "What failed?",
        "temperature": 0,
        "echo": True,
        "logprobs": 0,
        "max_tokens": 0,
    }
    assert (request_id, session_id) == ("t-score", None), "it is no turn of the session"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": {"message": "longer than the context"}}),
        (200, answer(None)),
        (200, answer({"tokens": ["a", "b"], "token_logprobs": [None]})),
        (200, answer({"tokens": [1, 2], "token_logprobs": [None, -1.0]})),
        (200, answer({"tokens": [], "token_logprobs": []})),
        (200, {"choices": []}),
        (200, [1]),
    ],
)
async def test_any_other_answer_is_none(status: int, body: Any) -> None:
    async with served(status, body) as (engine, _):
        assert await engine.prompt_logprobs("What failed?", model="smol", request_id="t") is None


async def test_an_engine_that_does_not_say_so_cannot() -> None:
    engine = ScriptedEngine()
    assert not engine.info.prompt_logprobs
    assert await engine.prompt_logprobs("x", model="", request_id="t") is None
    assert VllmEngine(HttpOptions(url="http://127.0.0.1:9")).info.prompt_logprobs, "known before it is reached"

"""What every engine must do, whatever it is: one matrix over the scripted engine, each adapter, and real engines."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from tests.engines.conftest import PLAIN, TOOLS, WITH_TOOL_RESULT, chat, events, read, usage

from kvsteward.engines.base import Engine, EngineRequest
from kvsteward.engines.openai import OpenAIEngine

CANNOT_TELL = {"openai"}


def dialect(engine: Engine) -> str:
    return engine.info.dialect


async def test_start_says_what_it_is_and_can_be_repeated(engine: Engine) -> None:
    info = engine.info
    assert info.models
    assert info.context_limit_tokens is not None and info.context_limit_tokens > 0
    if dialect(engine) not in CANNOT_TELL:
        assert info.kv_capacity_tokens is not None and info.kv_capacity_tokens >= info.context_limit_tokens
    assert "text" in info.modalities
    assert await engine.start() == info


async def test_check_passes_on_a_live_engine(engine: Engine) -> None:
    await engine.check()


async def test_streamed_answer_begins_with_the_role_and_ends_with_usage(engine: Engine) -> None:
    async with engine.open(chat(PLAIN, model=engine.info.models[0], max_tokens=8)) as reply:
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        data = b"".join([chunk async for chunk in reply.chunks()])
    first = events(data)[0]["choices"][0]["delta"]
    assert first["role"] == "assistant"
    assert usage(data)["completion_tokens"] > 0


async def test_no_hop_by_hop_header_comes_through(engine: Engine) -> None:
    async with engine.open(chat(PLAIN, model=engine.info.models[0], max_tokens=2)) as reply:
        names = set(reply.headers)
    assert all(name == name.lower() for name in names)
    assert not names & {"connection", "keep-alive", "transfer-encoding"}


async def test_whole_answer_is_one_json_object(engine: Engine) -> None:
    status, data = await read(engine, chat(PLAIN, stream=False, model=engine.info.models[0], max_tokens=8))
    assert status == 200
    answer = orjson.loads(data)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [(PLAIN, None), (WITH_TOOL_RESULT, TOOLS), (WITH_TOOL_RESULT, None)],
    ids=["plain", "tools", "results"],
)
async def test_count_is_exactly_what_the_engine_bills(
    engine: Engine, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    fields: dict[str, Any] = {"model": engine.info.models[0]} | ({"tools": tools} if tools else {})
    counted = await engine.count_prompt_tokens({"messages": messages, **fields})
    if dialect(engine) in CANNOT_TELL:
        assert counted is None
        return
    status, data = await read(engine, chat(messages, max_tokens=4, **fields))
    assert status == 200
    assert counted == usage(data)["prompt_tokens"]


async def test_overlong_prompt_is_an_ordinary_reply_with_status_400(engine: Engine) -> None:
    assert engine.info.context_limit_tokens is not None
    text = "word " * (engine.info.context_limit_tokens + 100)
    status, data = await read(engine, chat([{"role": "user", "content": text}], model=engine.info.models[0]))
    assert status == 400
    body = orjson.loads(data)
    assert (body.get("error") or body)["message"]


async def test_what_is_no_chat_is_an_ordinary_reply_with_an_error_status(engine: Engine) -> None:
    status, _ = await read(engine, EngineRequest("/v1/chat/completions", b'{"messages": 3}', "r1"))
    assert 400 <= status < 500


async def test_leaving_a_stream_frees_the_engine_within_a_second(engine: Engine) -> None:
    request = chat(PLAIN, "left", model=engine.info.models[0], max_tokens=1500, ignore_eos=True)
    async with engine.open(request) as reply:
        async for _ in reply.chunks():
            break
    began = time.monotonic()
    released = await engine.confirm_released("left", within_s=1.0)
    if dialect(engine) in CANNOT_TELL:
        assert released is False
        return
    assert released is True
    assert time.monotonic() - began < 1.5
    assert (await engine.load()).running == 0


async def test_the_engine_works_again_after_a_client_left(engine: Engine) -> None:
    for number in range(3):
        request = chat(PLAIN, f"left-{number}", model=engine.info.models[0], max_tokens=1500, ignore_eos=True)
        async with engine.open(request) as reply:
            async for _ in reply.chunks():
                break
    status, data = await read(engine, chat(PLAIN, "after", model=engine.info.models[0], max_tokens=4))
    assert (status, bool(usage(data))) == (200, True)


async def test_a_second_turn_reuses_the_prefix_of_the_first(engine: Engine) -> None:
    history = [{"role": "user", "content": "Here is a long text. " * 40}]
    fields = {"model": engine.info.models[0], "max_tokens": 4}
    await read(engine, chat(history, "first", "sess", **fields))
    history += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "Go on."}]
    _, data = await read(engine, chat(history, "second", "sess", **fields))
    cached = usage(data)["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage(data)["prompt_tokens"] // 2


async def test_parallel_requests_all_answer(engine: Engine) -> None:
    fields = {"model": engine.info.models[0], "max_tokens": 4}
    answers = await asyncio.gather(
        *(read(engine, chat(PLAIN, f"p{number}", f"session-{number % 3}", **fields)) for number in range(6))
    )
    assert [status for status, _ in answers] == [200] * 6
    assert all(events(data) for _, data in answers)


async def test_releasing_an_unknown_session_is_false(engine: Engine) -> None:
    assert await engine.release_session("nobody") is False


async def test_load_counts_are_natural_or_none(engine: Engine) -> None:
    load = await engine.load()
    if dialect(engine) in CANNOT_TELL:
        assert load.running is None
        return
    assert (load.running, load.waiting) == (0, 0)


async def test_close_can_be_repeated(engine: Engine) -> None:
    await engine.close()
    await engine.close()


async def test_a_body_over_a_mebibyte_arrives_whole(engine: Engine) -> None:
    if not isinstance(engine, OpenAIEngine):
        pytest.skip("no socket")
    status, data = await read(engine, chat(PLAIN, model=engine.info.models[0], max_tokens=2, user="x" * (2 << 20)))
    assert (status, bool(usage(data))) == (200, True)

"""llama-server by URL: who goes to which slot, what is counted, what is given back. Scripted server, real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest
from tests.engines.conftest import PLAIN, TOOLS, WITH_TOOL_RESULT, chat, read, usage

from kvsteward.engines.embedded import EmbeddedEngine, EmbeddedOptions
from kvsteward.engines.http import HttpOptions
from kvsteward.engines.llama import LlamaServerEngine, modalities_of
from kvsteward.engines.scripted import Fault, ScriptedEngine, ScriptedOptions
from kvsteward.engines.scripted_server import running_scripted


@pytest.fixture
async def pair() -> AsyncIterator[tuple[LlamaServerEngine, ScriptedEngine]]:
    options = ScriptedOptions(imitates="llama-server", max_running=2, decode_tokens_per_s=200)
    server = ScriptedEngine(options, answers=lambda body: "word " * (400 if body.get("max_tokens") else 2))
    async with running_scripted(server) as url:
        engine = LlamaServerEngine(HttpOptions(url=url))
        await engine.start()
        yield engine, server
        await engine.close()


def slots_asked(server: ScriptedEngine) -> list[int | None]:
    return [orjson.loads(request.body).get("id_slot") for request in server.requests]


async def test_a_session_keeps_its_slot(pair: tuple[LlamaServerEngine, ScriptedEngine]) -> None:
    engine, server = pair
    for session in ("a", "b", "a", "b", "a"):
        await read(engine, chat(PLAIN, "r", session))
    a, b = slots_asked(server)[:2]
    assert {a, b} == {0, 1}
    assert slots_asked(server) == [a, b, a, b, a]


async def test_a_request_without_a_session_has_no_slot_and_no_other_change(
    pair: tuple[LlamaServerEngine, ScriptedEngine],
) -> None:
    engine, server = pair
    request = chat(PLAIN, "r", None, odd_field={"n": 1.10})
    await read(engine, request)
    assert server.requests[0].body == request.body


async def test_unknown_fields_stay_and_the_client_s_own_slot_wins(
    pair: tuple[LlamaServerEngine, ScriptedEngine],
) -> None:
    engine, server = pair
    request = chat(PLAIN, "r", "a", odd_field={"n": 1.10}, id_slot=1)
    await read(engine, request)
    assert server.requests[0].body.endswith(request.body[1:])
    assert orjson.loads(server.requests[0].body)["id_slot"] == 1


async def test_while_an_unplaced_request_runs_its_slot_is_avoided(
    pair: tuple[LlamaServerEngine, ScriptedEngine],
) -> None:
    engine, server = pair
    async with engine.open(chat(PLAIN, "r1", None, max_tokens=300)) as reply:
        await anext(reply.chunks())
        await read(engine, chat(PLAIN, "r2", "a"))  # the double shows the unplaced one on slot 0
    assert slots_asked(server) == [None, 1]


async def test_a_second_request_of_a_busy_session_takes_nobody_s_slot(
    pair: tuple[LlamaServerEngine, ScriptedEngine],
) -> None:
    engine, server = pair
    await read(engine, chat(PLAIN, "r0", "b"))
    async with engine.open(chat(PLAIN, "r1", "a", max_tokens=300)) as reply:
        await anext(reply.chunks())
        await read(engine, chat(PLAIN, "r2", "a"))
    assert slots_asked(server)[2] is None


async def test_slots_are_given_back_when_a_request_fails(pair: tuple[LlamaServerEngine, ScriptedEngine]) -> None:
    engine, server = pair
    server.inject(*[Fault(status=500)] * 5)
    for number in range(5):
        assert (await read(engine, chat(PLAIN, f"r{number}", f"s{number}")))[0] == 500
    await read(engine, chat(PLAIN, "last", "s9"))
    assert None not in slots_asked(server)


async def test_a_zombie_is_not_confirmed(pair: tuple[LlamaServerEngine, ScriptedEngine]) -> None:
    engine, server = pair
    server.inject(Fault(zombie=True))
    async with engine.open(chat(PLAIN, "r1", "a", max_tokens=300)) as reply:
        await anext(reply.chunks())
    assert await engine.confirm_released("r1", within_s=0.1) is False


async def test_release_session_erases_once(pair: tuple[LlamaServerEngine, ScriptedEngine]) -> None:
    engine, _ = pair
    await read(engine, chat(PLAIN, "r1", "a"))
    assert await engine.release_session("a") is True
    assert await engine.release_session("a") is False


async def test_a_session_in_the_middle_of_a_turn_is_not_released(
    pair: tuple[LlamaServerEngine, ScriptedEngine],
) -> None:
    engine, _ = pair
    async with engine.open(chat(PLAIN, "r1", "a", max_tokens=300)) as reply:
        await anext(reply.chunks())
        assert await engine.release_session("a") is False


async def test_capacity_is_one_slot_unless_the_pool_is_known_to_be_split() -> None:
    options = ScriptedOptions(imitates="llama-server", max_running=4, context_limit_tokens=1000)
    async with running_scripted(ScriptedEngine(options)) as url:
        for unified, capacity in ((None, 1000), (True, 1000), (False, 4000)):
            engine = LlamaServerEngine(HttpOptions(url=url), kv_unified=unified)
            assert (await engine.start()).kv_capacity_tokens == capacity
            await engine.close()


def test_modalities() -> None:
    assert modalities_of({"modalities": {"vision": True, "audio": False}}) == {"text", "image"}
    assert modalities_of({}) == {"text"}


@pytest.mark.embedded
async def test_both_ways_to_count_agree_with_the_real_server() -> None:
    engine = EmbeddedEngine(EmbeddedOptions(slots=1, context_tokens=1024, threads=1))
    await engine.start()
    body = {"messages": WITH_TOOL_RESULT, "tools": TOOLS}
    direct = await engine.count_prompt_tokens(body)
    engine._counts_directly = False
    by_template = await engine.count_prompt_tokens(body)
    _, data = await read(engine, chat(WITH_TOOL_RESULT, tools=TOOLS, max_tokens=2))
    await engine.close()
    assert direct == by_template == usage(data)["prompt_tokens"]


@pytest.mark.embedded
async def test_two_sessions_in_turn_keep_their_prefix_on_a_real_server() -> None:
    engine = EmbeddedEngine(EmbeddedOptions(slots=2, context_tokens=1024, threads=1))
    await engine.start()
    cached = []
    for turn in range(2):
        for session in ("a", "b"):
            history = [{"role": "user", "content": f"I am {session}. " * 30}]
            if turn:
                history += [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}]
            _, data = await read(engine, chat(history, f"{session}{turn}", session, max_tokens=2))
            cached.append(usage(data)["prompt_tokens_details"]["cached_tokens"])
    assert await engine.release_session("a") is True
    await asyncio.sleep(0)
    await engine.close()
    assert min(cached[2:]) > 100

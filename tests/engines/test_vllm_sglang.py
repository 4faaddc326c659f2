"""What is particular to vLLM and SGLang: the ids that they get, and how a release is confirmed or not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from tests.engines.conftest import PLAIN, chat, events, read

from kvsteward.engines.http import HttpOptions
from kvsteward.engines.scripted import Fault, ScriptedEngine, ScriptedOptions
from kvsteward.engines.scripted_server import running_scripted
from kvsteward.engines.sglang import SglangEngine, rid_of
from kvsteward.engines.vllm import VllmEngine


async def test_vllm_gets_the_request_id_and_the_session_id() -> None:
    server = ScriptedEngine(ScriptedOptions(imitates="vllm"))
    async with running_scripted(server) as url:
        engine = VllmEngine(HttpOptions(url=url))
        await engine.start()
        await read(engine, chat(PLAIN, "req-7", "sess-9"))
        await engine.close()
    seen = server.requests[0]
    assert (seen.request_id, seen.session_id) == ("req-7", "sess-9")
    assert seen.body == chat(PLAIN, "req-7", "sess-9").body


async def test_sglang_gets_a_rid_of_fixed_length_and_the_rest_unchanged() -> None:
    server = ScriptedEngine(ScriptedOptions(imitates="sglang"))
    async with running_scripted(server) as url:
        engine = SglangEngine(HttpOptions(url=url))
        await engine.start()
        await read(engine, chat(PLAIN, "batch_1"))
        await engine.close()
    body = orjson.loads(server.requests[0].body)
    assert body.pop("rid") == rid_of("batch_1").decode()
    assert body == orjson.loads(chat(PLAIN).body)
    assert {len(rid_of(name)) for name in ("a", "batch_1", "batch_10")} == {32}
    assert not rid_of("batch_10").startswith(rid_of("batch_1"))


@pytest.mark.parametrize(("kind", "adapter", "ends"), [("vllm", VllmEngine, False), ("sglang", SglangEngine, True)])
async def test_a_zombie_is_seen_and_where_there_is_an_abort_it_ends(kind: Any, adapter: Any, ends: bool) -> None:
    options = ScriptedOptions(imitates=kind, decode_tokens_per_s=100)
    server = ScriptedEngine(options, answers=["word " * 400])
    async with running_scripted(server) as url:
        engine = adapter(HttpOptions(url=url))
        await engine.start()
        server.inject(Fault(zombie=True))
        async with engine.open(chat(PLAIN, "z")) as reply:
            await anext(reply.chunks())
        assert await engine.confirm_released("z", within_s=0.2) is ends
        await engine.close()


async def test_own_requests_in_flight_are_no_zombies() -> None:
    options = ScriptedOptions(imitates="vllm", decode_tokens_per_s=100)
    async with running_scripted(ScriptedEngine(options, answers=["word " * 400])) as url:
        engine = VllmEngine(HttpOptions(url=url))
        await engine.start()
        async with engine.open(chat(PLAIN, "stays")) as staying:
            await anext(staying.chunks())
            async with engine.open(chat(PLAIN, "leaves")) as leaving:
                await anext(leaving.chunks())
            assert await engine.confirm_released("leaves", within_s=1) is True
            assert (await engine.load()).running == 1
        await engine.close()


@pytest.mark.vllm
@pytest.mark.timeout(400)
async def test_real_vllm_takes_the_request_id_and_reports_its_pool(vllm_server) -> None:
    engine = VllmEngine(HttpOptions(url=vllm_server.url))
    info = await engine.start()
    request = chat(PLAIN, "my-request-id", model=info.models[0], max_tokens=2)
    _, data = await read(engine, request)
    load = await engine.load()
    await engine.close()
    assert events(data)[0]["id"].endswith("my-request-id")
    assert info.block_tokens and info.kv_capacity_tokens and info.kv_capacity_tokens % info.block_tokens == 0
    assert load.kv_usage_ratio is not None and load.prefix_queried_tokens_total

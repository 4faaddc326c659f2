"""What the gateway tells kvsteward's connector inside vLLM, and that a plain vLLM hears nothing of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvsteward.engines.http import HttpOptions
from kvsteward.engines.scripted import Answer, Fault, ScriptedEngine, ScriptedOptions, ToolCall
from kvsteward.engines.scripted_server import running_scripted
from kvsteward.engines.vllm import VllmEngine
from kvsteward.gateway import app as app_module
from kvsteward.gateway.settings import Settings, Tenant

CALLS = Answer("let me see", tool_calls=(ToolCall("run_tests", "{}"), ToolCall("read_file", '{"path": "a"}')))
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("run_tests", "read_file")]


def user(text):
    return {"role": "user", "content": f"{text} " * 40}


@asynccontextmanager
async def vllm(
    answers: Any = ("ok",), *, connector: bool = True, hints: str = "auto", **options: Any
) -> AsyncIterator[Any]:
    """A served engine, and vLLM's adapter for it."""
    engine = ScriptedEngine(ScriptedOptions(hints=connector, **options), answers=answers)
    async with running_scripted(engine) as url:
        yield engine, VllmEngine(HttpOptions(url), hints=hints)


def sent(engine, number=-1):
    return json.loads(engine.requests[number].body)


async def test_each_turn_tells_what_is_known_of_its_session(start):
    async with vllm() as (engine, adapter):
        gateway = await start(engine=adapter)
        await gateway.http.post("/v1/sessions", json={"session_id": "s", "ttl_s": 600})
        await gateway.chat(user("hi"), session="s", headers={"X-KVSteward-Class": "interactive"})
        hint = {"version": 1, "class": "interactive", "ttl_s": 600.0}
        assert sent(engine)["kv_transfer_params"] == {"kvsteward": hint}
        assert engine.requests[-1].session_id == "s"
        own = {"do_remote_prefill": False, "kvsteward": {"version": 1, "ttl_s": 7}}
        await gateway.chat(user("hi"), session="t", kv_transfer_params=own)
        assert sent(engine)["kv_transfer_params"] == {
            "do_remote_prefill": False,
            "kvsteward": {"version": 1, "class": "default", "ttl_s": 7},
        }
        refused = await gateway.chat(user("hi"), session="t", headers={"X-KVSteward-Class": "urgent"})
        assert refused["status"] == 400


async def test_a_turn_that_ends_in_calls_is_followed_by_a_note(start):
    async with vllm([CALLS, "done"]) as (engine, adapter):
        gateway = await start(engine=adapter)
        answer = await gateway.chat(user("hi"), session="s", tools=TOOLS)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        await gateway.until(lambda: len(engine.notes) == 1)
        assert engine.notes[0] == (
            "s",
            "note",
            {"class": "default", "ttl_s": 1800.0, "stop": "tool_calls", "tools": ["run_tests", "read_file"]},
        )
        result = {
            "role": "tool",
            "tool_call_id": answer["choices"][0]["message"]["tool_calls"][0]["id"],
            "content": "ok",
        }
        assert (await gateway.chat(result, session="s"))["status"] == 400  # a tool message needs its call
        await gateway.chat(user("hi"), answer["choices"][0]["message"], result, session="s", tools=TOOLS)
        await asyncio.sleep(0.1)
        assert len(engine.notes) == 1, "a turn that ends in words has no note"
        assert len(engine.requests) == 2, "a note is no request where the plug-in is"


async def test_streamed_calls_are_noted_too(start):
    async with vllm([CALLS]) as (engine, adapter):
        gateway = await start(engine=adapter)
        body = {"messages": [user("hi")], "tools": TOOLS, "stream": True}
        async with gateway.http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": "s"}) as response:
            await response.text()
        await gateway.until(lambda: len(engine.notes) == 1)
        assert engine.notes[0][2]["tools"] == ["run_tests", "read_file"]


async def test_a_summary_that_is_drafted_in_the_pause_does_not_make_the_engine_forget(start):
    """It is a request of the same session, and the newest word of a session counts."""
    async with vllm([CALLS], context_limit_tokens=2048, kv_capacity_tokens=4096) as (engine, adapter):
        gateway = await start(engine=adapter)
        history: list[Any] = []
        for turn in range(40):
            history.append(user(f"note N-{turn:04d} is to be filed away"))
            answer = await gateway.chat(*history, session="s", tools=TOOLS, max_tokens=50)
            message = answer["choices"][0]["message"]
            calls = message["tool_calls"]
            history += [message, *({"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls)]
            await gateway.until(lambda: gateway.steward.scribe.running == 0)
            drafts = [json.loads(r.body) for r in engine.requests if r.request_id.endswith("-summary")]
            if drafts:
                break
        assert drafts[0]["kv_transfer_params"]["kvsteward"] == {
            "version": 1,
            "class": "default",
            "ttl_s": 1800.0,
            "stop": "tool_calls",
            "tools": ["run_tests", "read_file"],
        }


@pytest.mark.parametrize(("connector", "hints"), [(False, "auto"), (True, "off")])
async def test_a_plain_vllm_hears_nothing(start, connector, hints):
    async with vllm([CALLS], connector=connector, hints=hints) as (engine, adapter):
        gateway = await start(engine=adapter)
        await gateway.chat(user("hi"), session="s", tools=TOOLS)
        async with gateway.http.delete("/v1/sessions/s") as response:
            assert response.status == 200
        await asyncio.sleep(0.1)
        assert len(engine.requests) == 1
        assert "kv_transfer_params" not in sent(engine)
        assert not engine.notes
        assert not adapter.takes_hints


async def test_without_the_plug_in_the_user_may_say_that_the_connector_is_there(start):
    async with vllm([CALLS], connector=False, hints="on") as (engine, adapter):
        gateway = await start(engine=adapter)
        await gateway.chat(user("hi"), session="s", tools=TOOLS)
        await gateway.until(lambda: len(engine.requests) == 2)
        note = sent(engine)
        assert note["max_tokens"] == 1
        assert note["session_id"] == "s"
        assert note["kv_transfer_params"]["kvsteward"]["note"] is True
        assert note["kv_transfer_params"]["kvsteward"]["tools"] == ["run_tests", "read_file"]
        await gateway.http.delete("/v1/sessions/s")
        assert sent(engine)["kv_transfer_params"]["kvsteward"] == {
            "version": 1,
            "note": True,
            "final": True,
            "moved": False,
        }


async def test_passthrough_adds_nothing(start):
    async with vllm([CALLS]) as (engine, adapter):
        gateway = await start(engine=adapter, settings=Settings(mode="passthrough"))
        await gateway.chat(user("hi"), session="s", tools=TOOLS)
        await asyncio.sleep(0.1)
        assert "kv_transfer_params" not in sent(engine)
        assert engine.requests[-1].session_id is None
        assert not engine.notes


async def test_deleted_expired_and_moved_sessions_are_released(start):
    async with vllm() as (a, first), vllm() as (b, second):
        gateway = await start(engine=[first, second], settings=Settings(keys={"k": Tenant("t", ttl_s=0.2, admin=True)}))
        key = {"Authorization": "Bearer k"}
        for session in ("old", "gone", "moving"):
            gateway.steward.fleet.bind(f"t/{session}", gateway.steward.fleet.find(first.name))
            await gateway.chat(user(session), session=session, headers=key)
        assert sum(a.held_blocks().values()) > 0
        await gateway.http.delete("/v1/sessions/gone", headers=key)
        assert a.notes[-1] == ("t/gone", "release", {"moved": False})
        await gateway.http.post("/v1/sessions/moving/move", json={"to": second.name}, headers=key)
        await gateway.until(lambda: len(a.notes) == 2)
        assert a.notes[-1] == ("t/moving", "release", {"moved": True})
        await gateway.chat(user("moving"), session="moving", headers=key)
        await asyncio.sleep(0.3)
        assert await gateway.steward.sweep() == 2
        assert a.notes[-1] == ("t/old", "release", {"moved": False})
        assert list(b.notes) == [("t/moving", "release", {"moved": False})]
        assert not any(a.held_blocks().values())


async def test_what_sessions_hold_in_the_engine_is_shown(start, monkeypatch):
    monkeypatch.setattr(app_module, "_WATCH_EVERY_S", 0.05)
    async with vllm() as (engine, adapter):
        gateway = await start(engine=adapter)
        await gateway.chat(user("hi"), session="s")
        fleet = gateway.steward.fleet
        await gateway.until(lambda: fleet.first.held is not None and fleet.first.held.blocks > 0)
        shown = await gateway.get("/v1/sessions/s")
        assert shown["engine_blocks"] == engine.held_blocks()["s"] > 0
        assert shown["engine_tokens"] == 16 * shown["engine_blocks"]
        assert (await gateway.get("/v1/internal/memory"))["sessions"][0]["engine_blocks"] == shown["engine_blocks"]
        (row,) = (await gateway.get("/v1/engines"))["data"]
        assert (row["takes_hints"], row["held_blocks"]) == (True, shown["engine_blocks"])


async def test_an_engine_that_hangs_on_notes_delays_nobody_and_few_are_tried(start, monkeypatch):
    monkeypatch.setattr(app_module, "_MAX_NOTES", 2)
    never = asyncio.Event()

    class Deaf(ScriptedEngine):
        takes_hints = True

        async def note_pause(self, session_id, keep):
            await never.wait()

    gateway = await start(engine=Deaf(ScriptedOptions(), answers=[CALLS]))
    async with asyncio.timeout(5):
        for number in range(4):
            answer = await gateway.chat(user("hi"), session=f"s{number}", tools=TOOLS)
            assert answer["status"] == 200
    async with gateway.http.get("/metrics") as response:
        assert 'kvsteward:notes_total{outcome="dropped"} 2.0' in await response.text()


async def test_a_note_that_fails_is_counted_and_nothing_else(start):
    async with vllm([CALLS], connector=False, hints="on") as (engine, adapter):
        gateway = await start(engine=adapter)
        engine.inject(Fault(), Fault(refuse=True))
        assert (await gateway.chat(user("hi"), session="s", tools=TOOLS))["status"] == 200
        await gateway.until(lambda: gateway.steward._notes == 0)
        assert gateway.steward.telemetry.notes.labels("failed")._value.get() == 1
        assert (await gateway.chat(user("hi"), session="s", tools=TOOLS))["status"] == 200

"""Several gateways over one Valkey: a session goes on at any of them; the server may die and come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsteward.engines.scripted import ScriptedEngine, ScriptedOptions
from kvsteward.gateway.settings import Settings
from valkey_server import Server


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """One to kill, with an append-only file."""
    server = Server(tmp_path, "--appendonly", "yes")
    yield server
    server.kill()


@pytest.fixture
def engine():
    """One engine behind all gateways."""
    return ScriptedEngine(
        ScriptedOptions(context_limit_tokens=2048), answers=lambda body: f"answer {len(body['messages'])}"
    )


async def contents(gateway, session="s"):
    log = await gateway.get(f"/v1/sessions/{session}/log")
    return [entry["message"]["content"] for entry in log["data"]]


async def test_a_session_goes_on_at_another_gateway(start, valkey_server, engine):
    """With a client that keeps the history, and with one that leaves it to the gateway."""
    one, two = [await start(engine=engine, store=valkey_server.url) for _ in range(2)]
    first = await one.chat(user("hi"), session="s")
    answer = first["choices"][0]["message"]["content"]
    second = await two.chat(user("hi"), said(answer), user("more"), session="s")
    assert second["status"] == 200
    assert await contents(one) == await contents(two) == ["hi", answer, "more", "answer 3"]
    assert (await two.get("/v1/sessions/s"))["turns"] == 2

    # By its history alone.
    third = await one.chat(user("hi"), said(answer), user("more"), said("answer 3"), user("again"))
    assert third["headers"]["x-kvsteward-session"] == "s"
    assert len(await contents(two)) == 6

    # By the gateway's own history.
    async with one.http.post("/create_session", json={"session_id": "c", "system": "Be short."}) as response:
        assert response.status == 200
    for gateway, text in ((one, "a"), (two, "b"), (one, "c")):
        async with gateway.http.post("/chat", json={"session_id": "c", "message": text}) as response:
            assert response.status == 200
    shown = json.loads(engine.requests[-1].body)["messages"]
    assert await contents(two, "c") == ["Be short.", "a", "answer 2", "b", "answer 4", "c", "answer 6"]
    assert [message["content"] for message in shown] == (await contents(two, "c"))[:-1]
    assert await one.verify() == []


async def test_the_view_is_the_same_at_each_gateway(start, valkey_server, engine):
    """Reductions and compactions that one gateway decided are what the other goes on from."""
    settings = Settings(budget_tokens=1024)
    one, two = [await start(engine=engine, store=valkey_server.url, settings=settings) for _ in range(2)]
    history = []
    for turn in range(24):
        gateway = (one, two)[turn % 2] if turn > 16 else one
        history.append(user(f"question {turn}: " + f"word{turn} " * 40))
        answer = await gateway.chat(*history, session="s")
        assert answer["status"] == 200
        history.append(answer["choices"][0]["message"])
    views = [await gateway.get("/v1/sessions/s/view") for gateway in (one, two)]
    assert views[0]["messages"] == views[1]["messages"]
    assert views[0]["decisions"] == views[1]["decisions"]
    assert views[0]["dropped_messages"] > 0
    fresh = await start(engine=engine, store=valkey_server.url, settings=settings)
    assert (await fresh.get("/v1/sessions/s/view"))["messages"] == views[0]["messages"]
    assert (await fresh.get("/v1/sessions/s"))["turns"] == 24
    found = await fresh.get("/v1/sessions/s/recall?query=word3")
    assert "word3" in found["text"]
    assert await fresh.verify() == []


async def test_two_gateways_at_once_in_one_session(start, valkey_server):
    """Each turn is in the log, whoever was first, and the figures count them all."""
    engine = ScriptedEngine(
        ScriptedOptions(decode_tokens_per_s=200), answers=lambda body: body["messages"][-1]["content"]
    )
    one, two = [await start(engine=engine, store=valkey_server.url) for _ in range(2)]
    await one.chat(user("begin"), session="s")
    for turn in range(5):
        answers = await asyncio.gather(
            *(gateway.chat(user("begin"), said("begin"), user(f"{turn} {n}"), session="s")
              for n, gateway in enumerate((one, two)))
        )  # fmt: skip
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == [f"{turn} 0", f"{turn} 1"]
    session = await two.get("/v1/sessions/s")
    assert (session["turns"], session["state"]) == (11, "idle")
    found = [entry["message"]["content"] for turn in range(5) for entry in await log_of(one, f"{turn} ")]
    assert sorted(found) == sorted(f"{turn} {n}" for turn in range(5) for n in range(2) for _ in range(2))
    assert await one.verify() == []


async def becomes(gateway, state):
    """Waits for the store, and for the session to be in a state."""
    async with asyncio.timeout(10):
        while (await gateway.get("/v1/sessions/s")).get("state") != state:  # noqa: ASYNC110 - the store has no event
            await asyncio.sleep(0.05)


async def log_of(gateway, needle):
    return (await gateway.get(f"/v1/sessions/s/log?q={needle}"))["data"]


async def test_a_store_that_dies_is_told_and_nothing_is_lost(start, own_server, engine):
    gateway = await start(engine=engine, store=own_server.url, settings=Settings(sweep_every_s=0.2))
    first = await gateway.chat(user("hi"), session="s")
    history = [user("hi"), said(first["choices"][0]["message"]["content"]), user("more")]
    asked = len(engine.requests)
    await asyncio.to_thread(own_server.kill)
    for _ in range(2):
        answer = await gateway.chat(*history, session="s")
        assert (answer["status"], answer["error"]["code"]) == (503, "store_unavailable")
        assert answer["error"]["hint"]
        assert int(answer["headers"]["Retry-After"]) >= 1
    assert len(engine.requests) == asked, "what is not in the log goes to no engine"
    await asyncio.to_thread(own_server.start)
    await becomes(gateway, "idle")
    again = await gateway.chat(*history, session="s")
    assert again["status"] == 200
    assert await contents(gateway) == ["hi", "answer 1", "more", "answer 3"]
    assert (await gateway.get("/v1/sessions/s"))["state"] == "idle"
    assert await gateway.verify() == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_store_that_dies_while_the_engine_speaks(start, own_server, stream):
    gateway = await start(
        answers=["word " * 100, "fine"],
        decode_tokens_per_s=100,
        store=own_server.url,
        settings=Settings(sweep_every_s=0.2, draft_every_s=0.05),
    )
    body = {"messages": [user("hi")], "stream": stream}
    request = asyncio.create_task(post(gateway, body))
    await gateway.until(lambda: bool(gateway.engine.active_sessions()))
    await asyncio.sleep(0.25)
    await asyncio.to_thread(own_server.kill)
    status, text = await request
    if stream:
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
    else:
        assert status == 503
        error = json.loads(text)["error"]
    assert error["code"] == "store_unavailable"
    await asyncio.to_thread(own_server.start)
    await becomes(gateway, "idle")  # a sweep says that the turn is over
    assert await contents(gateway) == ["hi"]
    assert await gateway.verify() == []
    assert (await gateway.chat(user("hi"), session="s"))["status"] == 200
    assert await contents(gateway) == ["hi", "fine"]
    assert (await gateway.get("/v1/sessions/s"))["state"] == "idle"
    # What was said before the break was kept as a draft, and is an entry once this gateway has ended.
    if stream:
        assert await asyncio.to_thread(gateway.store.recover, now=1.0) == 1
        found = await log_of(gateway, "word")
        assert [entry["finish"] for entry in found] == ["interrupted"]
    assert await gateway.verify() == []


async def post(gateway, body):
    async with gateway.http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": "s"}) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("mover", [0, 1])
async def test_a_session_that_one_gateway_moved_is_moved_for_all(start, valkey_server, mover):
    engines = [ScriptedEngine(ScriptedOptions(name=f"http://{name}:1"), answers=lambda body: "ok") for name in "ab"]
    gateways = [await start(engine=engines, store=valkey_server.url) for _ in range(2)]
    history = [user("hi")]

    async def turn(gateway):
        assert (await gateway.chat(*history, session="s"))["status"] == 200
        history.extend([said("ok"), user("more")])

    for gateway in (*gateways, *gateways):
        await turn(gateway)
    old, new = sorted(engines, key=lambda engine: -len(engine.requests))
    assert (len(old.requests), len(new.requests)) == (4, 0), "both gateways send it where its KV is"
    async with gateways[mover].http.post("/v1/sessions/s/move", json={"to": new.name}) as response:
        assert (await response.json())["moved"]
    for gateway in (gateways[1 - mover], gateways[mover]):
        await turn(gateway)
    assert (len(old.requests), len(new.requests)) == (4, 2)

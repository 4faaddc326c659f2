"""Several engines behind one gateway: sessions stay, go on elsewhere, are moved; engines are drained. Nothing is lost."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from kvsteward.engines.registry import EngineSpec
from kvsteward.engines.scripted import Fault, ScriptedEngine, ScriptedOptions
from kvsteward.engines.scripted_server import running_scripted
from kvsteward.errors import ConfigError, EngineUnavailableError
from kvsteward.gateway import app as app_module
from kvsteward.gateway.fleet import FAILURES, ROW_IS_LATE_S, Fleet
from kvsteward.gateway.serve import reached
from kvsteward.gateway.settings import Settings, Tenant
from kvsteward.policy.admission import Limits


def user(text):
    """Long enough to fill a block of the pool."""
    return {"role": "user", "content": f"{text} " * 40}


def engine(name, **options):
    """One that says who it is."""
    return ScriptedEngine(ScriptedOptions(name=name, **options), answers=[name])


async def pair(start, **options):
    engines = [engine("http://a:1"), engine("http://b:2")]
    gateway = await start(engine=engines, **options)
    return gateway, *engines


async def said(gateway, session, *history):
    """The engine that answers a session's turn."""
    answer = await gateway.chat(*history, user("hi"), session=session)
    assert answer["status"] == 200, answer
    return answer["choices"][0]["message"]["content"]


async def post(gateway, path, body=None, **headers):
    async with gateway.http.post(path, json=body or {}, headers=headers) as response:
        return response.status, await response.json()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def states(gateway):
    return {station.name: station.up for station in gateway.steward.fleet.stations}


async def test_sessions_are_shared_out_and_stay(start):
    gateway, a, b = await pair(start)
    where = {s: await said(gateway, s) for s in "pqrstu"}
    assert list(where.values()).count("http://a:1") == 3
    history = [user("hi"), {"role": "assistant", "content": ""}]
    for session, name in where.items():
        history[1]["content"] = name
        assert await said(gateway, session, *history) == name
        assert (await gateway.get(f"/v1/sessions/{session}"))["engine"] == name
    assert len(a.requests) == len(b.requests) == 6
    assert a.prefix_hit_tokens_total > 0
    assert await gateway.verify() == []


async def test_a_burst_of_new_sessions_is_shared_out(start):
    gateway, a, b = await pair(start)
    await asyncio.gather(*(said(gateway, f"s{n}") for n in range(8)))
    assert {len(a.requests), len(b.requests)} <= {3, 4, 5}


async def test_bindings_outlive_a_restart(start, tmp_path):
    store = str(tmp_path / "bound.db")
    gateway, *_ = await pair(start, store=store)
    await said(gateway, "s")
    name = await said(gateway, "t")
    gateway.steward.fleet.forget("t")  # what a restart forgets
    gateway.steward.fleet.find(name).residency.touch("another", 9_000)
    assert await said(gateway, "t") == name
    assert (await asyncio.to_thread(gateway.store.get, "t")).engine == name


async def test_a_dead_engine_s_sessions_go_on_at_once_on_another(start, monkeypatch):
    monkeypatch.setattr(app_module, "_WATCH_EVERY_S", 0.05)
    gateway, a, b = await pair(start)
    name = await said(gateway, "s")
    dead, alive = (a, b) if name == a.name else (b, a)
    await dead.close()
    assert await said(gateway, "s", user("hi"), {"role": "assistant", "content": name}) == alive.name
    assert len(await asyncio.to_thread(gateway.store.path, "s")) == 4
    await gateway.until(lambda: states(gateway) == {alive.name: True, dead.name: False})
    assert (await gateway.get("/health"))["engines"] == {"all": 2, "answering": 1}
    await dead.start()
    await gateway.until(lambda: states(gateway)[dead.name])
    assert gateway.steward.fleet.find(dead.name).residency.total_tokens == 0, "it came back with an empty pool"
    assert await said(gateway, "s") == alive.name, "it stays where its cache is now"
    assert await gateway.verify() == []


async def test_a_refused_turn_is_tried_on_each_engine_once(start):
    gateway, a, b = await pair(start)
    a.inject(Fault(refuse=True))
    b.inject(Fault(refuse=True))
    answer = await gateway.chat(user("hi"), session="s")
    assert (answer["status"], answer["error"]["code"]) == (503, "engine_unavailable")
    assert len(a.requests) + len(b.requests) == 2
    assert await said(gateway, "s") in {a.name, b.name}
    assert [station.turns for station in gateway.steward.fleet.stations] == [0, 0]


async def test_a_refused_passthrough_is_tried_elsewhere_too(start):
    gateway, a, b = await pair(start, settings=Settings(mode="passthrough"))
    a.inject(Fault(refuse=True))
    assert await said(gateway, "s") == b.name
    assert [request.session_id for request in (*a.requests, *b.requests)] == [None, None]


async def test_a_stream_that_breaks_is_not_repeated_elsewhere(start):
    gateway, a, b = await pair(start)
    for one in (a, b):
        one.inject(Fault(die_after_chunks=2))
    async with gateway.http.post("/v1/chat/completions", json={"messages": [user("hi")], "stream": True}) as response:
        text = await response.text()
    assert '"error"' in text
    assert len(a.requests) + len(b.requests) == 1


async def test_draining_sends_sessions_away_and_lets_running_turns_end(start):
    gateway, a, b = await pair(start)
    a.inject(Fault(chunk_delay_s=0.2))
    running = asyncio.create_task(said(gateway, "s"))
    await gateway.until(lambda: gateway.steward.fleet.find(a.name).gate.pool.running == 1)
    status, shown = await post(gateway, "/v1/engines/drain", {"engine": f"{a.name}/v1"})
    assert (status, shown["state"], shown["turns"]) == (200, "draining", 1)
    assert await said(gateway, "t") == b.name
    assert await running == a.name
    assert await said(gateway, "s") == b.name
    assert (await post(gateway, "/v1/engines/drain", {"engine": b.name}))[0] == 200
    answer = await gateway.chat(user("hi"), session="s")
    assert answer["status"] == 503
    assert "2 drained" in answer["error"]["message"]
    assert (await post(gateway, "/v1/engines/undrain", {"engine": a.name}))[1]["state"] == "up"
    assert await said(gateway, "s") == a.name


async def test_those_who_wait_for_a_draining_engine_go_elsewhere(start):
    gateway, a, b = await pair(start)
    fleet = gateway.steward.fleet
    station = fleet.find(a.name)
    station.gate.resize(station.info.kv_capacity_tokens, 0)  # no slot: every turn waits
    fleet.bind("s", station)
    waiting = asyncio.create_task(said(gateway, "s"))
    await gateway.until(lambda: station.gate.pool.waiting == 1)
    await post(gateway, "/v1/engines/drain", {"engine": a.name})
    assert await waiting == b.name
    assert station.gate.pool.waiting == 0
    assert station.gate.pool.reserved_tokens == 0


async def test_a_session_is_moved_and_what_it_had_is_released(start):
    gateway, a, b = await pair(start)
    name = await said(gateway, "s")
    old, new = (a, b) if name == a.name else (b, a)
    assert old.pool.cached_blocks > 0
    status, moved = await post(gateway, "/v1/sessions/s/move", {"to": new.name + "/"})
    assert (status, moved) == (
        200,
        {"id": "s", "object": "session.moved", "moved": True, "from": old.name, "to": new.name},
    )
    await gateway.until(lambda: old.pool.cached_blocks == 0)
    assert await said(gateway, "s", user("hi"), {"role": "assistant", "content": name}) == new.name
    assert (await gateway.get("/v1/sessions/s"))["engine"] == new.name
    assert (await post(gateway, "/v1/sessions/s/move", {"to": new.name}))[1]["moved"] is False
    assert await gateway.verify() == []


async def test_a_session_is_not_moved_during_a_turn(start):
    gateway, a, b = await pair(start)
    gateway.steward.fleet.bind("s", gateway.steward.fleet.find(a.name))
    a.inject(Fault(chunk_delay_s=0.1))
    running = asyncio.create_task(said(gateway, "s"))
    await gateway.until(lambda: gateway.steward.fleet.busy("s") == 1)
    await gateway.until(lambda: len(a.requests) == 1)
    status, body = await post(gateway, "/v1/sessions/s/move", {"to": b.name})
    assert (status, body["error"]["code"]) == (409, "conflict")
    assert "running" in body["error"]["message"]
    status, body = await post(gateway, "/v1/sessions/s/move", {"to": b.name, "wait_s": 10})
    assert (status, body["moved"]) == (200, True)
    assert await running == a.name
    assert await said(gateway, "s") == b.name


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"to": "http://nowhere:9"}, 404, "not_found"),
        ({}, 400, "invalid_request"),
        ({"to": "http://b:2", "wait_s": "long"}, 400, "invalid_request"),
        ({"to": "http://b:2", "wait_s": 1e9}, 400, "invalid_request"),
    ],
)
async def test_a_wrong_move_is_refused_in_openai_s_shape(start, body, status, code):
    gateway, _, b = await pair(start)
    await said(gateway, "s")
    found, answer = await post(gateway, "/v1/sessions/s/move", body)
    assert (found, answer["error"]["code"]) == (status, code)
    assert answer["error"]["hint"]
    assert set(answer["error"]) >= {"message", "type", "param", "code"}
    assert (await post(gateway, "/v1/sessions/nope/move", {"to": b.name}))[0] == 404


async def test_no_session_is_moved_to_an_engine_that_cannot_take_it(start, monkeypatch):
    monkeypatch.setattr(app_module, "_WATCH_EVERY_S", 0.05)
    gateway, a, b = await pair(start)
    gateway.steward.fleet.bind("s", gateway.steward.fleet.find(a.name))
    await said(gateway, "s")
    await post(gateway, "/v1/engines/drain", {"engine": b.name})
    assert (await post(gateway, "/v1/sessions/s/move", {"to": b.name}))[0] == 409
    await post(gateway, "/v1/engines/undrain", {"engine": b.name})
    await b.close()
    await gateway.until(lambda: not states(gateway)[b.name])
    status, body = await post(gateway, "/v1/sessions/s/move", {"to": b.name})
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    assert await said(gateway, "s") == a.name


async def test_engines_are_listed_with_what_is_bound_to_them(start):
    gateway, a, b = await pair(start)
    for session in "stuv":
        await said(gateway, session)
    listed = (await gateway.get("/v1/engines"))["data"]
    assert [one["engine"] for one in listed] == [a.name, b.name]
    assert [one["sessions"] for one in listed] == [2, 2]
    assert {one["state"] for one in listed} == {"up"}
    assert all(one["free_tokens"] + one["resident_tokens"] == one["kv_capacity_tokens"] for one in listed)
    memory = await gateway.get("/v1/internal/memory")
    assert memory["kv_capacity_tokens"] == 2 * 16_384
    assert memory["resident_tokens"] == sum(one["resident_tokens"] for one in listed)


async def test_where_there_are_keys_only_an_admin_steers(start):
    tenants = {"k1": Tenant("t1"), "k2": Tenant("ops", admin=True)}
    gateway, a, b = await pair(start, settings=Settings(keys=tenants))
    user_key, admin = {"Authorization": "Bearer k1"}, {"Authorization": "Bearer k2"}
    name = (await gateway.chat(user("hi"), session="s", headers=user_key))["choices"][0]["message"]["content"]
    other = b.name if name == a.name else a.name
    async with gateway.http.get("/v1/engines", headers=user_key) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (403, "forbidden")
    assert (await post(gateway, "/v1/engines/drain", {"engine": a.name}, **user_key))[0] == 403
    assert (await post(gateway, "/v1/sessions/s/move", {"to": other}, **user_key))[0] == 403
    assert (await post(gateway, "/v1/sessions/s/move", {"to": other}, **admin))[0] == 404, "another tenant's"
    assert (await post(gateway, "/v1/sessions/s/move", {"to": other, "tenant": "t1"}, **admin))[0] == 200
    assert (await gateway.get("/v1/sessions/s", **user_key))["engine"] is None
    again = await gateway.chat(user("hi"), session="s", headers=user_key)
    assert again["choices"][0]["message"]["content"] == other


async def test_a_model_s_turns_go_to_an_engine_that_has_it(start):
    small, large = engine("http://a:1", model="small"), engine("http://b:2", model="large")
    gateway = await start(engine=[small, large])
    cards = await gateway.get("/v1/models")
    assert [card["id"] for card in cards["data"]] == ["small", "large"]
    for model, name in (("large", "http://b:2"), ("small", "http://a:1")):
        answer = await gateway.chat(user("hi"), session="s", model=model)
        assert answer["choices"][0]["message"]["content"] == name
    assert (await gateway.chat(user("hi"), model="none"))["status"] == 404
    assert (await post(gateway, "/v1/sessions/s/move", {"to": "http://a:1"}))[0] == 409, "it was made for 'large'"


async def test_an_engine_that_is_down_at_the_start_joins_later(start, monkeypatch):
    monkeypatch.setattr(app_module, "_WATCH_EVERY_S", 0.05)

    class Late(ScriptedEngine):
        late = True

        async def start(self):
            if self.late:
                await self.check_late()
            return await super().start()

        async def check_late(self):
            raise EngineUnavailableError("not yet")

        async def check(self):
            if self.late:
                await self.check_late()

    late = Late(ScriptedOptions(name="http://late:1"), answers=["late"])
    gateway = await start(engine=[late, engine("http://b:2")])
    assert await said(gateway, "s") == "http://b:2"
    assert states(gateway) == {"http://late:1": False, "http://b:2": True}
    late.late = False
    await gateway.until(lambda: states(gateway)["http://late:1"])
    assert await said(gateway, "t") == "late"


async def test_one_reachable_engine_is_enough_to_start_with(start):
    async with running_scripted(engine("a", imitates="vllm")) as url:
        dead, other = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        specs = [EngineSpec("auto", dead), EngineSpec("auto", url), EngineSpec("openai", other)]
        engines = await reached(specs, wait_s=0)
        assert [type(one).__name__ for one in engines] == ["VllmEngine", "VllmEngine", "OpenAIEngine"]
        gateway = await start(engine=engines)
        assert await said(gateway, "s") == "a"
        async with gateway.http.get("/metrics") as response:
            page = await response.text()
        assert f'kvsteward:engine_up{{engine="{url}"}} 1.0' in page
        assert f'kvsteward:engine_up{{engine="{dead}"}} 0.0' in page


async def test_no_reachable_engine_is_an_error():
    with pytest.raises(EngineUnavailableError):
        await reached([EngineSpec("auto", f"http://127.0.0.1:{free_port()}")], wait_s=0)


def test_one_slow_reading_does_not_send_sessions_away():
    fleet = Fleet([engine("http://a:1"), engine("http://b:2")], Limits(), lambda: 0.0)
    station = fleet.first
    for _ in range(FAILURES - 1):
        station.failed("slow", surely=False)
    assert station.up
    station.read(station.load)
    station.failed("slow", surely=False)
    assert station.up
    station.failed("refused", surely=True)
    assert not station.up


def test_whose_word_on_a_binding_counts():
    now = [0.0]
    a, b, c = (f"http://{name}:1" for name in "abc")
    fleet = Fleet([engine(a), engine(b), engine(c)], Limits(), lambda: now[0])
    assert fleet.binding("s", None) is None
    assert fleet.binding("s", a) == a
    fleet.bind("s", fleet.find(b), a)
    assert fleet.binding("s", a) == b, "a turn may have read its row before the session was moved"
    assert fleet.binding("s", None) == b
    assert fleet.binding("s", b) == b
    assert fleet.binding("s", c) == c, "another gateway has moved it"
    now[0] = ROW_IS_LATE_S
    fleet.bind("s", fleet.find(b), b)
    assert fleet.binding("s", b) == b
    assert fleet.binding("s", a) == a, "another gateway has moved it back"
    assert fleet.bound_to(fleet.find(b)) == 1


def test_an_engine_given_twice_is_refused():
    with pytest.raises(ConfigError):
        Fleet([engine("http://a:1"), engine("http://a:1")], Limits(), lambda: 0.0)
    with pytest.raises(ConfigError):
        Fleet([], Limits(), lambda: 0.0)


async def test_turns_of_a_session_are_counted_however_they_end(start):
    gateway, a, b = await pair(start)
    for one in (a, b):
        one.inject(Fault(hang_after_chunks=0))
    with pytest.raises(TimeoutError):
        await gateway.http.post(
            "/v1/chat/completions",
            json={"messages": [user("hi")]},
            headers={"X-Session-ID": "s"},
            timeout=aiohttp.ClientTimeout(total=0.5),
        )
    await gateway.until(lambda: gateway.steward.fleet.busy("s") == 0)
    assert [station.turns for station in gateway.steward.fleet.stations] == [0, 0]

"""Tenants whose prompts share no cache: what vLLM is told, on every way that a prompt takes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import replace

import pytest

from kvsteward.context.marks import Policy
from kvsteward.context.plan import PlanRules
from kvsteward.engines.http import HttpOptions
from kvsteward.engines.openai import OpenAIEngine
from kvsteward.engines.scripted import ScriptedEngine, ScriptedOptions
from kvsteward.engines.scripted_server import running_scripted
from kvsteward.engines.vllm import VllmEngine
from kvsteward.errors import ConfigError
from kvsteward.gateway.settings import Settings, Tenant, cache_salt_of, check_isolation, load_tenants

SECRET = "a secret of some length"
KEYS = {
    "k1": Tenant("one", cache_salt=cache_salt_of(SECRET.encode(), "one")),
    "k2": Tenant("two", cache_salt=cache_salt_of(SECRET.encode(), "two")),
    "k3": Tenant("three"),
}


def user(text):
    return {"role": "user", "content": text}


def key(name):
    return {"Authorization": f"Bearer {name}"}


@pytest.fixture
async def vllm():
    engine = ScriptedEngine(ScriptedOptions(hints=True), answers=lambda body: "ok")
    async with running_scripted(engine) as url:
        yield engine, VllmEngine(HttpOptions(url))


def salts(engine):
    return [json.loads(request.body).get("cache_salt") for request in engine.requests]


async def test_each_tenant_has_its_own_and_always_the_same(start, vllm):
    engine, adapter = vllm
    gateway = await start(engine=adapter, settings=Settings(keys=KEYS))
    for name in ("k1", "k2", "k1", "k3"):
        assert (await gateway.chat(user("hi"), headers=key(name)))["status"] == 200
    one, two, again, three = salts(engine)
    assert one == again == KEYS["k1"].cache_salt
    assert two == KEYS["k2"].cache_salt != one
    assert three is None, "only where it is asked for"
    assert re.fullmatch(r"[0-9a-f]{64}", one), "vLLM takes 128 characters, and no @, / or \\"


async def test_a_clients_own_salt_divides_further_and_never_joins_tenants(start, vllm):
    engine, adapter = vllm
    gateway = await start(engine=adapter, settings=Settings(keys=KEYS))
    for name, own in (("k1", "x"), ("k2", "x"), ("k1", "y"), ("k1", "x"), ("k3", "x")):
        await gateway.chat(user("hi"), headers=key(name), cache_salt=own)
    found = salts(engine)
    assert found[0] == hashlib.sha256(f"{KEYS['k1'].cache_salt}\nx".encode()).hexdigest()
    assert found[0] == found[3]
    assert len({*found[:3], KEYS["k1"].cache_salt}) == 4
    assert found[4] == "x", "as it was sent"


@pytest.mark.parametrize("stream", [True, False])
async def test_passed_through_too(start, vllm, stream):
    engine, adapter = vllm
    gateway = await start(engine=adapter, settings=Settings(keys=KEYS, mode="passthrough"))
    body = {"messages": [user("hi")], "stream": stream, "odd": {"kept": 1}}
    for name in ("k1", "k3"):
        async with gateway.http.post("/v1/chat/completions", json=body, headers=key(name)) as response:
            assert response.status == 200
            await response.read()
    sent = json.loads(engine.requests[0].body)
    assert sent["cache_salt"] == KEYS["k1"].cache_salt
    assert sent["odd"] == {"kept": 1}
    assert json.loads(engine.requests[1].body) == body


async def test_a_summary_is_asked_for_in_the_same_cache(start, vllm):
    engine, adapter = vllm
    settings = Settings(keys=KEYS, budget_tokens=2048, policy=Policy(summary="engine"))
    gateway = await start(engine=adapter, settings=settings)
    history = []
    for number in range(40):
        history.append(user(f"Entry {number}: " + "please file this note away for later. " * 6))
        answer = await gateway.chat(*history, session="s", headers=key("k1"), max_tokens=60)
        history.append(answer["choices"][0]["message"])
        await gateway.until(lambda: gateway.steward.scribe.running == 0)
    asked = [r for r in engine.requests if r.request_id.endswith("-summary")]
    assert asked
    assert set(salts(engine)) == {KEYS["k1"].cache_salt}


async def test_questions_to_the_model_are_asked_in_the_same_cache(start, vllm):
    engine, adapter = vllm
    policy = Policy(summary="extractive", prose="engine", plan=PlanRules(unsure="engine"), tool_limit_tokens=200)
    gateway = await start(engine=adapter, settings=Settings(keys=KEYS, budget_tokens=2048, policy=policy))
    call = {"id": "c", "type": "function", "function": {"name": "report", "arguments": "{}"}}
    told = "The water flows down to the sea as it always does, and people walk along it in the sun. " * 30
    history = [
        user("What is new?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": told},
    ]
    for number in range(40):
        answer = await gateway.chat(*history, session="s", headers=key("k1"), max_tokens=60)
        history.append(answer["choices"][0]["message"])
        history.append(user(f"Ideally entry {number} is short. " + "File this note away for later. " * 6))
        await gateway.until(lambda: gateway.steward.sorter.running == 0)
        asked = {r.request_id.rpartition("-")[2] for r in engine.requests} & {"prose", "class"}
        if len(asked) == 2:
            break
    assert asked == {"prose", "class"}
    assert set(salts(engine)) == {KEYS["k1"].cache_salt}


async def test_a_release_names_the_cache_that_the_turns_were_in(start, vllm):
    engine, adapter = vllm
    gateway = await start(engine=adapter, settings=Settings(keys=KEYS))
    for name in ("k1", "k3"):
        await gateway.chat(user("hi"), session="s", headers=key(name))
        async with gateway.http.delete("/v1/sessions/s", headers=key(name)) as response:
            assert response.status == 200
    assert [note for note in engine.notes if note[1] == "release"] == [
        ("one/s", "release", {"moved": False, "cache_salt": KEYS["k1"].cache_salt}),
        ("three/s", "release", {"moved": False}),
    ]


def test_the_file_and_the_secret(tmp_path):
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants:\n  a: {api_key: x, isolate_cache: true}\n  b: {api_key: y}\n")
    first, second = load_tenants(path, SECRET), load_tenants(path, SECRET)
    assert first["x"].cache_salt == second["x"].cache_salt == cache_salt_of(SECRET.encode(), "a")
    assert first["y"].cache_salt is None
    assert load_tenants(path)["x"].cache_salt != load_tenants(path)["x"].cache_salt, "made anew"
    assert first["x"].cache_salt not in repr(first["x"])
    path.write_text("isolate_cache: true\ntenants:\n  a: {api_key: x, isolate_cache: false}\n  b: {api_key: y}\n")
    keys = load_tenants(path, SECRET)
    assert (keys["x"].cache_salt, keys["y"].cache_salt) == (None, cache_salt_of(SECRET.encode(), "b"))


@pytest.mark.parametrize(
    ("text", "secret", "words"),
    [
        ("tenants:\n  a: {api_key: x, isolate_cache: maybe}\n", SECRET, "tenant 'a': isolate_cache"),
        ("isolate_cache: 1\ntenants:\n  a: {api_key: x}\n", SECRET, "isolate_cache must be true or false"),
        ("tenants:\n  a: {api_key: x}\n", "short", "16 characters"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, text, secret, words):
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_tenants(tmp_path / "t.yaml", secret)


async def test_an_engine_that_cannot_is_refused(start):
    plain, isolating = OpenAIEngine(HttpOptions("http://127.0.0.1:1")), VllmEngine(HttpOptions("http://127.0.0.1:2"))
    check_isolation(Settings(keys=KEYS), [isolating])
    check_isolation(Settings(keys={"k3": KEYS["k3"]}), [plain])
    with pytest.raises(ConfigError, match="tenant 'one'"):
        check_isolation(Settings(keys=KEYS), [isolating, plain])
    settings = replace(Settings(), keys=KEYS)
    gateway = await start()
    gateway.steward.settings = settings
    with pytest.raises(ConfigError, match="cannot keep prompts apart"):
        await asyncio.wait_for(gateway.steward.start(), 5)

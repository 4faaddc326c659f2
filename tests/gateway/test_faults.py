"""Bad input and engines that fail: a clear error of the right status, and no logged message is lost."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvsteward.engines.scripted import Fault
from kvsteward.errors import StoreError
from kvsteward.gateway.settings import Settings, Tenant
from kvsteward.policy.admission import Limits


def user(text):
    return {"role": "user", "content": text}


async def post(gateway, data, path="/v1/chat/completions", **headers):
    async with gateway.http.post(path, data=data, headers=headers) as response:
        body = await response.json()
        assert response.headers["content-type"].startswith("application/json")
        return response.status, body["error"], response.headers


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{nope", 400, "invalid_request"),
        (b"[]", 400, "invalid_request"),
        (b'{"messages": 5}', 400, "invalid_request"),
        (b'{"messages": [{"role":"user","content":"hi"}], "model": "nope"}', 404, "not_found"),
        (b'{"messages": [{"role":"tool","content":"x","tool_call_id":"c9"}]}', 400, "invalid_request"),
        (
            b'{"messages": [{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]}',
            400,
            "unsupported",
        ),
        (b'{"messages": [{"role":"system","content":"' + b"rule " * 20_000 + b'"}]}', 400, "context_length_exceeded"),
        (b"\xff\xfe", 400, "invalid_request"),
    ],
    ids=["json", "list", "type", "model", "orphan", "image", "too long", "bytes"],
)
async def test_bad_requests(start, body, status, code):
    gateway = await start()
    found, error, headers = await post(gateway, body)
    assert (found, error["code"]) == (status, code)
    assert error["hint"]
    assert error["request_id"] == headers["X-Request-Id"]
    assert "Traceback" not in json.dumps(error)
    assert (await gateway.chat(user("hi")))["status"] == 200, "the next request works"


async def test_a_huge_body_is_refused_before_it_is_read(start):
    gateway = await start(settings=Settings(max_body_bytes=10_000))
    status, error, _ = await post(gateway, b" " * 20_000)
    assert (status, error["code"]) == (413, "body_too_large")

    async def endless():
        for _ in range(100):
            yield b" " * 1_000

    status, error, _ = await post(gateway, endless())
    assert status == 413


async def test_unknown_places(start):
    gateway = await start()
    for path in ("/v1/sessions/nope", "/v1/sessions/nope/log", "/nowhere", "/v1/sessions/nope/items/abcdef0123"):
        async with gateway.http.get(path) as response:
            assert response.status == 404
            assert (await response.json())["error"]["hint"]
    async with gateway.http.get("/v1/chat/completions") as response:
        assert response.status in {404, 405}
    async with gateway.http.delete("/v1/sessions/nope") as response:
        assert response.status == 404
    async with gateway.http.post("/v1/sessions", json={"ttl_s": "long"}) as response:
        assert response.status == 400


async def test_what_was_said_is_kept_although_it_did_not_fit(start):
    gateway = await start(context_limit_tokens=512, kv_capacity_tokens=1024)
    answer = await gateway.chat({"role": "system", "content": "rule " * 5_000}, user("my id is 4711"), session="s")
    assert answer["status"] == 400
    log = await gateway.get("/v1/sessions/s/log")
    assert log["data"][-1]["message"]["content"] == "my id is 4711"


async def test_engine_down(start):
    gateway = await start()
    gateway.engine.inject(Fault(refuse=True))
    answer = await gateway.chat(user("hi"), session="s")
    assert (answer["status"], answer["error"]["code"]) == (503, "engine_unavailable")
    log = await gateway.get("/v1/sessions/s/log")
    assert [e["message"]["content"] for e in log["data"]] == ["hi"]
    assert (await gateway.get("/v1/sessions/s"))["state"] == "idle"
    again = await gateway.chat(user("hi"), session="s")
    assert again["status"] == 200
    assert await gateway.verify() == []


async def test_engine_error_keeps_its_status_and_words(start):
    gateway = await start()
    gateway.engine.inject(Fault(status=429))
    answer = await gateway.chat(user("hi"))
    assert answer["status"] == 429
    assert answer["error"]["message"]


@pytest.mark.parametrize("fault", [Fault(die_after_chunks=2), Fault(malform_after_chunks=2, die_after_chunks=4)])
async def test_engine_dies_in_the_middle_of_a_stream(start, fault):
    gateway = await start(answers=["one two three four five six", "fine"])
    gateway.engine.inject(fault)
    body = {"messages": [user("hi")], "stream": True}
    async with gateway.http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": "s"}) as response:
        assert response.status == 200
        text = await response.text()
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "engine_error"
    log = (await gateway.get("/v1/sessions/s/log"))["data"]
    assert log[0]["message"]["content"] == "hi"
    assert log[-1]["finish"] == "error"
    assert await gateway.verify() == []
    assert (await gateway.chat(user("hi"), session="s"))["status"] == 200


async def test_engine_dies_before_a_whole_answer(start):
    gateway = await start(answers=["one two three four"])
    gateway.engine.inject(Fault(die_after_chunks=0))
    answer = await gateway.chat(user("hi"))
    assert answer["status"] == 502


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("imitates", ["vllm", "llama-server"])
async def test_a_client_that_leaves_frees_the_engine(start, stream, imitates):
    gateway = await start(answers=["word " * 5_000], decode_tokens_per_s=50, imitates=imitates)
    body = {"messages": [user("hi")], "stream": stream}
    request = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": "s"}))
    await gateway.until(lambda: bool(gateway.engine.active_sessions()))
    await asyncio.sleep(0.2)
    if stream:
        (await request).close()
    else:
        request.cancel()
    await gateway.until(lambda: not gateway.engine.active_sessions(), within_s=1.0)
    await gateway.until(lambda: gateway.steward.fleet.first.gate.pool.running == 0)
    gateway.engine.pool.check_integrity()
    counted = b'kvsteward:turns_total{outcome="abandoned"} 1.0'
    await gateway.until(lambda: counted in gateway.steward.telemetry.text())
    assert (await gateway.get("/v1/sessions/s"))["state"] == "idle"
    if stream or imitates == "llama-server":
        log = (await gateway.get("/v1/sessions/s/log"))["data"]
        assert log[-1]["finish"] == "abandoned"
        session = await gateway.get("/v1/sessions/s")
        assert session["tokens_in_view"] > 0
        assert session["tokens_saved"] == 0


async def test_a_client_that_leaves_the_queue_leaves_no_trace(start):
    gateway = await start(
        answers=["word " * 100, "late"], decode_tokens_per_s=100, kv_capacity_tokens=512, context_limit_tokens=512
    )
    first = asyncio.create_task(gateway.chat(user("a"), session="a", max_tokens=200))
    await gateway.until(lambda: gateway.steward.fleet.first.gate.pool.running == 1)
    second = asyncio.create_task(gateway.chat(user("b"), session="b", max_tokens=400))
    await gateway.until(lambda: gateway.steward.fleet.first.gate.pool.waiting == 1)
    second.cancel()
    await gateway.until(lambda: gateway.steward.fleet.first.gate.pool.waiting == 0)
    assert (await first)["status"] == 200
    assert gateway.steward.fleet.first.gate.pool.reserved_tokens == 0


async def test_a_zombie_is_counted(start):
    gateway = await start(answers=["word " * 400], decode_tokens_per_s=100, settings=Settings(release_within_s=0.3))
    gateway.engine.inject(Fault(zombie=True))
    body = {"messages": [user("hi")], "stream": True}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    response.close()
    await gateway.until(lambda: b"unreleased_requests_total 1.0" in gateway.steward.telemetry.text())


async def test_a_full_queue_says_when_to_come_back(start):
    gateway = await start(
        answers=["word " * 300],
        decode_tokens_per_s=100,
        kv_capacity_tokens=512,
        context_limit_tokens=512,
        settings=Settings(limits=Limits(max_waiting=0)),
    )
    first = asyncio.create_task(gateway.chat(user("a"), session="a", max_tokens=300))
    await gateway.until(lambda: gateway.steward.fleet.first.gate.pool.running == 1)
    answer = await gateway.chat(user("b"), session="b", max_tokens=300)
    assert (answer["status"], answer["error"]["code"]) == (503, "overloaded")
    assert int(answer["headers"]["Retry-After"]) >= 1
    first.cancel()


async def test_turns_wait_for_room_and_never_pass_the_pool(start):
    gateway = await start(
        answers=lambda body: "word " * 20,
        decode_tokens_per_s=2_000,
        kv_capacity_tokens=1024,
        context_limit_tokens=512,
    )
    answers = await asyncio.gather(
        *(gateway.chat(user(f"question {n} " * 20), session=f"s{n}", max_tokens=100) for n in range(30))
    )
    assert {a["status"] for a in answers} == {200}
    assert gateway.engine.preemptions_total == 0
    assert gateway.steward.fleet.first.gate.pool.reserved_tokens == 0
    assert await gateway.verify() == []


async def test_a_full_disk_is_told_and_nothing_is_sent_to_the_engine(start, monkeypatch):
    gateway = await start()
    await gateway.chat(user("hi"), session="s")
    before = len(gateway.engine.requests)

    def full(*_args, **_kwargs):
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "amend", full)
        answer = await gateway.chat(user("hi"), {"role": "assistant", "content": "ok"}, user("more"), session="s")
    assert (answer["status"], answer["error"]["code"]) == (507, "store_error")
    assert len(gateway.engine.requests) == before
    again = await gateway.chat(user("hi"), {"role": "assistant", "content": "ok"}, user("more"), session="s")
    assert again["status"] == 200


async def test_a_fault_of_ours_is_no_bare_500(start, monkeypatch):
    gateway = await start()
    monkeypatch.setattr(gateway.steward.desk, "resolve", None)
    answer = await gateway.chat(user("hi"))
    assert answer["status"] == 500
    assert answer["error"]["hint"]
    assert "TypeError" in answer["error"]["message"]


async def test_tenants_and_keys(start):
    keys = {"k1": Tenant("one"), "k2": Tenant("two", budget_tokens=1024)}
    gateway = await start(settings=Settings(keys=keys))
    assert (await gateway.chat(user("hi")))["status"] == 401
    assert (await gateway.chat(user("hi"), headers={"Authorization": "Bearer wrong"}))["status"] == 401
    one, two = {"Authorization": "Bearer k1"}, {"x-api-key": "k2"}
    assert (await gateway.chat(user("secret of one"), session="s", headers=one))["status"] == 200
    assert (await gateway.chat(user("secret of two"), session="s", headers=two))["status"] == 200
    async with gateway.http.get("/v1/sessions/s/log", headers=two) as response:
        log = await response.json()
    assert [e["message"]["content"] for e in log["data"]] == ["secret of two", "ok"]
    async with gateway.http.get("/v1/sessions", headers=one) as response:
        assert [s["id"] for s in (await response.json())["data"]] == ["s"]


async def test_pages_of_other_sites_are_kept_out_where_there_are_no_keys(start):
    gateway = await start()
    foreign = await gateway.chat(user("hi"), headers={"Origin": "https://evil.example"})
    assert (foreign["status"], foreign["error"]["code"]) == (403, "foreign_origin")
    assert (await gateway.chat(user("hi"), headers={"Origin": gateway.url}))["status"] == 200
    with_keys = await start(settings=Settings(keys={"k": Tenant("one")}), store="memory:")
    allowed = {"Origin": "https://app.example", "Authorization": "Bearer k"}
    assert (await with_keys.chat(user("hi"), headers=allowed))["status"] == 200


async def test_nothing_is_saved_where_nothing_was_left_out(start):
    gateway = await start(answers=["fine " * 40])
    answer = await gateway.chat(user("hello " * 200), session="s")
    assert answer["headers"]["X-KVSteward-Tokens-Saved"] == "0"
    assert (await gateway.get("/v1/sessions/s"))["tokens_saved"] == 0


async def test_an_expired_session_gives_back_its_kv_and_keeps_its_log(start):
    gateway = await start(settings=Settings(ttl_s=0.05))
    await gateway.chat(user("my id is 4711"), session="s")
    await asyncio.sleep(0.1)
    assert await gateway.steward.sweep() == 1
    session = await gateway.get("/v1/sessions/s")
    assert (session["state"], session["tokens_resident"]) == ("expired", 0)
    assert gateway.engine.pool.used_blocks == 0
    again = await gateway.chat(
        user("my id is 4711"), {"role": "assistant", "content": "ok"}, user("go on"), session="s"
    )
    assert again["status"] == 200
    assert (await gateway.get("/v1/sessions/s"))["state"] == "idle"


async def test_delete_wipes_for_good(start):
    gateway = await start()
    await gateway.chat(user("my id is 4711"), session="s")
    async with gateway.http.delete("/v1/sessions/s") as response:
        assert (await response.json())["deleted"] is True
    assert (await gateway.get("/v1/sessions"))["data"] == []
    async with gateway.http.get("/v1/sessions/s/log") as response:
        assert response.status == 404


async def test_the_account(start):
    gateway = await start(kv_capacity_tokens=4096, context_limit_tokens=2048, block_tokens=16)
    await gateway.chat(user("hello " * 100), session="s")
    memory = await gateway.get("/v1/internal/memory")
    assert {"gpu_memory_utilization", "num_blocks_used", "num_blocks_total", "block_size", "kv_cache_usage"} <= set(
        memory
    )
    assert memory["num_blocks_total"] == 256
    assert memory["block_size"] == 16
    (session,) = memory["sessions"]
    assert session["tokens_resident"] > 100
    assert set(session) >= {"tokens_in_view", "tokens_in_log", "tokens_saved"}
    async with gateway.http.get("/metrics") as response:
        text = await response.text()
    assert 'kvsteward:session_tokens_bucket{le="1024.0"} 1.0' in text
    assert 'kvsteward:session_tokens_bucket{le="2048.0"} 1.0' in text
    async with gateway.http.get("/health") as response:
        assert response.status == 200

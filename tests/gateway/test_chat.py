"""Turns through the gateway, as clients see them."""

from __future__ import annotations

import json

import openai
import pytest

from kvsteward.engines.scripted import Answer, Fault, ToolCall
from kvsteward.gateway.settings import Settings, Tenant

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def user(text):
    return {"role": "user", "content": text}


async def test_a_turn_and_what_is_said_about_it(start):
    gateway = await start(answers=["Hello there"])
    answer = await gateway.chat(user("hi"), session="s1", headers={"X-Request-Id": "req-7"})
    assert answer["status"] == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hello there"}
    assert answer["headers"]["X-KVSteward-Session"] == "s1"
    assert answer["headers"]["X-Request-Id"] == "req-7"
    assert int(answer["headers"]["X-KVSteward-Tokens-In-View"]) > 0
    session = await gateway.get("/v1/sessions/s1")
    assert session["turns"] == 1
    assert session["state"] == "idle"
    assert session["tokens_resident"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


async def test_the_openai_sdk_unmodified(start):
    gateway = await start(answers=["one two three", Answer(tool_calls=(ToolCall("look", '{"x":1}'),)), "done"])
    client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none")
    try:
        plain = await client.chat.completions.create(model="scripted", messages=[user("hi")])
        assert plain.choices[0].message.content == "one two three"
        stream = await client.chat.completions.create(model="scripted", messages=[user("go")], tools=TOOLS, stream=True)
        fragments = [c async for c in stream]
        assert all(c.choices for c in fragments), "no usage chunk that was not asked for"
        calls = [d for c in fragments for d in (c.choices[0].delta.tool_calls or [])]
        assert "".join(c.function.arguments or "" for c in calls) == '{"x":1}'
        stream = await client.chat.completions.create(
            model="scripted", messages=[user("hi")], stream=True, stream_options={"include_usage": True}
        )
        last = [c async for c in stream][-1]
        assert last.choices == []
        assert last.usage.prompt_tokens > 0
        models = await client.models.list()
        assert [m.id for m in models.data] == ["scripted"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="gpt-17", messages=[user("hi")])
    finally:
        await client.close()


async def test_unknown_fields_reach_the_engine_and_own_ones_do_not(start):
    gateway = await start()
    await gateway.chat(user("hi"), session_id="s", temperature=0.25, vllm_xargs={"a": 1}, x_unknown=[None])
    sent = json.loads(gateway.engine.requests[-1].body)
    assert sent["temperature"] == 0.25
    assert sent["vllm_xargs"] == {"a": 1}
    assert sent["x_unknown"] == [None]
    assert "session_id" not in sent


async def test_an_engine_that_cannot_stop_is_always_streamed(start):
    """llama-server goes on with a request that is not streamed after its client has left."""
    calls = Answer("hm", tool_calls=(ToolCall("look", "{}"),))
    gateway = await start(imitates="llama-server", answers=[calls])
    answer = await gateway.chat(user("hi"), session="s", tools=TOOLS)
    assert json.loads(gateway.engine.requests[-1].body)["stream"] is True
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["prompt_tokens"] > 0


async def test_history_is_found_by_its_fingerprint(start):
    gateway = await start(answers=["first", "second"])
    one = await gateway.chat(user("hi"))
    history = [user("hi"), {"role": "assistant", "content": "first", "refusal": None}]
    two = await gateway.chat(*history, user("and?"))
    session = one["headers"]["X-KVSteward-Session"]
    assert two["headers"]["X-KVSteward-Session"] == session
    log = await gateway.get(f"/v1/sessions/{session}/log")
    assert [e["message"]["content"] for e in log["data"]] == ["hi", "first", "and?", "second"]
    assert [e["source"] for e in log["data"]] == ["client", "engine", "client", "engine"]


async def test_two_sessions_that_begin_alike_are_two(start):
    gateway = await start(answers=["same", "same"])
    one, two = await gateway.chat(user("hi")), await gateway.chat(user("hi"))
    assert one["headers"]["X-KVSteward-Session"] != two["headers"]["X-KVSteward-Session"]


async def test_an_edited_history_makes_a_branch_and_the_first_stays(start):
    gateway = await start(answers=["a1", "a2", "b2"])
    await gateway.chat(user("q1"), session="s")
    first = [user("q1"), {"role": "assistant", "content": "a1"}]
    await gateway.chat(*first, user("q2"), session="s")
    old_head = (await gateway.get("/v1/sessions/s"))["head"]
    await gateway.chat(*first, user("q2, put otherwise"), session="s")
    log = await gateway.get("/v1/sessions/s/log")
    assert [e["message"]["content"] for e in log["data"]] == ["q1", "a1", "q2, put otherwise", "b2"]
    log = await gateway.get(f"/v1/sessions/s/log?head={old_head}")
    assert [e["message"]["content"] for e in log["data"]] == ["q1", "a1", "q2", "a2"]
    assert await gateway.verify() == []


async def test_all_branches_are_read_page_by_page(start):
    keys = {"k1": Tenant("a"), "k2": Tenant("b")}
    gateway = await start(answers=["a1", "a2", "b2"], settings=Settings(keys=keys))
    own, other = ({"Authorization": f"Bearer {key}"} for key in keys)
    first = [user("q1"), {"role": "assistant", "content": "a1"}]
    for messages in (first[:1], [*first, user("q2")], [*first, user("put otherwise")]):
        await gateway.chat(*messages, session="s", headers=own)
    path = "/v1/sessions/s/log?branches=all"
    whole = (await gateway.get(path, **own))["data"]
    assert [e["message"]["content"] for e in whole] == ["q1", "a1", "q2", "a2", "put otherwise", "b2"]
    assert whole[4]["parent"] == whole[2]["parent"] == whole[1]["hash"]
    assert (await gateway.get(f"{path}&offset=2&limit=3", **own))["data"] == whole[2:5]
    assert (await gateway.get(f"{path}&offset=1e99&limit=1e99", **own))["data"] == []
    assert (await gateway.get(f"{path}&offset=-1&limit=0", **own))["data"] == whole[:1]
    for wrong, param in (
        (f"{path}&offset=nan", "offset"),
        (f"{path}&limit=x", "limit"),
        ("/v1/internal/history?after=NaN", "after"),
        (f"{path[:-3]}two", "branches"),
    ):
        assert (await gateway.get(wrong, **own))["error"]["param"] == param
    assert (await gateway.get(path, **other))["error"]["type"] == "not_found_error"


async def test_a_branch_of_an_anonymous_history_is_a_session_of_its_own(start):
    gateway = await start(answers=["a1", "a2", "b2"])
    one = await gateway.chat(user("q1"))
    first = [user("q1"), {"role": "assistant", "content": "a1"}]
    await gateway.chat(*first, user("q2"))
    other = await gateway.chat(*first, user("something else"))
    session = other["headers"]["X-KVSteward-Session"]
    assert session != one["headers"]["X-KVSteward-Session"]
    described = await gateway.get(f"/v1/sessions/{session}")
    assert described["branched_from"] == one["headers"]["X-KVSteward-Session"]
    log = await gateway.get(f"/v1/sessions/{session}/log")
    assert [e["message"]["content"] for e in log["data"]] == ["q1", "a1", "something else", "b2"]


async def test_a_repeated_request_stays_in_its_session(start):
    gateway = await start(answers=["a1", "a2", "a2 again"])
    one = await gateway.chat(user("q1"))
    history = [user("q1"), {"role": "assistant", "content": "a1"}, user("q2")]
    await gateway.chat(*history)
    again = await gateway.chat(*history)
    assert again["headers"]["X-KVSteward-Session"] == one["headers"]["X-KVSteward-Session"]
    assert await gateway.verify() == []


async def test_previous_response_id_needs_only_what_is_new(start):
    gateway = await start(answers=["a1", "a2"])
    one = await gateway.chat(user("my number is 4711"))
    two = await gateway.chat(user("what was it?"), previous_response_id=one["id"])
    assert two["headers"]["X-KVSteward-Session"] == one["headers"]["X-KVSteward-Session"]
    sent = json.loads(gateway.engine.requests[-1].body)
    assert [m["content"] for m in sent["messages"]] == ["my number is 4711", "a1", "what was it?"]
    assert "previous_response_id" not in sent
    unknown = await gateway.chat(user("x"), previous_response_id="chatcmpl-nope")
    assert unknown["status"] == 404


async def test_the_simple_session_api(start):
    gateway = await start(answers=["a1", "a2"])
    async with gateway.http.post("/create_session", json={"system": "Be brief."}) as response:
        session = (await response.json())["session_id"]
    for question, said in (("q1", "a1"), ("q2", "a2")):
        async with gateway.http.post("/chat", json={"session_id": session, "message": question}) as response:
            answer = await response.json()
        assert (answer["session_id"], answer["message"]) == (session, said)
    sent = json.loads(gateway.engine.requests[-1].body)
    assert [m["content"] for m in sent["messages"]] == ["Be brief.", "q1", "a1", "q2"]
    async with gateway.http.post("/chat", json={"session_id": session, "message": "q3", "stream": True}) as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")
    async with gateway.http.post("/chat", json={"session_id": "nope", "message": "q"}) as response:
        assert response.status == 404


async def test_passthrough_leaves_everything_alone(start):
    gateway = await start(context_limit_tokens=512, kv_capacity_tokens=512)
    long = "words " * 1000
    answer = await gateway.chat(user(long), headers={"X-KVSteward-Mode": "passthrough"})
    assert answer["status"] == 400, "the engine's own error"
    assert json.loads(gateway.engine.requests[-1].body)["messages"][0]["content"] == long
    assert (await gateway.get("/v1/sessions"))["data"] == []
    assert (await gateway.chat(user(long)))["status"] == 200
    assert (await gateway.chat(user("x"), headers={"X-KVSteward-Mode": "bogus"}))["status"] == 400


async def test_passthrough_by_deployment_and_back_by_request(start):
    gateway = await start(settings=Settings(mode="passthrough"))
    assert "X-KVSteward-Session" not in (await gateway.chat(user("hi")))["headers"]
    assert "X-KVSteward-Session" in (await gateway.chat(user("hi"), headers={"X-KVSteward-Mode": "managed"}))["headers"]


async def test_a_hundred_turns_in_a_small_budget(start):
    """The engine has 1,024 tokens for a session, whose history grows to many times as much."""
    gateway = await start(
        context_limit_tokens=1024, kv_capacity_tokens=2048, answers=lambda body: f"noted {len(body['messages'])}"
    )
    history = [{"role": "system", "content": "Keep the books."}]
    for turn in range(100):
        history.append(user(f"Invoice INV-{turn:05d} over {turn * 13 + 100} EUR. " + "Please file it. " * 5))
        answer = await gateway.chat(*history, session="books", max_tokens=60)
        assert answer["status"] == 200, answer
        assert answer["usage"]["total_tokens"] <= 1024
        history.append(answer["choices"][0]["message"])
    session = await gateway.get("/v1/sessions/books")
    assert session["tokens_in_log"] > 3 * 1024
    assert session["tokens_saved"] > 0
    assert session["tokens_in_log"] >= session["tokens_in_view"] + session["tokens_saved"]
    log = await gateway.get("/v1/sessions/books/log")
    assert [e["message"] for e in log["data"]] == history, "nothing that was said is lost"
    view = await gateway.get("/v1/sessions/books/view")
    stub = next(m["content"] for m in view["messages"] if "condensed" in str(m["content"]))
    hashes = [word for word in stub.split() if len(word) == 8 and all(c in "0123456789abcdef" for c in word)]
    item = await gateway.get(f"/v1/sessions/books/items/{hashes[0]}")
    assert item["message"] in history
    found = await gateway.get("/v1/sessions/books/log?q=INV-00003")
    assert found["data"][0]["message"] == history[7]
    assert await gateway.verify() == []
    gateway.engine.pool.check_integrity()


async def test_the_view_is_the_same_after_a_restart(start, tmp_path):
    gateway = await start(context_limit_tokens=1024, kv_capacity_tokens=2048)
    history = []
    for turn in range(40):
        history.append(user(f"Invoice INV-{turn:05d}. " + "Please file it. " * 5))
        answer = await gateway.chat(*history, session="books", max_tokens=60)
        history.append(answer["choices"][0]["message"])
    before = await gateway.get("/v1/sessions/books/view")
    gateway.steward.desk.forget("books")
    after = await gateway.get("/v1/sessions/books/view")
    assert after["messages"] == before["messages"]
    assert after["dropped_messages"] > 0


async def test_an_engine_that_finds_the_prompt_too_long_gets_a_shorter_one(start):
    """The estimate was wrong and the engine cannot count: it answers with its overflow error, once."""
    gateway = await start(context_limit_tokens=2048, kv_capacity_tokens=4096)
    history = []
    for turn in range(8):
        history += [user(f"{turn} " + "words " * 60), {"role": "assistant", "content": "ok"}]
    await gateway.chat(*history, user("go on"), session="s")
    overflow = Fault(status=400)
    body = {"error": {"message": "This model's maximum context length is 2048 tokens.", "type": "BadRequestError"}}
    gateway.engine.inject(overflow)
    original = gateway.engine._refuse
    gateway.engine._refuse = lambda *a: original(400, "BadRequestError", body["error"]["message"])
    answer = await gateway.chat(*history, user("go on"), user("really"), session="s")
    gateway.engine._refuse = original
    assert answer["status"] == 200
    view = await gateway.get("/v1/sessions/s/view")
    assert view["dropped_messages"] > 0

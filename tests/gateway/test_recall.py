"""Recall through the gateway: what left the view comes back, and the client sees nothing of how."""

from __future__ import annotations

import json

import openai
import pytest

from kvsteward.engines.scripted import Answer, Fault, ToolCall
from kvsteward.gateway.settings import Settings

ON = Settings(recall=True)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
SMALL = {"context_limit_tokens": 2048, "kv_capacity_tokens": 4096}


def user(text):
    return {"role": "user", "content": text}


def sent(gateway, index=-1):
    return json.loads(gateway.engine.requests[index].body)


def recall(**arguments):
    return Answer(tool_calls=(ToolCall("kvsteward_recall", json.dumps(arguments)),))


class Looking:
    """A model that looks a thing up before it answers, in one turn."""

    def __init__(self, *asks, then="The code is {}.", text=""):
        self.asks, self.then, self.text = list(asks), then, text
        self.on = False

    def __call__(self, body):
        results = [m["content"] for m in body["messages"] if m["role"] == "tool"]
        if not self.on:
            return "noted"
        if len(results) < len(self.asks):
            return Answer(self.text, tool_calls=recall(**self.asks[len(results)]).tool_calls)
        return self.then.format(results[-1])


async def long_session(gateway, turns=80, needle=2):
    """A session in which a code is told early and is long gone from the view."""
    history = []
    for turn in range(turns):
        told = "The vault's code is QX-4711-77, the guard is Ms Okonkwo. " if turn == needle else ""
        history.append(user(f"{told}Entry {turn}: " + "please file this note away for later. " * 6))
        answer = await gateway.chat(*history, session="s", max_tokens=100)
        assert answer["status"] == 200, answer
        history.append(answer["choices"][0]["message"])
    return history


@pytest.mark.parametrize("stream", [True, False])
async def test_a_value_of_eighty_turns_ago_is_found(start, stream):
    model = Looking({"query": "vault code guard"})
    gateway = await start(settings=ON, answers=model, **SMALL)
    history = await long_session(gateway)
    model.on = True
    client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", default_headers={"X-Session-ID": "s"})
    try:
        messages = [*history, user("What was the vault's code?")]
        if stream:
            chunks = [
                c
                async for c in await client.chat.completions.create(
                    model="scripted", messages=messages, stream=True, max_tokens=100,
                    stream_options={"include_usage": True},
                )
            ]  # fmt: skip
            said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert not any(c.choices and c.choices[0].delta.tool_calls for c in chunks)
            assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
            assert len({c.id for c in chunks}) == 1
            usage = chunks[-1].usage
            assert "kvsteward_recall" not in "".join(c.model_dump_json() for c in chunks)
        else:
            answer = await client.chat.completions.create(model="scripted", messages=messages, max_tokens=100)
            said, usage = answer.choices[0].message.content, answer.usage
            assert answer.choices[0].finish_reason == "stop"
            assert "kvsteward_recall" not in answer.model_dump_json()
    finally:
        await client.close()
    assert "QX-4711-77" in said
    first, second = sent(gateway, -2), sent(gateway)
    assert second["messages"][: len(first["messages"])] == first["messages"], "the cached prefix goes on"
    assert second["messages"][-2]["tool_calls"][0]["function"]["name"] == "kvsteward_recall"
    assert [t["function"]["name"] for t in second["tools"]] == ["kvsteward_recall"]
    count = gateway.engine.count_prompt_tokens
    assert usage.prompt_tokens == await count(first) + await count(second), "usage is summed"
    # The client's history still matches: the next turn is the same session, and the look-up is not in its chain.
    model.on = False
    log = (await gateway.get("/v1/sessions/s/log"))["data"]
    assert [e["message"]["role"] for e in log[-2:]] == ["user", "assistant"]
    assert log[-1]["message"]["content"] == said
    again = await gateway.chat(*messages, {"role": "assistant", "content": said}, user("Thanks"))
    assert again["headers"]["X-KVSteward-Session"] == "s"
    assert len((await gateway.get("/v1/sessions/s/log"))["data"]) == len(log) + 2
    # The operator sees it.
    view = await gateway.get("/v1/sessions/s/view")
    (decision,) = [d for d in view["decisions"] if d["kind"] == "recall"]
    assert decision["at"] == log[-2]["hash"]
    assert "QX-4711-77" in decision["payload"]["text"]
    assert json.loads(decision["payload"]["arguments"]) == {"query": "vault code guard"}
    assert await gateway.verify() == []


async def test_a_condensed_message_is_found_by_the_hash_that_stands_in_the_view(start):
    model = Looking({})
    gateway = await start(settings=ON, answers=model, **SMALL)
    history = await long_session(gateway)
    entry = (await gateway.get("/v1/sessions/s/log"))["data"][4]
    assert "QX-4711-77" in entry["message"]["content"]
    shown = json.dumps((await gateway.get("/v1/sessions/s/view"))["messages"])
    model.asks, model.on = [{"hash": entry["hash"][:10]}], True
    answer = await gateway.chat(*history, user("And the code?"), session="s", max_tokens=100)
    assert "QX-4711-77" in answer["choices"][0]["message"]["content"]
    assert "hash names a full message" in shown


async def test_the_api_answers_as_the_tool_does(start):
    gateway = await start(**SMALL)
    await long_session(gateway)
    found = await gateway.get("/v1/sessions/s/recall?query=the+guard+of+the+vault&limit=200")
    assert "Ms Okonkwo" in found["text"]
    assert found["tokens"] <= 200
    by_hash = await gateway.get(f"/v1/sessions/s/recall?hash={found['hashes'][0]}&range=1-1")
    assert "QX-4711-77" in by_hash["text"]
    assert (await gateway.get("/v1/sessions/s/recall"))["error"]["code"] == "invalid_request"
    assert "Nothing" in (await gateway.get("/v1/sessions/s/recall?query=unicorns"))["text"]
    log = await gateway.get("/v1/sessions/s/log?q=guard+code+vault")
    assert "Ms Okonkwo" in log["data"][0]["message"]["content"]


async def test_rounds_are_bounded_and_the_last_has_no_tool(start):
    gateway = await start(settings=Settings(recall=True, recall_rounds=2), answers=lambda body: recall(query="more"))
    answer = await gateway.chat(user("hi"), session="s", tools=TOOLS)
    assert len(gateway.engine.requests) == 3
    assert [t["function"]["name"] for t in sent(gateway)["tools"]] == ["look"]
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    view = await gateway.get("/v1/sessions/s/view")
    assert [d["kind"] for d in view["decisions"]].count("recall") == 2


async def test_beside_a_clients_call_ours_is_dropped(start):
    both = Answer("hm", tool_calls=(ToolCall("kvsteward_recall", '{"query":"x"}'), ToolCall("look", "{}")))
    gateway = await start(settings=ON, answers=[both])
    answer = await gateway.chat(user("hi"), session="s", tools=TOOLS)
    assert len(gateway.engine.requests) == 1
    message = answer["choices"][0]["message"]
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["look"]
    assert message["content"] == "hm"
    log = (await gateway.get("/v1/sessions/s/log"))["data"]
    assert log[-1]["message"] == message


async def test_text_before_a_look_up_is_kept(start):
    model = Looking({"query": "code"}, then="Found.", text="One moment.")
    model.on = True
    gateway = await start(settings=ON, answers=model)
    answer = await gateway.chat(user("the code?"), session="s")
    assert answer["choices"][0]["message"]["content"] == "One moment.\n\nFound."


async def test_off_by_default_and_on_by_header(start):
    gateway = await start()
    await gateway.chat(user("hi"), session="a")
    assert "tools" not in sent(gateway)
    await gateway.chat(user("hi"), session="b", headers={"X-KVSteward-Recall": "on"})
    assert [t["function"]["name"] for t in sent(gateway)["tools"]] == ["kvsteward_recall"]
    assert (await gateway.chat(user("hi"), headers={"X-KVSteward-Recall": "maybe"}))["status"] == 400


async def test_off_by_header_and_where_it_cannot_work(start):
    gateway = await start(settings=ON)
    await gateway.chat(user("hi"), headers={"X-KVSteward-Recall": "off"})
    assert "tools" not in sent(gateway)
    await gateway.chat(user("hi"), tools=TOOLS, tool_choice="none")
    assert [t["function"]["name"] for t in sent(gateway)["tools"]] == ["look"]


async def test_a_nonsense_call_is_answered_not_failed(start):
    model = Looking({"hash": "?", "range": "x"}, then="Well: {}")
    model.on = True
    gateway = await start(settings=ON, answers=model)
    answer = await gateway.chat(user("hi"), session="s")
    assert "two line numbers" in answer["choices"][0]["message"]["content"]


async def test_an_engine_that_fails_in_the_second_round(start):
    gateway = await start(settings=ON, answers=lambda body: recall(query="x"))
    gateway.engine.inject(Fault(), Fault(status=500))
    answer = await gateway.chat(user("hi"), session="s")
    assert answer["status"] == 500
    assert (await gateway.get("/v1/sessions/s"))["state"] == "idle"
    assert gateway.steward.fleet.first.gate.pool.reserved_tokens == 0
    assert await gateway.verify() == []


async def test_look_ups_stay_inside_the_budget(start):
    """Every round's prompt and answer, in a session that is as full as it gets."""
    model = Looking({"query": "note"}, {"query": "vault"}, {"query": "file"}, then="ok")
    gateway = await start(settings=ON, answers=model, **SMALL)
    history = await long_session(gateway, turns=30)
    model.on = True
    for turn in range(12):
        history.append(user(f"{turn}? " + "words to fill the view with. " * 8))
        answer = await gateway.chat(*history, session="s", max_tokens=200)
        assert answer["status"] == 200, answer
        for request in list(gateway.engine.requests)[-4:]:
            body = json.loads(request.body)
            assert await gateway.engine.count_prompt_tokens(body) + body["max_tokens"] <= 2048
        history.append(answer["choices"][0]["message"])
    assert (await gateway.get("/v1/sessions/s/view"))["tokens"] <= 2048

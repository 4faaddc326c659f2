"""A client whose system prompt has a clock in it: the engine's cache holds, and the log has what was sent."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from kvsteward.context.hygiene import Hygiene, Moved, restored
from kvsteward.context.marks import Policy
from kvsteward.gateway.settings import Settings

AGENT = "You are a coding agent. Read before you write. " * 24
POOL = {"context_limit_tokens": 4096, "kv_capacity_tokens": 16_384}


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties or {"path": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": parameters}}


TOOLS = [tool("write"), tool("read"), tool("search", query={"type": "string"}, limit={"type": "integer"})]


def user(text):
    return {"role": "user", "content": text}


def clock(turn):
    head = f"x-anthropic-billing-header: cc_version=2.1; cch=a{turn:04x};\n"
    return {"role": "system", "content": f"{head}Today's date: 2026-11-{turn % 28 + 1:02}\n{AGENT}"}


def sent(gateway, index=-1):
    return json.loads(gateway.engine.requests[index].body)


async def talk(gateway, turns, system=clock, tools=None, **how):
    """The prompt's tokens and those found in the cache, turn by turn."""
    history, seen = [], []
    for turn in range(turns):
        history.append(user(f"Question {turn}: what of the file number {turn * 31}?"))
        fields = {"tools": tools(turn)} if tools else {}
        answer = await gateway.chat(system(turn), *history, max_tokens=64, **fields, **how)
        assert answer["status"] == 200, answer
        history.append(answer["choices"][0]["message"])
        usage = answer["usage"]
        seen.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    return seen, history


@pytest.mark.parametrize("how", [{"session": "s"}, {}], ids=["by id", "by its history"])
async def test_the_cache_holds_although_the_clock_runs(start, how):
    gateway = await start(**POOL)
    seen, history = await talk(gateway, 12, **how)
    block = gateway.engine.info.block_tokens
    for (before, _), (_, cached) in pairwise(seen):
        assert cached >= before - before % block - block, "all of the last prompt but its last block is found"
    sessions = (await gateway.get("/v1/sessions"))["data"]
    assert len(sessions) == 1
    messages = sent(gateway)["messages"]
    assert messages[0]["content"] == AGENT
    assert "2026-11-12" in messages[-1]["content"]
    assert "2026-11-12" not in str(messages[:-1])
    assert messages[1]["content"].startswith(history[0]["content"])


async def test_without_hygiene_nothing_is_found(start):
    gateway = await start(settings=Settings(policy=Policy(hygiene=Hygiene(enabled=False))), **POOL)
    seen, _ = await talk(gateway, 4, session="s")
    assert [cached for _, cached in seen] == [0, 0, 0, 0]
    assert sent(gateway)["messages"][0] == clock(3)


async def test_passthrough_sends_what_came(start):
    gateway = await start(settings=Settings(mode="passthrough"), **POOL)
    await talk(gateway, 2, session="s", tools=lambda _: TOOLS)
    assert (sent(gateway)["messages"][0], sent(gateway)["tools"]) == (clock(1), TOOLS)


async def test_the_log_has_what_was_sent_turn_by_turn(start):
    gateway = await start(**POOL)
    await talk(gateway, 5, session="s")
    decisions = (await gateway.get("/v1/sessions/s/view"))["decisions"]
    noted = [d["payload"] for d in decisions if d["kind"] == "note"]
    log = await gateway.get("/v1/sessions/s/log")
    kept = [log["data"][0]["message"]]
    originals = [restored(kept, None, [Moved(**m) for m in note["moved"]])[0][0] for note in noted]
    assert originals == [clock(turn) for turn in range(5)]
    assert [note["moved"] for note in log["notes"]] == [note["moved"] for note in noted]
    assert await gateway.verify() == []


async def test_the_view_is_derived_again(start):
    gateway = await start(**{**POOL, "context_limit_tokens": 1024})
    await talk(gateway, 40, session="s", tools=lambda turn: TOOLS if turn % 2 else TOOLS[::-1])
    view = await gateway.get("/v1/sessions/s/view")
    assert view["dropped_messages"] > 10
    assert "2026-11-12" in str(view["messages"])
    gateway.steward.desk.forget("s")
    assert (await gateway.get("/v1/sessions/s/view"))["messages"] == view["messages"]
    decisions = [d["kind"] for d in view["decisions"]]
    assert decisions.count("tools") == 1


async def test_tools_are_shown_in_one_order_and_logged_as_they_came(start):
    gateway = await start(**POOL)
    orders = [TOOLS, TOOLS[::-1], [TOOLS[1], TOOLS[0], TOOLS[2]]]
    shuffled = tool("search", limit={"type": "integer"}, query={"type": "string"})
    orders.append([shuffled, *TOOLS[:2]])
    seen, history = await talk(
        gateway, 4, system=lambda _: {"role": "system", "content": AGENT}, session="s", tools=orders.__getitem__
    )
    shown = [json.dumps(sent(gateway, n)["tools"]) for n in range(4)]
    assert len(set(shown)) == 1
    assert [t["function"]["name"] for t in json.loads(shown[0])] == ["read", "search", "write"]
    assert all(cached > 200 for _, cached in seen[1:])
    decisions = (await gateway.get("/v1/sessions/s/view"))["decisions"]
    (logged,) = [d["payload"] for d in decisions if d["kind"] == "tools"]
    assert (logged["sent"], logged["shown"]) == (TOOLS, json.loads(shown[0]))
    gateway.steward.desk.forget("s")
    system = {"role": "system", "content": AGENT}
    await gateway.chat(system, *history, user("more"), session="s", tools=orders[3], max_tokens=64)
    assert json.dumps(sent(gateway)["tools"]) == shown[0], "known again from the log"


async def test_a_repeated_request_gets_the_same_prompt(start):
    gateway = await start(**POOL)
    await gateway.chat(clock(1), user("Hello"), session="s")
    await gateway.chat(clock(2), user("Hello"), session="s")
    assert sent(gateway, 0)["messages"] == sent(gateway, 1)["messages"]

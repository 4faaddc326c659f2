"""Images through the gateway."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace

from kvsteward.context.images import hashes
from kvsteward.engines.scripted import Answer, ToolCall
from kvsteward.gateway.settings import Settings

EYES = frozenset({"text", "image"})
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 5_000}}


def user(text, *pictures):
    return {"role": "user", "content": [{"type": "text", "text": text}, *pictures] if pictures else text}


def shown(request):
    messages = json.loads(request.body)["messages"]
    return sum(p["type"] == "image_url" for m in messages if isinstance(m["content"], list) for p in m["content"])


async def test_the_same_image_in_forty_turns(start, tmp_path):
    gateway = await start(modalities=EYES, context_limit_tokens=4096, kv_capacity_tokens=8192)
    history = []
    for turn in range(40):
        history.append(user(f"Turn {turn}: " + "what do you see on this one? " * 20, PICTURE))
        answer = await gateway.chat(*history, session="s", max_tokens=50)
        assert answer["status"] == 200, answer
        assert shown(gateway.engine.requests[-1]) == 1
        history.append(answer["choices"][0]["message"])
    view = await gateway.get("/v1/sessions/s/view")
    assert view["dropped_messages"] > 0
    log = await gateway.get("/v1/sessions/s/log")
    assert [e["message"] for e in log["data"]] == history, "the log has every message as it came"
    item = await gateway.get(f"/v1/sessions/s/items/{log['data'][6]['hash'][:12]}")
    assert item["message"] == history[6]
    assert await gateway.verify() == []
    db = sqlite3.connect(tmp_path / "sessions.db")
    (kept,) = db.execute("SELECT count(*) FROM blobs").fetchone()
    (raw_bytes,) = db.execute("SELECT sum(length(raw)) FROM entries").fetchone()
    db.close()
    assert kept == 1
    assert raw_bytes < 2 * len(PICTURE["image_url"]["url"])
    gateway.steward.desk.forget("s")
    assert (await gateway.get("/v1/sessions/s/view"))["messages"] == view["messages"]


async def test_an_image_that_left_is_recalled_by_its_hash(start):
    name = hashes(user("", PICTURE))[0][:10]

    def model(body):
        asked = "bring it back" in str(body["messages"][-1]["content"])
        return Answer(tool_calls=(ToolCall("kvsteward_recall", json.dumps({"hash": name})),)) if asked else "ok"

    gateway = await start(
        modalities=EYES, settings=Settings(recall=True), answers=model, context_limit_tokens=32_768,
        kv_capacity_tokens=65_536,
    )  # fmt: skip
    history = [user("A cat:", PICTURE), {"role": "assistant", "content": "ok"}]
    for turn in range(40):
        history += [user(f"Turn {turn}: " + "a long tale of rain. " * 150), {"role": "assistant", "content": "ok"}]
    await gateway.chat(*history, user("Thanks"), session="s")
    assert shown(gateway.engine.requests[-1]) == 0
    assert name in str((await gateway.get("/v1/sessions/s/view"))["messages"])
    await gateway.chat(
        *history, user("Thanks"), {"role": "assistant", "content": "ok"}, user("bring it back"), session="s"
    )
    last = json.loads(gateway.engine.requests[-1].body)["messages"]
    assert last[-1]["content"][1] == PICTURE
    assert last[-2]["role"] == "tool"


async def test_only_vllm_gets_ids(start):
    gateway = await start(modalities=EYES)
    await gateway.chat(user("look", PICTURE), session="s")
    assert "uuid" not in gateway.engine.requests[-1].body.decode()
    gateway.engine.info = replace(gateway.engine.info, dialect="vllm")
    await gateway.chat(user("look", PICTURE), session="t")
    part = json.loads(gateway.engine.requests[-1].body)["messages"][0]["content"][1]
    assert part["uuid"] == hashes(user("", PICTURE))[0]


async def test_an_engine_without_eyes_refuses(start):
    gateway = await start()
    answer = await gateway.chat(user("look", PICTURE), session="s")
    assert answer["error"]["code"] == "unsupported"

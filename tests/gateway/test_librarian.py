"""Recall by meaning: what is embedded and when, what is found, and what happens when the endpoint fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.gateway.embeddings import Endpoint, hangs, refuses, says, slow_for_many, status, uneven, vector_of, waits

from kvsteward.context.recall import Ask
from kvsteward.engines.embeddings import Embedder, EmbeddingOptions
from kvsteward.engines.scripted import Answer, ToolCall
from kvsteward.errors import (
    ConfigError,
    EngineError,
    EngineResponseError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from kvsteward.gateway.recall import find
from kvsteward.gateway.settings import Settings

FACTS = (
    "The automobile stands in row 14 of the garage.",
    "Our physician is Ms Okonkwo on the third floor.",
    "The lease ends in September, the landlord said.",
    "A puppy was seen near the gate at noon.",
)


def user(text):
    return {"role": "user", "content": text}


def recall(**arguments):
    return Answer(tool_calls=(ToolCall("kvsteward_recall", json.dumps(arguments)),))


@pytest.fixture
async def endpoint():
    served = await Endpoint().start()
    yield served
    await served.stop()


@pytest.fixture
def options(endpoint):
    return EmbeddingOptions(endpoint.url, "m", timeout_s=20.0, query_timeout_s=20.0, rest_s=0.05, back_off_s=0.01)


async def told(gateway, *texts, session="s"):
    """Turns of a session, each with one fact, and all of them embedded; the history."""
    history = []
    for text in texts:
        history.append(user(text))
        answer = await gateway.chat(*history, session=session)
        assert answer["status"] == 200, answer
        history.append(answer["choices"][0]["message"])
    return history


async def settled(gateway):
    await gateway.until(lambda: gateway.steward.librarian.waiting == 0, within_s=30)


async def ask(gateway, query, session="s"):
    found = await gateway.get(f"/v1/sessions/{session}/recall?query={query.replace(' ', '+')}&limit=400")
    assert "error" not in found, found
    return found


def counted(gateway, name, outcome):
    return gateway.steward.telemetry.registry.get_sample_value(f"kvsteward:{name}_total", {"outcome": outcome}) or 0


def held_in(path, column):
    """What the rows of vectors in a file have in a column."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return {value for (value,) in db.execute(f"SELECT DISTINCT {column} FROM vectors")}


# -- what is found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory:", None, "valkey"])
async def test_what_was_said_in_other_words_is_found(start, options, store, request):
    if store == "valkey":
        store = request.getfixturevalue("valkey_server").url
    gateway = await start(settings=Settings(embeddings=options), store=store)
    await told(gateway, *FACTS)
    await settled(gateway)
    found = await ask(gateway, "which vehicle")
    assert found["search"] == "fused"
    assert found["text"].split("\n")[1] == FACTS[0]
    assert (await ask(gateway, "doctor"))["text"].split("\n")[1] == FACTS[1]
    assert counted(gateway, "recall_searches", "fused") == 2
    assert counted(gateway, "embedded_texts", "stored") == len(FACTS), "'ok' has no meaning of its own"


async def test_by_words_alone_it_is_not(start):
    gateway = await start()
    await told(gateway, *FACTS)
    found = await ask(gateway, "which vehicle")
    assert "Nothing in this conversation" in found["text"]
    assert "search" not in found


async def test_both_rankings_count(start, options):
    """Words name the first and the third, meaning the third before the second: words' best, then meaning's."""
    gateway = await start(settings=Settings(embeddings=options))
    await told(gateway, "The floor is wet.", "An automobile stands here.", "The car is on the floor below.")
    await settled(gateway)
    head = (await gateway.get("/v1/sessions/s"))["head"]
    entries, search = await find(gateway.steward, "s", head, Ask(query="vehicle floor"))
    texts = [json.loads(entry.raw)["content"] for entry in entries]
    assert search == "fused"
    assert texts == ["The floor is wet.", "The car is on the floor below.", "An automobile stands here."]


async def test_the_model_s_tool_finds_by_meaning_too(start, options):
    def answers(body):
        last = body["messages"][-1]
        if last["role"] == "tool":
            return f"It says: {last['content']}"
        return recall(query="vehicle") if "Which" in last["content"] else "ok"

    gateway = await start(settings=Settings(recall=True, embeddings=options), answers=answers)
    history = await told(gateway, *FACTS)
    await settled(gateway)
    answer = await gateway.chat(*history, user("Which one?"), session="s")
    assert FACTS[0] in answer["choices"][0]["message"]["content"]
    decisions = (await gateway.get("/v1/sessions/s/view"))["decisions"]
    assert [d["payload"]["search"] for d in decisions if d["kind"] == "recall"] == ["fused"]


async def test_another_branch_is_not_found(start, options):
    gateway = await start(settings=Settings(embeddings=options))
    history = await told(gateway, "Begin.", FACTS[0])
    await settled(gateway)
    edited = [*history[:2], user("Something else entirely.")]
    await gateway.chat(*edited, session="s")
    await settled(gateway)
    assert FACTS[0] not in (await ask(gateway, "which vehicle"))["text"]


async def test_prefixes_key_and_dimensions_go_to_the_endpoint(start, endpoint, options):
    options = replace(options, query_prefix="Q: ", text_prefix="T: ", api_key="secret", dimensions=8)
    gateway = await start(settings=Settings(embeddings=options))
    await told(gateway, FACTS[0])
    await settled(gateway)
    await ask(gateway, "vehicle")
    assert endpoint.texts[-1] == "Q: vehicle"
    assert f"T: {FACTS[0]}" in endpoint.texts
    assert set(endpoint.keys) == {"Bearer secret"}
    assert {(r["model"], r["dimensions"]) for r in endpoint.requests} == {("m", 8)}


# -- what is embedded ---------------------------------------------------------------------------------------------


async def test_a_text_is_embedded_once(start, endpoint, options, tmp_path):
    gateway = await start(settings=Settings(embeddings=options), store=str(tmp_path / "a.db"))
    await told(gateway, *FACTS)
    await settled(gateway)
    assert sorted(endpoint.texts) == sorted([".", *FACTS])
    assert all(len(request["input"]) <= 32 for request in endpoint.requests)


async def test_a_branch_takes_over_what_is_known(start, endpoint, options):
    gateway = await start(settings=Settings(embeddings=options))
    history = await told(gateway, *FACTS, session=None)
    await settled(gateway)
    before = len(endpoint.texts)
    await gateway.chat(*history[:4], user("Another way on."))
    await settled(gateway)
    assert sorted(endpoint.texts[before:]) == ["Another way on."]
    assert counted(gateway, "embedded_texts", "adopted") == 2


async def test_a_log_of_before_is_caught_up_with(start, endpoint, options, tmp_path):
    where = str(tmp_path / "a.db")
    gateway = await start(store=where)
    await told(gateway, *FACTS)
    again = await start(settings=Settings(embeddings=options), store=where)
    assert (await ask(again, "which vehicle"))["search"] == "words: no_vectors"
    await settled(again)
    assert (await ask(again, "which vehicle"))["search"] == "fused"
    assert endpoint.texts.count(FACTS[0]) == 1


async def test_a_session_that_is_deleted_has_no_vectors_left(start, options, tmp_path):
    gateway = await start(settings=Settings(embeddings=options), store=str(tmp_path / "a.db"))
    await told(gateway, *FACTS)
    await told(gateway, FACTS[0], session="other")
    await settled(gateway)
    async with gateway.http.delete("/v1/sessions/s") as response:
        assert response.status == 200
    held = await asyncio.to_thread(held_in, tmp_path / "a.db", "session_id")
    assert held == {"other"}


async def test_a_session_deleted_while_it_is_embedded_leaves_nothing(start, endpoint, options, tmp_path):
    gateway = await start(settings=Settings(embeddings=options), store=str(tmp_path / "a.db"))
    await told(gateway, "warm", session="other")
    await settled(gateway)
    endpoint.always = hangs(0.2)
    await told(gateway, FACTS[0])
    async with gateway.http.delete("/v1/sessions/s") as response:
        assert response.status == 200
    await settled(gateway)
    assert await asyncio.to_thread(held_in, tmp_path / "a.db", "session_id") == {"other"}


async def test_another_model_is_not_mixed_with_the_one_before(start, endpoint, options, tmp_path):
    where = str(tmp_path / "a.db")
    gateway = await start(settings=Settings(embeddings=options), store=where)
    history = await told(gateway, *FACTS)
    await settled(gateway)
    endpoint.requests.clear()
    again = await start(settings=Settings(embeddings=replace(options, model="n")), store=where)
    assert (await ask(again, "which vehicle"))["search"] == "words: no_vectors"
    await again.chat(*history, user("Please go on now."), session="s")
    await settled(again)
    assert {FACTS[0], FACTS[3], "Please go on now."} <= set(endpoint.texts), "all of it is embedded again"
    assert (await ask(again, "which vehicle"))["text"].split("\n")[1] == FACTS[0]
    spaces = await asyncio.to_thread(held_in, tmp_path / "a.db", "space")
    assert [space.split("\n")[0] for space in spaces] == ["n"]


async def test_a_model_that_changes_behind_its_name(start, endpoint, options):
    gateway = await start(settings=Settings(embeddings=options))
    history = await told(gateway, *FACTS)
    await settled(gateway)
    endpoint.dimensions = 12
    assert (await ask(gateway, "which vehicle"))["search"] == "words: no_vectors"
    await gateway.chat(*history, user("Please go on now."), session="s")
    await settled(gateway)
    found = await ask(gateway, "which vehicle")
    assert found["search"] == "fused"
    assert found["text"].split("\n")[1] == FACTS[0]


# -- an endpoint that fails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "miss"),
    [
        (status(500), "refused"),
        (status(401), "refused"),
        (hangs(60.0), "timeout"),
        (says("no json"), "unusable"),
        (says({"data": []}), "unusable"),
        (says({"data": [{"index": 0, "embedding": [0.0, 0.0]}]}), "unusable"),
        (says({"data": [{"index": 0, "embedding": "text"}]}), "unusable"),
        (says({"data": [{"index": 0, "embedding": [1e999, 1.0]}]}), "unusable"),
    ],
    ids=["500", "401", "late", "no-json", "none", "zero", "text", "infinite"],
)
async def test_a_search_goes_by_words_then(start, endpoint, options, fault, miss):
    query_timeout_s = 0.2 if miss == "timeout" else 20.0
    options = replace(options, rest_s=60.0, query_timeout_s=query_timeout_s)
    gateway = await start(settings=Settings(embeddings=options))
    await told(gateway, *FACTS)
    await settled(gateway)
    endpoint.faults = [fault]
    found = await ask(gateway, "the third floor")
    assert FACTS[1] in found["text"]
    assert found["search"] == f"words: {miss}"
    assert counted(gateway, "recall_searches", miss) == 1
    asked = len(endpoint.requests)
    assert (await ask(gateway, "the third floor"))["search"] == "words: resting"
    assert len(endpoint.requests) == asked, "it is left alone for a while"


async def test_the_wrong_length_is_unusable_where_one_was_asked_for(start, endpoint, options):
    gateway = await start(settings=Settings(embeddings=replace(options, dimensions=7)))
    await told(gateway, FACTS[1])
    assert (await ask(gateway, "the third floor"))["search"] in {"words: unusable", "words: resting"}
    await settled(gateway)
    assert counted(gateway, "embedded_texts", "given_up") == 1
    assert counted(gateway, "embedded_texts", "stored") == 0


async def test_an_endpoint_that_is_down_delays_no_turn_and_is_caught_up_with(start, endpoint, options):
    await endpoint.stop()
    gateway = await start(settings=Settings(embeddings=options))
    history = await told(gateway, *FACTS)
    assert (await ask(gateway, "the third floor"))["search"] in {"words: unavailable", "words: resting"}
    await settled(gateway)
    assert counted(gateway, "embedded_texts", "given_up") >= 1
    assert counted(gateway, "embedded_texts", "stored") == 0
    await endpoint.start()  # at the port that it had
    await gateway.chat(*history, user("Please go on now."), session="s")
    await settled(gateway)
    assert counted(gateway, "embedded_texts", "stored") == len(FACTS) + 1
    assert (await ask(gateway, "which vehicle"))["text"].split("\n")[1] == FACTS[0]


async def test_an_error_that_passes_is_tried_again(start, endpoint, options):
    endpoint.faults = [status(503), status(429), None, status(500), says({}), None]
    gateway = await start(settings=Settings(embeddings=options))
    await told(gateway, FACTS[0])
    await settled(gateway)
    assert counted(gateway, "embedded_texts", "stored") == 1
    assert counted(gateway, "embedded_texts", "failed") == 0


@pytest.mark.parametrize("code", [400, 413, 500])
async def test_a_text_that_the_model_refuses_does_not_hold_up_the_others(start, endpoint, options, code):
    gateway = await start(settings=Settings(embeddings=options))
    endpoint.always = refuses("puppy", code)
    await told(gateway, *FACTS)
    await settled(gateway)
    history = [m for text in FACTS for m in (user(text), {"role": "assistant", "content": "ok"})]
    await gateway.chat(*history, user("Where is the hound?"), session="s")
    await settled(gateway)
    assert counted(gateway, "embedded_texts", "refused") == 1
    assert counted(gateway, "embedded_texts", "stored") == len(FACTS)
    assert (await ask(gateway, "which vehicle"))["search"] == "fused"


async def test_a_batch_that_takes_too_long_is_halved(start, endpoint, options, tmp_path):
    where = str(tmp_path / "a.db")
    history = await told(await start(store=where), *FACTS)
    endpoint.always = slow_for_many(3)
    gateway = await start(settings=Settings(embeddings=replace(options, timeout_s=2.0)), store=where)
    await gateway.chat(*history, user("Please go on now."), session="s")
    await settled(gateway)
    assert counted(gateway, "embedded_texts", "stored") == 5
    assert [len(request["input"]) for request in endpoint.requests] == [1, 5, 2, 3]


async def test_a_full_queue_drops_and_counts(start, endpoint, options, monkeypatch):
    monkeypatch.setattr("kvsteward.gateway.librarian.MAX_QUEUE", 1)
    goes_on = asyncio.Event()
    endpoint.always = waits(goes_on)
    gateway = await start(settings=Settings(embeddings=options))
    for name in ("at work", "queued", "dropped"):
        await told(gateway, FACTS[0], session=name)
        await gateway.until(lambda: bool(endpoint.requests))
    assert counted(gateway, "embedded_texts", "dropped") == 1
    goes_on.set()
    await settled(gateway)
    assert counted(gateway, "embedded_texts", "stored") + counted(gateway, "embedded_texts", "adopted") == 2


async def test_a_turn_that_ends_while_its_session_is_embedded_is_not_missed(start, endpoint, options):
    gateway = await start(settings=Settings(embeddings=options))
    goes_on = asyncio.Event()
    endpoint.faults = [None, waits(goes_on)]  # the second request has the first fact
    history = await told(gateway, FACTS[0])
    await gateway.until(lambda: len(endpoint.requests) == 2)
    await gateway.chat(*history, user(FACTS[1]), session="s")
    goes_on.set()
    await settled(gateway)
    assert counted(gateway, "embedded_texts", "stored") == 2


async def test_stopping_waits_for_nobody(start, endpoint, options):
    endpoint.always = hangs(600.0)
    gateway = await start(settings=Settings(embeddings=options))
    await told(gateway, FACTS[0])
    async with asyncio.timeout(60.0):
        await gateway.steward.librarian.close()


# -- the client ---------------------------------------------------------------------------------------------------


async def test_the_client_gives_vectors_in_the_order_of_the_texts(endpoint, options):
    embedder = Embedder(options)
    embedder.open()
    try:
        texts = ["a car", "a dog", "the rent"]
        assert await embedder.texts(texts) == [vector_of(text) for text in texts]
        endpoint.faults = [uneven]
        with pytest.raises(EngineError, match="dimensions"):
            await embedder.texts(texts)
        endpoint.faults = [status(418)]
        with pytest.raises(EngineResponseError) as caught:
            await embedder.texts(texts)
        assert caught.value.status == 418
        late = Embedder(replace(options, query_timeout_s=0.1))
        late.open()
        endpoint.faults = [hangs(60.0)]
        with pytest.raises(EngineTimeoutError):
            await late.query("late")
        await late.close()
    finally:
        await embedder.close()
    with pytest.raises(EngineUnavailableError):
        await embedder.query("closed")


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"model": ""}, "name of a model"), ({"dimensions": 0}, "between 1"), ({"url": "nowhere"}, "URL")],
)
def test_what_cannot_be_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        Embedder(EmbeddingOptions(**{"url": "http://127.0.0.1:1", "model": "m"} | fields))


def test_without_the_setting_nothing_is_imported():
    code = (
        "import sys; from kvsteward.gateway.app import create_app; from kvsteward.gateway.settings import Settings; "
        "from kvsteward.engines.scripted import ScriptedEngine; from kvsteward.sessions import open_store; "
        "create_app(Settings(), [ScriptedEngine()], open_store('memory:')); "
        "assert 'numpy' not in sys.modules and 'kvsteward.sessions.nearest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])

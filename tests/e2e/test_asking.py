"""Questions to a real engine's model on the gateway's own account. A small model's answers mostly fail the test: either
way the turn is answered, the client sees nothing of it, and the log says what became of it."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path

import orjson
import pytest

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]

POLICY = "summary: extractive\nplan: {unsure: engine}\ntrace: {prose: engine, tool_limit_tokens: 160}\n"
DULL = "The water flows down to the sea as it always does, and people walk along it in the sun."
TELLING = "Pump KX-4711 of the old hall had failed because a heron nested in its inlet."
REPORT = " ".join([*[DULL] * 9, TELLING, *[DULL] * 9])
CALL = {"id": "c1", "type": "function", "function": {"name": "report", "arguments": "{}"}}
WISH = "Ideally the flat has a green door."


def user(text):
    return {"role": "user", "content": text}


def prefilled(engine):
    """Prompt tokens that the engine itself has counted."""
    request = urllib.request.Request(f"{engine.url}/metrics", headers={"Authorization": "Bearer e2e"})
    with urllib.request.urlopen(request, timeout=10) as response:
        lines = response.read().decode().splitlines()
    found = [line for line in lines if re.match(r"llamacpp:prompt_tokens_total\b", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def decided(gateway, kind):
    return [d["payload"] for d in gateway.get("/v1/sessions/s/view")["decisions"] if d["kind"] == kind]


def asked(gateway, purpose, *outcomes):
    """How many questions had one of these ends, by the metrics."""
    lines = [line for line in gateway.get("/metrics").splitlines() if line.startswith("kvsteward:asks_total{")]
    wanted = [f'{{outcome="{outcome}",purpose="{purpose}"}}' for outcome in outcomes]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if any(w in line for w in wanted))


def streamed(gateway, messages):
    """The whole stream of a turn, as the client gets it."""
    body = orjson.dumps({"messages": messages, "stream": True, "max_tokens": 8, "temperature": 0})
    request = urllib.request.Request(f"{gateway.url}/v1/chat/completions", body, {"X-Session-ID": "s"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()


@pytest.fixture
def gateway(llama_server, serve, tmp_path: Path):
    (tmp_path / "asks.yaml").write_text(POLICY)
    return serve("--engine", llama_server.option, "--budget", "1024", "--policy", str(tmp_path / "asks.yaml"))


def test_prose_is_written_by_the_model_or_left_to_the_distiller(llama_server, gateway):
    before = prefilled(llama_server)
    history = [
        user("What failed?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": REPORT},
    ]
    stream = streamed(gateway, history)
    assert "[DONE]" in stream
    assert "begin" not in stream
    assert "a tool returned" not in stream
    (told,) = decided(gateway, "ask")
    assert told["purpose"] == "prose"
    assert told["outcome"] in {"used", "refused", "failed"}
    assert bool(told["reason"]) == (told["outcome"] != "used")
    shown = gateway.get("/v1/sessions/s/view")["messages"][2]
    assert shown["role"] == "tool"
    assert prefilled(llama_server) - before > 350, "the engine has read the report once, and it was not in the turn"
    assert len(shown["content"]) < len(REPORT) // 2
    if told["outcome"] == "used":
        assert "[kvsteward: paraphrase, " in shown["content"]
        words = shown["content"].rpartition("\n")[0]
        assert all(number in REPORT for number in re.findall(r"\d+", words))
    else:
        assert "[kvsteward: prose, " in shown["content"]
        assert TELLING in shown["content"]
    if told["outcome"] != "failed":
        assert told["prompt_tokens"] > 350
    assert gateway.get("/v1/sessions/s/view")["messages"][2] == shown
    assert asked(gateway, "prose", told["outcome"]) == 1


def test_a_sentence_is_classified_while_nobody_waits(gateway):
    history, compactions = [user("Find a flat for my aunt."), {"role": "assistant", "content": "Where?"}], 0
    for turn in range(40):
        wish = f"{WISH} " if turn == 0 else ""
        history.append(user(f"{wish}Entry {turn}: the weather was plain, and nothing broke in the house on the hill."))
        if turn < 12:  # not the engine's: the session is as long, the test is not
            history.append({"role": "assistant", "content": "It is noted."})
            continue
        answer = gateway.chat(history, session="s", max_tokens=4, temperature=0)
        assert "choices" in answer, answer
        history.append(answer["choices"][0]["message"])
        session = gateway.get("/v1/sessions/s")
        compactions = session["compactions"]
        if compactions:
            break
        if session["tokens_in_view"] > 800:  # due: three rounds like the newest reach the mark of 870
            deadline = time.monotonic() + 60
            while asked(gateway, "class", "used", "refused") < 1 and time.monotonic() < deadline:
                time.sleep(0.1)
    assert compactions == 1
    (found,) = decided(gateway, "class")
    told = found["asked"]
    assert told["outcome"] in {"used", "refused"}, told
    assert told["prompt_tokens"] > 100
    ((given,),) = found["items"].values()
    assert given["text"] == WISH
    assert given["given"] in ({"plan", "fact", "trace"} if told["outcome"] == "used" else {""})
    block = gateway.get("/v1/sessions/s/view")["messages"][0]["content"]
    kept = block.partition("word for word:\n")[2].splitlines()
    assert (WISH in kept) == (given["given"] == "plan")

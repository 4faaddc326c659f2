"""The promises of the gateway, kept in front of real engines."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import time

import openai
import pytest

from kvsteward.sessions import open_store

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find it.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
    },
}


def user(text):
    return {"role": "user", "content": text}


def test_the_openai_sdk_unmodified(engine, serve):
    gateway = serve("--engine", engine.option)
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    plain = client.chat.completions.create(model=model, messages=[user("Say hello.")], max_tokens=12, temperature=0)
    assert plain.choices[0].message.content
    assert plain.usage.completion_tokens <= 12
    stream = client.chat.completions.create(
        model=model, messages=[user("Say hello.")], max_tokens=12, temperature=0, stream=True
    )
    chunks = list(stream)
    assert all(chunk.choices for chunk in chunks), "the usage chunk that nobody asked for is taken out"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}
    with_usage = client.chat.completions.create(
        model=model, messages=[user("Hi.")], max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    assert list(with_usage)[-1].usage.prompt_tokens > 0
    logprobs = client.chat.completions.create(
        model=model, messages=[user("Hi.")], max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert len(logprobs.choices[0].logprobs.content) == logprobs.usage.completion_tokens
    client.close()


def test_calls_and_results_are_understood_by_the_engines_template(engine, serve):
    gateway = serve("--engine", engine.option)
    call = {"id": "call_0001", "type": "function", "function": {"name": "find", "arguments": '{"id": "A-17"}'}}
    messages = [
        {"role": "system", "content": "You look things up."},
        user("Where is A-17?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0001", "content": json.dumps({"id": "A-17", "shelf": 4711})},
    ]
    answer = gateway.chat(messages, session="s", tools=[TOOL], max_tokens=16)
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] > 20


def test_a_session_in_a_small_budget(engine, serve):
    """30 turns in 1,024 tokens: no turn fails, none passes the budget, and the engine finds most of each prompt."""
    gateway = serve("--engine", engine.option, "--budget", "1024")
    history = [{"role": "system", "content": "You keep the books of a small shop."}]
    prompt = cached = 0
    for turn in range(30):
        history.append(user(f"Invoice INV-{turn:05d} over {turn * 17 + 101} EUR came in. Please note it."))
        answer = gateway.chat(history, session="books", max_tokens=24, temperature=0)
        assert "choices" in answer, answer
        usage = answer["usage"]
        assert usage["total_tokens"] <= 1024
        prompt += usage["prompt_tokens"]
        cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        history.append(answer["choices"][0]["message"])
    session = gateway.get("/v1/sessions/books")
    assert session["tokens_in_log"] > 1024
    view = gateway.get("/v1/sessions/books/view")
    assert view["dropped_messages"] > 0
    assert any(d["kind"] == "compact" for d in view["decisions"])
    found = gateway.get("/v1/sessions/books/log?q=INV-00002")["data"]
    assert found[-1]["message"]["content"] == history[5]["content"]
    block_losses = 128 if engine.kind == "vllm" else 0  # vLLM's prefix cache holds whole blocks, of 128 tokens on CPUs
    assert cached >= 0.6 * prompt - 30 * block_losses


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_killed_curl_frees_the_engine(engine, serve, stream):
    gateway = serve("--engine", engine.option)
    rounds = 200 if engine.kind == "llama-server" and stream else 20
    body = json.dumps(
        {"messages": [user("Tell a very long story.")], "max_tokens": 3000, "stream": stream, "ignore_eos": True}
    )
    late = []
    for number in range(rounds):
        command = [
            "curl",
            "-sN",
            f"{gateway.url}/v1/chat/completions",
            "-H",
            f"X-Session-ID: s{number % 7}",
            "-d",
            body,
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as curl:
            deadline = time.monotonic() + 20
            while engine.running() == 0 and time.monotonic() < deadline:
                time.sleep(0.005)
            assert engine.running() >= 1, "the engine never began"
            time.sleep(random.uniform(0, 0.05))
            curl.kill()
        if not engine.until_idle(within_s=1.0):
            late.append(number)
            engine.until_idle(within_s=20)
    assert late == [], f"{len(late)} of {rounds} were not freed within a second"
    assert engine.running() == 0
    time.sleep(0.2)
    assert gateway.get("/v1/internal/memory")["running"] == 0
    assert "kvsteward:unreleased_requests_total 0.0" in gateway.get("/metrics")


def test_kill_9_in_the_middle_of_a_stream_loses_nothing(engine, serve, tmp_path):
    first = serve("--engine", engine.option)
    start = [user("My number is 4711."), {"role": "assistant", "content": "Noted: 4711."}]
    history = [*start, user("Count slowly from one to a thousand.")]
    body = json.dumps({"messages": history, "max_tokens": 400, "stream": True, "ignore_eos": True}).encode()
    host, port = first.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Session-ID: s\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        seen = b""
        deadline = time.monotonic() + 60
        while seen.count(b"data: ") < 40 and time.monotonic() < deadline:
            seen += client.recv(65536)
        assert b"[DONE]" not in seen
        first.child.send_signal(signal.SIGKILL)
        first.child.wait()
    second = serve("--engine", engine.option)
    log = second.get("/v1/sessions/s/log")["data"]
    assert [e["message"] for e in log[:3]] == history
    assert log[3]["finish"] == "interrupted"
    assert log[3]["message"]["content"]
    answer = second.chat([*history, log[3]["message"], user("Thanks.")], session="s", max_tokens=8)
    assert answer["choices"][0]["finish_reason"] in {"stop", "length"}
    log = second.get("/v1/sessions/s/log")["data"]
    assert len(log) == 6, "one chain: nothing was lost or doubled"
    second.child.send_signal(signal.SIGTERM)
    second.child.wait(20)
    store = open_store(str(tmp_path / "log.db"))
    assert store.verify() == []
    store.close()


def test_passthrough_meets_the_engines_own_limit(engine, serve):
    gateway = serve("--engine", engine.option, "--mode", "passthrough")
    answer = gateway.chat([user("words and more words " * 3000)], max_tokens=8)
    assert answer["status"] == 400
    assert answer["error"]["message"]

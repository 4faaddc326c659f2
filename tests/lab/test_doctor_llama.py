"""The doctor on a real llama-server, driven into each state by the test."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engines import WORDS, Running, doctor, driving, e2e, found, llama_server, metric

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(400)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with llama_server(tmp_path) as running:
        yield running


def test_idle_and_healthy(server: Running) -> None:
    assert doctor(server, 1.5)["verdict"] == "healthy"
    history = [{"role": "system", "content": WORDS * 24}]

    def turn(number: int) -> None:
        history.append({"role": "user", "content": f"Note number {number * 7}."})
        answer = server.chat(history, 4, id_slot=0)
        history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    turn(0)
    once = server.seconds_of(lambda: turn(1))
    with driving(lambda number: turn(number + 2)):
        report = doctor(server, max(4, 5 * once))
    assert (report["verdict"], report["findings"]) == ("healthy", [])
    assert report["snapshot"]["prefix_hit_ratio"] > 0.5


def test_a_request_that_outlives_its_client(server: Running) -> None:
    """One that is not streamed: llama-server does not see the client leave."""
    client = server.begin("Count to three thousand.", 3000, stream=False, connection="close")
    deadline = time.monotonic() + 60
    while metric(server, "llamacpp:tokens_predicted_total") + _decoded(server) < 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    client.close()
    report = doctor(server, 3)
    if metric(server, "llamacpp:requests_processing") == 0:
        pytest.skip("this llama-server noticed that its client had left")
    finding = found(report)["abandoned"]
    assert finding["severity"] == "critical"
    assert any("0 client connections" in line for line in finding["evidence"])
    assert report["verdict"] == "tune"


def _decoded(server: Running) -> int:
    slots = e2e.fetch(f"{server.url}/slots", Authorization=f"Bearer {server.key}")
    return sum(slot["next_token"][0]["n_decoded"] for slot in slots if slot["is_processing"])


def test_a_long_answer_with_its_client_is_no_finding(server: Running) -> None:
    client = server.begin("Count to three thousand.", 3000, stream=False)
    try:
        report = doctor(server, 3)
    finally:
        client.close()
    assert report["findings"] == []


def test_a_queue_while_the_slots_have_room(server: Running) -> None:
    clients = [server.begin(f"Tell me of number {i}.", 400) for i in range(6)]
    try:
        report = doctor(server, 3)
    finally:
        for client in clients:
            client.close()
    assert found(report)["queue-low-use"]["do"][0] == "--parallel 6"
    assert set(found(report)) == {"queue-low-use"}


def test_a_context_far_above_what_is_used(server: Running) -> None:
    threads = [threading.Thread(target=server.chat, args=(f"Is {i} even?", 4)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = doctor(server, 1.5)
    finding = found(report)["context-limit"]
    assert finding["severity"] == "advice"
    assert finding["do"][0] == "--ctx-size 2048"  # two slots of 1,024
    assert set(found(report)) == {"context-limit"}


def test_a_front_that_changes_each_turn(server: Running, tmp_path: Path) -> None:
    bodies = []
    once = server.seconds_of(lambda: server.chat(f"Warm up. {WORDS * 20}", 2))

    def turn(number: int) -> None:
        messages = [{"role": "user", "content": f"It is {10 + number % 12}:{number % 50 + 10}. {WORDS * 20}"}]
        bodies.append({"messages": messages})
        server.chat(messages, 2)
        time.sleep(0.5)  # slower than the doctor looks, so that it sees each

    with driving(turn):
        report = doctor(server, max(7, 9 * (once + 0.5)))
    assert "prefix-broken" in found(report)
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(json.dumps(body) for body in bodies[:4]))
    finding = found(doctor(server, 1, "--requests", str(file)))["prefix-broken"]
    assert "a date or time" in finding["what"]
    assert "message 1 (user), character 7" in finding["evidence"][1]

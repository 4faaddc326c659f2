"""The doctor on real vLLM (CPU), driven into eight states by the test.

Two servers, shared by the states that their flags allow. The states of the first one run in the order of this file:
`context-limit` looks at everything since the server's start, so the short prompts come before the long ones.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engines import WORDS, Running, doctor, driving, found, metric, tokens_of, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
BLOCK = 128


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A pool of 64 blocks, two requests at once."""
    folder = tmp_path_factory.mktemp("roomy")
    with vllm_server(
        folder, "--max-model-len", "4096", "--num-gpu-blocks-override", "64", "--max-num-seqs", "2"
    ) as one:
        yield one


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A pool of 10 blocks, and no prefix caching."""
    folder = tmp_path_factory.mktemp("small")
    options = ("--max-model-len", "1024", "--num-gpu-blocks-override", "10", "--no-enable-prefix-caching")
    with vllm_server(folder, *options) as one:
        yield one


def together(engine: Running, texts: list[str], tokens: int) -> None:
    threads = [threading.Thread(target=engine.chat, args=(text, tokens), kwargs={"ignore_eos": True}) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_idle(roomy: Running) -> None:
    report = doctor(roomy, 5)
    assert (report["verdict"], report["findings"]) == ("healthy", [])
    assert report["engine"]["kv_capacity_tokens"] == 64 * BLOCK


def test_a_context_limit_far_too_high(roomy: Running) -> None:
    together(roomy, [f"Is {number} even?" for number in range(10)], 2)
    report = doctor(roomy, 2)
    assert set(found(report)) == {"context-limit"}
    assert found(report)["context-limit"]["do"][0] == "--max-model-len 1024"


def test_a_front_that_changes_each_turn(roomy: Running) -> None:
    def turn(number: int) -> None:
        roomy.chat(f"It is {10 + number % 12}:{number % 50 + 10}. {WORDS * 26}", 2)

    once = roomy.seconds_of(lambda: turn(49))
    with driving(turn):
        report = doctor(roomy, max(5, 8 * once))
    assert set(found(report)) == {"prefix-broken"}
    assert report["verdict"] == "tune"


def test_healthy(roomy: Running) -> None:
    history = [{"role": "system", "content": WORDS * 24}]

    def turn(number: int) -> None:
        history.append({"role": "user", "content": f"Note number {number * 7}."})
        answer = roomy.chat(history, 4)
        history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    turn(0)
    once = roomy.seconds_of(lambda: turn(1))
    with driving(lambda number: turn(number + 2)):
        report = doctor(roomy, max(5, 6 * once))
    assert (report["verdict"], report["findings"]) == ("healthy", [])
    assert report["snapshot"]["prefix_hit_ratio"] > 0.5


def test_a_queue_with_low_use(roomy: Running) -> None:
    clients = [roomy.begin(f"Tell me of number {number}.", 800) for number in range(6)]
    try:
        report = doctor(roomy, 5)
    finally:
        for client in clients:
            client.close()
    assert set(found(report)) == {"queue-low-use"}
    assert found(report)["queue-low-use"]["do"][0] == "--max-num-seqs 6"


def test_clients_that_leave(roomy: Running) -> None:
    def leave(number: int) -> None:
        client = roomy.begin(f"Tell me of number {number}.", 800)
        with client.getresponse() as answer:  # it holds the socket, too
            answer.read(1)
        client.close()

    deadline = time.monotonic() + 60
    while metric(roomy, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    once = roomy.seconds_of(lambda: leave(0))
    with driving(leave):
        report = doctor(roomy, max(5, 6 * once))
    assert "cut off by their clients" in found(report)["abandoned"]["evidence"][0]
    assert set(found(report)) == {"abandoned"}


def test_prefix_caching_off(small: Running) -> None:
    history = [{"role": "system", "content": WORDS * 4}]

    def turn(number: int) -> None:
        small.chat([*history, {"role": "user", "content": f"Note number {number}."}], 2)

    with driving(turn):
        report = doctor(small, 5)
    assert set(found(report)) == {"prefix-off"}
    assert found(report)["prefix-off"]["do"][0] == "--enable-prefix-caching"


def test_a_pool_too_small(small: Running) -> None:
    """Eight prompts of just under a block: each needs a second one soon, and only nine are there."""
    text = "Count:"
    while tokens_of(small, text) < BLOCK - 6:
        text += " one"

    def crowd(_: int = 0) -> None:
        together(small, [f"{text} {number}" for number in range(8)], 12)

    crowd()  # the first time is slower
    once = small.seconds_of(crowd)
    assert metric(small, "vllm:num_preemptions_total") > 0, "the test does not do what it says"
    with driving(crowd):
        report = doctor(small, max(6, 1.5 * once))
    finding = found(report)["preemption"]
    assert finding["do"][0].startswith("--max-num-seqs ")
    assert report["is_kv"].startswith("yes")
    assert report["verdict"] == "tune"

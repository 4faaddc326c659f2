"""Recall by meaning with a real endpoint: llama.cpp's `/v1/embeddings`, with the chat model that the tests have.

SmolLM2 was not trained for embeddings; the mean of its states is enough to tell a vehicle from a lease. How well it ranks
recorded sessions is in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import time
import urllib.parse

import pytest
from tests.conftest import ROOT, fetch, free_port, process, wait_for

from kvsteward.engines.embedded import default_model

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(300)]

FACTS = (
    "The automobile stands in row 14 of the garage.",
    "Our physician is Ms Okonkwo on the third floor.",
    "The lease ends in September, the landlord said.",
    "A puppy was seen near the gate at noon.",
)


@contextlib.contextmanager
def embeddings(tmp_path):
    port, log = free_port(), tmp_path / "embeddings.log"
    command = [sys.executable, str(ROOT / "tests" / "e2e" / "embeddings_server.py"), str(default_model()), str(port)]
    with process(command, log) as child:
        wait_for(f"http://127.0.0.1:{port}/health", child, 60, log)
        yield f"http://127.0.0.1:{port}/v1"


def rows(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "log.db")) as db:
        return db.execute("SELECT count(*), min(length(vector)), max(length(vector)) FROM vectors").fetchone()


def until(condition, within_s=90.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


def test_what_was_said_in_other_words_is_found(serve, tmp_path):
    with embeddings(tmp_path) as url:
        gateway = serve("--engine", "scripted", "--embeddings", url, "--embeddings-model", "smollm2")
        history = []
        for text in FACTS:
            history.append({"role": "user", "content": text})
            history.append(gateway.chat(history, session="s")["choices"][0]["message"])
        until(lambda: rows(tmp_path)[0] == 2 * len(FACTS))
        assert rows(tmp_path)[1:] == (0, 2 * 576), "two bytes for each dimension of SmolLM2; 'ok' has none"
        ask = "/v1/sessions/s/recall?" + urllib.parse.urlencode({"query": "which vehicle"})
        found = gateway.get(ask)
        assert found["search"] == "fused"
        assert found["text"].split("\n")[1] == FACTS[0]
    # The endpoint is gone: words alone, and no error.
    found = gateway.get("/v1/sessions/s/recall?query=third+floor")
    assert found["search"] == "words: unavailable"
    assert FACTS[1] in found["text"]
    assert 'kvsteward:recall_searches_total{outcome="unavailable"} 1.0' in gateway.get("/metrics")
    fetch(f"{gateway.url}/v1/sessions/s", method="DELETE")
    assert rows(tmp_path)[0] == 0


def test_a_model_must_be_named(tmp_path):
    with process([sys.executable, "-m", "kvsteward", "serve", "--engine", "scripted", "--embeddings", "http://x"],
                 tmp_path / "log.txt") as child:  # fmt: skip
        assert child.wait(60) == 1
    assert "--embeddings-model" in (tmp_path / "log.txt").read_text()

"""Recall in front of a real engine: what left the view 80 turns ago can still be had."""

from __future__ import annotations

import urllib.parse

import pytest

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]


def test_a_value_of_eighty_turns_ago(engine, serve):
    gateway = serve("--engine", engine.option, "--budget", "1024", "--recall", "--summary", "extractive")
    history = [{"role": "system", "content": "You keep a diary."}]
    for turn in range(84):  # the engine answers every twelfth turn: the session is as long, the test is not
        told = "The vault's code is QX-4711-77 and its guard is Ms Okonkwo. " if turn == 2 else ""
        history.append({"role": "user", "content": f"{told}Entry {turn}: the weather was plain and nothing broke."})
        if turn % 12 != 11:
            history.append({"role": "assistant", "content": f"Entry {turn} is noted."})
            continue
        answer = gateway.chat(history, session="s", max_tokens=2, temperature=0)
        assert "choices" in answer, answer
        history.append(answer["choices"][0]["message"])
        assert "kvsteward_recall" not in str(answer)
    view = gateway.get("/v1/sessions/s/view")
    assert view["dropped_messages"] > 100
    whole = "The vault's code is QX-4711-77 and its guard is Ms Okonkwo. Entry 2"
    assert whole not in str(view["messages"][-6:])
    query = urllib.parse.quote("who guards the vault: Okonkwo?")
    found = gateway.get(f"/v1/sessions/s/recall?query={query}&limit=300")
    assert whole in found["text"]
    by_hash = gateway.get(f"/v1/sessions/s/recall?hash={found['hashes'][0][:10]}")
    assert whole in by_hash["text"]
    entry = gateway.get(f"/v1/sessions/s/items/{found['hashes'][0][:10]}")
    assert entry["message"] == history[5]

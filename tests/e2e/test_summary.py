"""Summaries in the background on real engines: a small model writes them, so most are not fit to be shown."""

from __future__ import annotations

import time

import pytest

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]


def user(text):
    return {"role": "user", "content": text}


def metrics(gateway):
    lines = gateway.get("/metrics").splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[:1] not in {"#", ""}}


def of(found, outcome):
    return found.get(f'kvsteward:summaries_total{{outcome="{outcome}"}}', 0.0)


def test_a_summary_is_prepared_judged_and_told(engine, serve):
    gateway = serve("--engine", engine.option, "--budget", "1024")
    history = [{"role": "system", "content": "You keep the books of a small shop. Answer in one short sentence."}]
    session = {}
    for turn in range(40):
        history.append(user(f"Invoice INV-{turn:05d} over {turn * 17 + 101} EUR came in from Okonkwo Ltd. Note it."))
        answer = gateway.chat(history, session="books", max_tokens=8, temperature=0)
        assert "choices" in answer, answer
        history.append(answer["choices"][0]["message"])
        if gateway.get("/v1/sessions/books")["tokens_in_view"] > 800:  # a draft is due from about 750 on
            deadline = time.monotonic() + 90
            while time.monotonic() < deadline:
                found = metrics(gateway)
                if of(found, "prepared") + of(found, "failed"):
                    break
                time.sleep(0.2)
        session = gateway.get("/v1/sessions/books")
        if session["compactions"]:
            break
    assert session["compactions"] == 1
    found = metrics(gateway)
    assert of(found, "prepared") == 1, found
    verdict = gateway.get("/v1/sessions/books/view")["summary"]
    assert verdict["outcome"] in {"used", "repaired", "replaced"}
    assert of(found, verdict["outcome"]) == 1
    assert bool(verdict["reason"]) == (verdict["outcome"] != "used")
    assert session["tokens_prefilled_again"] == found["kvsteward:compaction_prefill_tokens_total"]
    assert session["tokens_prefilled_again"] < session["tokens_in_view"]
    text = "\n".join(str(m["content"]) for m in gateway.get("/v1/sessions/books/view")["messages"])
    assert "INV-00000" in text or gateway.get("/v1/sessions/books/log?q=INV-00000")["data"]


def test_selective_is_refused_where_the_engine_cannot(llama_server, serve):
    with pytest.raises(AssertionError, match="llama-server engine does not give them"):
        serve("--engine", llama_server.option, "--selective", "0.5")

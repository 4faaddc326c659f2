"""The figures of a demonstration: the JSON object's shape, its arithmetic, the chart."""

from __future__ import annotations

import orjson
from rich.console import Console

from kvsteward.lab.demo.outcome import Facts, Outcome, Pass, TurnCost
from kvsteward.lab.demo.show import page
from kvsteward.wire.usage import Usage


def outcome() -> Outcome:
    through = Pass([TurnCost(1, Usage(100, 0, 10), 0.2)], ["HTTP 400: too long"], 1.0)
    managed = Pass([TurnCost(n, Usage(100 * n, 90 * n, 10), n / 10) for n in (1, 2, 3)], [], 2.0)
    facts = Facts()
    for kind, where in (("number", "in_view"), ("number", "recallable"), ("path", "in_view"), ("path", "lost")):
        facts.count(kind, where)
    return Outcome("scripted", 3, 400, through, managed, compactions=1, log_tokens=900, facts=facts)


def test_the_json_object_has_the_promised_keys_and_figures() -> None:
    found = orjson.loads(orjson.dumps(outcome().as_json()))
    assert found["budget_tokens"] == 400
    assert found["passthrough"]["completed_turns"] == 1
    assert found["passthrough"]["error"] == "HTTP 400: too long"
    managed = found["managed"]
    assert managed["completed_turns"] == 3
    assert managed["interruptions"] == 0
    assert managed["max_resident_tokens"] == 310
    assert managed["compactions"] == 1
    assert (managed["prompt_tokens"], managed["cached_tokens"], managed["cached_ratio"]) == (600, 540, 0.9)
    assert (managed["ttft_ms_p50"], managed["ttft_ms_p95"]) == (200.0, 290.0)
    facts = found["facts"]
    assert {k: facts[k] for k in ("probed", "in_view", "recallable", "lost")} == {
        "probed": 4,
        "in_view": 2,
        "recallable": 1,
        "lost": 1,
    }
    assert facts["by_kind"]["path"] == {"probed": 2, "in_view": 1}


def test_what_was_not_measured_is_null() -> None:
    found = Outcome("scripted", 3, 400, Pass(), Pass(), 0, 0, Facts()).as_json()
    assert found["managed"]["max_resident_tokens"] is None
    assert found["managed"]["ttft_ms_p50"] is None
    assert found["managed"]["cached_ratio"] is None
    assert found["facts"]["in_view_ratio"] is None


def test_the_table_shows_both_modes() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(outcome().table())
    text = capture.get()
    assert "passed through" in text
    assert "310" in text


def test_the_chart_needs_nothing_from_a_network() -> None:
    html = page(outcome())
    assert "budget: 400 tokens" in html
    assert "<script src=" not in html
    assert html.count("Plotly.newPlot") >= 1

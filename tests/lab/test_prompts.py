"""Where consecutive prompts first differ, and what changes there."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.errors import ConfigError
from kvsteward.lab.prompts import compare_prompts, read_requests

RULES = "You are a coding agent. Follow the rules of the house. " * 12
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("read", "write", "search")]
Body = dict[str, Any]


def session(turns: int, system: Callable[[int], str] = lambda _: RULES) -> list[Body]:
    history: list[dict[str, str]] = []
    bodies = []
    for turn in range(turns):
        history = [*history, {"role": "user", "content": f"Step {turn}: look at module {turn * 31}. " * 5}]
        bodies.append({"tools": TOOLS, "messages": [{"role": "system", "content": system(turn)}, *history]})
        history = [*history, {"role": "assistant", "content": f"Module {turn * 31} holds the parser. " * 5}]
    return bodies


CHANGING = {
    "a date or time": lambda turn: f"Now: 2026-11-29T18:{turn:02}:07Z. {RULES}",
    "an id": lambda turn: f"Request 5f3c9a{turn:02x}e1b2. {RULES}",
    "a billing line": lambda turn: f"x-anthropic-billing-header: cc_version=2.1; cch=a{turn:03x};\n{RULES}",
    "a number": lambda turn: f"Turn {turn}.\n{RULES}",
}


def test_a_session_that_only_grows_has_no_break() -> None:
    report = compare_prompts(session(6))
    assert (report.requests, report.followed, report.breaks) == (6, 5, ())


@pytest.mark.parametrize("kind", CHANGING)
def test_a_front_that_changes(kind: str) -> None:
    report = compare_prompts(session(5, CHANGING[kind]))
    assert report.followed == 4
    assert [found.kind for found in report.breaks] == [kind] * 4
    assert all(found.part == "message 1 (system)" for found in report.breaks)
    assert all(found.reusable_ratio < 0.5 for found in report.breaks)
    first = report.breaks[0]
    texts = [CHANGING[kind](turn) for turn in (0, 1)]
    assert texts[0][: first.position] == texts[1][: first.position]
    assert texts[0][first.position] != texts[1][first.position]


def test_tools_in_another_order() -> None:
    bodies = session(3)
    bodies[1]["tools"] = [TOOLS[1], TOOLS[0], TOOLS[2]]
    report = compare_prompts(bodies[:2])
    assert [(found.part, found.kind) for found in report.breaks] == [("tool 1", "the order of the tools")]


def test_other_tools() -> None:
    bodies = session(2)
    bodies[1]["tools"] = TOOLS[:2]
    assert [found.kind for found in compare_prompts(bodies).breaks] == ["the tools themselves"]


def test_a_history_that_is_rewritten() -> None:
    bodies = session(6)
    messages = bodies[5]["messages"]
    bodies[5]["messages"] = [messages[0], {"role": "user", "content": "Summary: parser found."}, *messages[-5:]]
    kinds = [found.kind for found in compare_prompts(bodies[4:]).breaks]
    assert kinds == ["a history that is rewritten (compaction)"]


def test_interleaved_sessions_are_told_apart() -> None:
    one = session(4)
    other = session(4, lambda _: "Quite another assistant, for the garden and the house. " * 12)
    other = [
        {"messages": [{**m, "content": m["content"].replace("odule", "lant")} for m in b["messages"]]} for b in other
    ]
    mixed = [body for pair in zip(one, other, strict=True) for body in pair]
    report = compare_prompts(mixed)
    assert (report.followed, report.breaks) == (6, ())


def test_prompts_with_nothing_in_common_are_not_followed() -> None:
    bodies = [{"messages": [{"role": "user", "content": chr(97 + i) * 400}]} for i in range(5)]
    assert compare_prompts(bodies).followed == 0


def test_it_stays_quick() -> None:
    bodies = session(1, lambda _: RULES * 500) * 1
    bodies = [copy.deepcopy(bodies[0]) for _ in range(200)]
    started = time.perf_counter()
    assert compare_prompts(bodies).breaks == ()
    assert time.perf_counter() - started < 20


@given(st.lists(st.text(max_size=40), min_size=1, max_size=8))
def test_whatever_grows_at_its_end_never_breaks(texts: list[str]) -> None:
    history: list[dict[str, str]] = [{"role": "system", "content": RULES}]
    bodies = []
    for text in texts:
        history = [*history, {"role": "user", "content": text}]
        bodies.append({"messages": history})
    assert compare_prompts(bodies).breaks == ()


def test_requests_of_a_file() -> None:
    lines = b"\n".join(orjson.dumps(body) for body in session(2)).decode() + "\n\n"
    assert [len(body["messages"]) for body in read_requests(lines)] == [2, 4]


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "x"}', "3"])
def test_a_line_that_is_no_request_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        read_requests('{"messages": []}\n' + line)

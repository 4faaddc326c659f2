"""What the recall tool says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsteward.context.marks import Policy
from kvsteward.context.recall import TOOL, TOOL_NAME, Ask, Hit, compose, parse_ask, with_room, with_tool
from kvsteward.context.tokens import Estimator

E = Estimator()


def hit(text, hash_="ab" * 16, **fields):
    return Hit(hash_, 7, {"role": "tool", "content": text, **fields})


@pytest.mark.parametrize(
    ("arguments", "ask"),
    [
        ('{"hash": "3f2a91c0de"}', Ask(hash="3f2a91c0de")),
        ('{"hash": "- 3F2A91C0DE look_up"}', Ask(hash="3f2a91c0de")),
        ('{"query": " order 7 "}', Ask(query="order 7")),
        ('{"hash": "the order"}', Ask(query="the order")),
        ('{"hash": "3f2a91c0de", "range": "120-180"}', Ask(hash="3f2a91c0de", lines=(120, 180))),
        ('{"hash": "3f2a91c0de", "range": "9"}', Ask(hash="3f2a91c0de", lines=(9, 9))),
        ('{"hash": "3f2a91c0de", "range": "9-2"}', Ask(hash="3f2a91c0de", lines=(9, 9))),
        ('{"hash": "3f2a91c0de", "query": "x"}', Ask(hash="3f2a91c0de", query="x")),
    ],
)
def test_arguments_are_understood(arguments, ask):
    assert parse_ask(arguments) == ask


@pytest.mark.parametrize(
    "arguments", ["", "{", "[]", "null", '{"query": " "}', '{"hash": "3f2a91c0de", "range": "all"}']
)
def test_arguments_that_make_no_sense_are_answered(arguments):
    assert isinstance(parse_ask(arguments), str)


def test_a_short_message_comes_back_as_it_was():
    text = compose(Ask(hash="ab" * 5), [hit("code 4711\nline two")], {"ab" * 16: 'look_up {"id": 1}'}, 200, E)
    assert text == f'[{"ab" * 4} look_up {{"id": 1}}, message 7, 2 lines]\ncode 4711\nline two'


def test_a_long_message_is_shortened_around_the_query():
    lines = [f"row {n}: nothing of note happened here" for n in range(2000)]
    lines[1234] = "row 1234: the valve ZX-81 broke"
    text = compose(Ask(query="valve ZX-81"), [hit("\n".join(lines))], {}, 300, E)
    assert "the valve ZX-81 broke" in text
    assert E.text(text) <= 300


def test_lines_are_counted_from_one():
    text = compose(Ask("ab" * 8, lines=(3, 4)), [hit("\n".join("abcdef"))], {}, 200, E)
    assert text.splitlines()[1:] == ["c", "d"]
    assert "lines 3-4 of 6" in text
    assert "no such lines" in compose(Ask("ab" * 8, lines=(30, 40)), [hit("\n".join("abcdef"))], {}, 200, E)


def test_calls_are_shown():
    call = {"id": "c", "type": "function", "function": {"name": "open_gate", "arguments": '{"gate": 3}'}}
    found = Hit("cd" * 16, 2, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert 'open_gate({"gate": 3})' in compose(Ask(query="gate"), [found], {}, 200, E)


def test_nothing_found_is_said():
    assert "Nothing" in compose(Ask(query="x"), [], {}, 200, E)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=3000), max_size=8), st.integers(48, 600))
def test_no_answer_passes_its_limit(texts, limit):
    hits = [hit(text, f"{n:032x}") for n, text in enumerate(texts)]
    assert E.text(compose(Ask(query="a b"), hits, {}, limit, E)) <= limit


def test_the_tool_stands_after_the_clients():
    look = {"type": "function", "function": {"name": "look"}}
    assert with_tool([look]) == [look, TOOL]
    assert with_tool(None) == [TOOL]
    assert json.loads(json.dumps(TOOL))["function"]["name"] == TOOL_NAME


@given(st.integers(512, 200_000), st.one_of(st.none(), st.integers(1, 100_000)))
def test_marks_leave_room_for_one_text(budget, output):
    marks = with_room(Policy().marks(budget, output))
    assert 0 < marks.low < marks.high
    assert marks.high + min(marks.tool_limit, marks.hard - 1) <= marks.hard

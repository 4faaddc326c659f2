"""What counts as a value, where it stands, and which message it is put down to."""

from __future__ import annotations

import pytest

from kvsteward.context.distill.salience import whole_values
from kvsteward.context.layout import Item
from kvsteward.context.lines import _brief, _first_sentence
from kvsteward.context.memory import collect, stands_in, values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"age": 41, "first_name": "Mia", "fare": 1002}, {"seat": "12A"}', ["1002", "Mia", "12A"]),
        ('{"1008292230": {"price": 23.5}}', ["1008292230", "23.5"]),
        ("it's a one-way trip, I'd say; she said 'never mind'", ["never mind"]),
        ("{'user_id': 'mia_li_3668'}", ["mia_li_3668"]),
        ("run `make all` in /srv/app on 2024-05-20", ["/srv/app", "2024-05-20", "make all"]),
    ],
)
def test_values_are_what_is_told_not_the_names_of_fields(text, expected):
    assert values(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it cost 1,250 euros, then $1,234,567.89 (2,000 more)", ["1,250", "$1,234,567.89", "2,000"]),
        ("sold 12,345.", ["12,345"]),
        ("[100,200,300]", ["100", "200", "300"]),
        ("id,100,200\n100,200,abc", ["100", "200"]),
        ("port 8080,443", ["8080", "443"]),
    ],
)
def test_a_number_with_commas_between_thousands_is_one_value(text, expected):
    assert values(text) == expected
    assert list(dict.fromkeys(whole_values(text))) == expected


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [
        ("109", "1099, 2109", False),
        ("109", "1099, 109.", True),
        ("$305", "was $305 in all", True),
        ("a.py", "data.py", False),
        ("x()", "x()y", True),
    ],
)
def test_a_value_stands_in_a_text_only_as_a_whole_word(value, text, expected):
    assert stands_in(value, text) is expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"reservation_id": "K67C4W"}', "K67C4W"),
        ('{"origin":"JFK","day":3,"tags":["a"]}', 'origin=JFK, day=3, tags=["a"]'),
        ('{"command": "ls -l\\n  /srv"}', "ls -l /srv"),
        ("{}", ""),
        ("[1, 2]", "[1, 2]"),
        ('{"broken', '{"broken'),
    ],
)
def test_a_label_tells_the_arguments_without_marks(arguments, expected):
    assert _brief(arguments) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<format>\nI will look at a.py now.\nThen more.", "I will look at a.py now."),
        ("```\nls\n```", ""),
        ("", ""),
    ],
)
def test_the_first_sentence_says_something(text, expected):
    assert _first_sentence(text) == expected


def test_what_a_call_names_is_put_down_to_its_result():
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"id": "K67C4W"}'}}
    asked = Item("a" * 64, 1, {"role": "assistant", "content": None, "tool_calls": [call]}, 9, 9)
    told = Item("b" * 64, 2, {"role": "tool", "tool_call_id": "c1", "content": '{"gate": "HAT080"}'}, 9, 9)
    facts = {fact.value: fact for fact in collect([asked, told], (), ())}
    assert facts["K67C4W"].source == told.hash
    assert facts["HAT080"].source == told.hash
    assert facts["K67C4W"].score > facts["HAT080"].score

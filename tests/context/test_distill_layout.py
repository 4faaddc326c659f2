"""JSON laid out as lines and tables: shorter, and the value can be read back from it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsteward.context.distill.layout import laid_out
from kvsteward.context.layout import View
from kvsteward.context.marks import Policy
from kvsteward.context.memory import values
from kvsteward.context.pipeline import Arrival, admit
from kvsteward.context.tokens import Estimator

ORDER = {
    "order_id": "#W6779827",
    "user_id": "ethan_lopez_6291",
    "paid": True,
    "note": "",
    "zip": "43282",
    "address": {"city": "Columbus", "state": "OH", "lines": ["141 Cedar Avenue", "Suite 436"]},
    "items": [
        {"name": "Hiking Boots", "id": "1615379700", "price": 253.89, "spare": None},
        {"name": "a|b", "id": "true", "price": -1, "spare": "x"},
    ],
}
LAID = """order_id: #W6779827
user_id: ethan_lopez_6291
paid: true
note: ""
zip: "43282"
address:
 city: Columbus
 state: OH
 lines: ["141 Cedar Avenue","Suite 436"]
items[2] name|id|price|spare:
Hiking Boots|"1615379700"|253.89|null
"a\\u007cb"|"true"|-1|x"""


def read(text: str) -> Any:
    """The value that a laid-out text stands for."""
    lines = text.split("\n")
    if found := re.fullmatch(r"\[(\d+)\] (.+):", lines[0]):
        return table(lines[1:], int(found[1]), found[2])
    value, rest = fields(lines, 0)
    assert not rest
    return value


def fields(lines: list[str], depth: int) -> tuple[dict[str, Any], list[str]]:
    value: dict[str, Any] = {}
    while lines and len(lines[0]) - len(lines[0].lstrip(" ")) == depth:
        line, lines = lines[0][depth:], lines[1:]
        quoted = re.match(r'"(?:[^"\\]|\\.)*"', line)
        name = quoted.group() if quoted else re.match(r"[^:\[|]+", line).group()  # type: ignore[union-attr]
        rest = line[len(name) :]
        key = json.loads(name) if quoted else name
        if found := re.fullmatch(r"\[(\d+)\] (.+):", rest):
            value[key] = table(lines, int(found[1]), found[2])
            lines = lines[int(found[1]) :]
        elif rest == ":":
            value[key], lines = fields(lines, depth + 1)
        else:
            value[key] = cell(rest.removeprefix(": "))
    return value, lines


def table(lines: list[str], rows: int, columns: str) -> list[dict[str, Any]]:
    return [dict(zip(columns.split("|"), map(cell, line.split("|")), strict=True)) for line in lines[:rows]]


def cell(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def test_an_answer_as_lines_and_tables():
    assert laid_out(json.dumps(ORDER)) == LAID
    assert read(LAID) == ORDER


TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "1",
            "-",
            "-2",
            "1e5",
            "01",
            "null",
            "NaN",
            "-Infinity",
            "a|b",
            "a: b",
            "[1]",
            '"',
            " x",
            "x ",
            "\u2028",
            "",
            "x[2] a:",
        ]
    ),
)
SCALAR = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), TEXT)
KEY = st.one_of(st.sampled_from(["id", "name", "a b", "a:b", "x[1]", "", "1"]), st.text(max_size=6))
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEY, inner, max_size=4),
        st.lists(st.fixed_dictionaries({"id": SCALAR, "n m": inner}), min_size=1, max_size=3),
    ),
    max_leaves=15,
)


@settings(max_examples=200)
@given(st.one_of(st.dictionaries(KEY, VALUE, min_size=1, max_size=5), st.lists(VALUE, max_size=4)))
def test_the_value_can_be_read_back(value):
    text = laid_out(json.dumps(value))
    assert text is None or read(text) == value
    if isinstance(value, dict):
        assert text is not None


@pytest.mark.parametrize(
    "text", ["", "  ", "[]", "{}", "[1, 2]", '{"a": 1', '{\n"a": 1}', "plain", '"text"', "[" * 9_000]
)
def test_what_is_no_answer_in_one_line_stays(text):
    assert laid_out(text) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"id": 12345678901234567890123}',
        '{"price": 1.50}',
        '{"a": 1, "a": 2}',
        '{"a": 1E5}',
        '{"a": "\\ud800"}',
        '{"a": "\ud800"}',
    ],
)
def test_what_would_be_written_otherwise_stays(text):
    assert laid_out(text) is None


def test_numbers_in_strings_are_text():
    assert laid_out('{"id": "12345678901234567890123", "price": "1.50", "n": 9007199254740993, "f": 0.1}') == (
        'id: "12345678901234567890123"\nprice: "1.50"\nn: 9007199254740993\nf: 0.1'
    )


def test_what_a_reader_of_json_knows_beyond_json_is_quoted_in_strings():
    assert laid_out('{"a": "NaN", "b": "-Infinity", "c": "Infinity", "d": "nan", "e": "NaNo"}') == (
        'a: "NaN"\nb: "-Infinity"\nc: "Infinity"\nd: nan\ne: NaNo'
    )


def test_names_of_fields_and_columns_are_no_values():
    found = set(values(LAID))
    assert found >= {"#W6779827", "ethan_lopez_6291", "43282", "1615379700", "253.89", "Columbus", "Hiking Boots"}
    assert not found & {"order_id", "user_id", "city", "name", "price", "spare", "items[2] name"}


def result(content: str) -> Arrival:
    return Arrival("ab" * 32, 3, {"role": "tool", "tool_call_id": "c1", "content": content})


def test_a_result_within_its_limit_is_laid_out_once_and_says_how_to_get_it_back():
    order = json.dumps({**ORDER, "items": ORDER["items"] * 4})
    estimator = Estimator()
    (item,), (reduction,) = admit(View(), [result(order)], Policy().marks(32_768, None), estimator)
    text, _, note = item.text.rpartition("\n")
    assert read(text) == json.loads(order)
    assert note == "[kvsteward: JSON as lines and tables, nothing left out; as it came: abababab]"
    assert item.tokens < 0.85 * item.log_tokens
    assert (reduction.kind, reduction.text) == ("distil", item.text)


@pytest.mark.parametrize(
    "content",
    [json.dumps({"id": 7}), json.dumps(ORDER, indent=1), json.dumps({"text": "a long text " * 60}), "no JSON " * 99],
)
def test_what_would_not_get_much_shorter_stays_as_it_came(content):
    (item,), reductions = admit(View(), [result(content)], Policy().marks(32_768, None), Estimator())
    assert item.text == content
    assert reductions == []

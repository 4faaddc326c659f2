"""What each kind keeps."""

from __future__ import annotations

import json

import pytest

from kvsteward.context.distill.base import Hints
from kvsteward.context.distill.literal import parse
from kvsteward.context.distill.meter import pieces
from kvsteward.context.distill.registry import distil

NONE = Hints()


def test_a_literal_is_read_cut_off_and_with_calls() -> None:
    parsed = parse("[('a', Decimal('1.50'), datetime.date(2023, 5, 7), None), ('b\\'c', 2, ")
    assert parsed is not None and not parsed.complete
    assert [[str(cell) for cell in row] for row in parsed.value] == [["a", "1.50", "2023-05-07", "None"], ["b'c", "2"]]


def test_a_literal_that_is_not_one_is_refused() -> None:
    assert parse("(a}") is None
    assert parse("hello") is None


def test_a_colon_or_comma_in_a_string_is_no_sign() -> None:
    parsed = parse("{'a:b': 'c,d', ',': ':'}")
    assert parsed is not None and parsed.value == {"a:b": "c,d", ",": ":"}


def test_all_ids_of_a_table_stay_when_rows_must_go() -> None:
    rows = [
        {"order_id": f"W{i * 7919 % 100000:05d}", "text": f"row of words {i} " * 12, "note": "y" * 80}
        for i in range(60)
    ]
    found = distil(json.dumps(rows), 700, NONE, pieces).text
    assert all(row["order_id"] in found for row in rows)


def test_sql_rows_in_one_line_are_named_by_their_query_and_reduced() -> None:
    text = repr([(f"City{i}", i * 977 % 90000, "somewhere") for i in range(500)])
    hints = Hints(
        question="which is largest", arguments=json.dumps({"query": "SELECT Name, Population, Where_ FROM city"})
    )
    found = distil(text, 400, hints, pieces).text
    assert "\n" not in text and pieces(found) <= 400 < pieces(text)
    assert "Name" in found and "every row: Where_=somewhere" in found
    assert "City0" in found


def test_what_was_asked_of_a_status_is_in_64_tokens() -> None:
    status = {
        "device": {
            "id": "pump-2231", "firmware": {"version": "4.18.2", "channel": "stable"},
            "battery": {"charge_percent": 81, "temperature_celsius": 31.4},
            "options": {f"option_{i}": i * 31 % 700 for i in range(200)},
            "sensors": [{"name": f"s{i}", "value": i * 1.5, "unit": "bar"} for i in range(60)],
        }
    }  # fmt: skip
    assert pieces(json.dumps(status)) >= 3_200
    for question, answer in {
        "How warm is it, what is the battery temperature?": "31.4",
        "Which firmware version does pump-2231 run?": "4.18.2",
        "What does sensor s41 say?": "61.5",
        "Read option_137 please": str(137 * 31 % 700),
    }.items():
        found = distil(json.dumps(status), 64, Hints(question=question), pieces)
        assert answer in found.text, (question, found.text)
        assert pieces(found.text) <= 64


CITIES = [{"name": f"City{i}", "code": f"C{i * 7919 % 9973:04d}", "people": i * 977 % 90000} for i in range(600)]


@pytest.mark.parametrize(
    "text",
    [
        repr([tuple(city.values()) for city in CITIES]),
        json.dumps(CITIES, separators=(",", ":")),
        "name,code,people\n" + "\n".join(",".join(map(str, city.values())) for city in CITIES),
    ],
    ids=["rows in one line", "minified JSON", "CSV"],
)
def test_rows_are_reduced_however_they_are_written(text: str) -> None:
    """To a seventh, with the rows that were named and both ends of the table."""
    limit = pieces(text) // 7
    found = distil(text, limit, Hints(question="How many people has City377?"), pieces)
    assert pieces(found.text) <= limit
    assert "City377" in found.text and str(377 * 977 % 90000) in found.text
    assert "City0" in found.text and "City599" in found.text
    assert found.note


def test_a_mentioned_row_stays() -> None:
    rows = [{"sku": f"k{i}", "price": i * 3, "words": "lorem ipsum dolor " * 3} for i in range(900)]
    found = distil(json.dumps(rows), 300, Hints(mentions=frozenset({"k613"})), pieces).text
    assert "k613|1839" in found or "sku: k613" in found


def test_the_error_of_a_log_stays_with_both_ends() -> None:
    lines = [f"2026-11-29 10:00:{i % 60:02d} INFO request {i} took {i % 17} ms" for i in range(3_000)]
    lines[1_500] = "2026-11-29 10:25:00 ERROR database db-7 refused the connection: code 53300"
    found = distil("\n".join(lines), 200, NONE, pieces).text
    assert lines[1_500] in found and "request 0 " in found and "request 2999 " in found


def test_the_exception_and_own_frames_of_a_trace_stay() -> None:
    foreign = "".join(
        f'  File "/usr/lib/python3.11/site-packages/lib/m{i}.py", line {i}, in call\n    step()\n' for i in range(80)
    )
    own = 'Traceback (most recent call last):\n  File "/app/orders.py", line 88, in place\n    pay(order)\n'
    text = f'{own}{foreign}KeyError: "card_8283"\n'
    found = distil(text, 120, NONE, pieces)
    assert found.kind == "trace"
    assert 'KeyError: "card_8283"' in found.text and "/app/orders.py" in found.text


def test_a_diff_keeps_its_files() -> None:
    text = "".join(
        f"diff --git a/src/part{i}.py b/src/part{i}.py\nindex 12..34\n"
        f"--- a/src/part{i}.py\n+++ b/src/part{i}.py\n@@ -1,9 +1,9 @@\n"
        + " context line here\n" * 9 + f"-old_{i}()\n+new_{i}()\n"
        for i in range(20)
    )  # fmt: skip
    found = distil(text, 450, NONE, pieces).text
    assert all(f"src/part{i}.py" in found for i in range(20))


def test_all_names_of_a_listing_stay_if_they_fit() -> None:
    paths = [f"./packages/application/source/components/part{i // 20}/view_{i}.tsx" for i in range(100)]
    found = distil("\n".join(paths), pieces("\n".join(paths)) // 2, NONE, pieces).text
    assert all(path.rsplit("/", 1)[1] in found for path in paths)


def test_a_table_says_ranges_and_ids() -> None:
    text = "id,city,temperature\n" + "\n".join(f"st{i},Town {i % 7},{i * 13 % 97}.5" for i in range(400))
    found = distil(text, 900, NONE, pieces).text
    assert "min 0.5" in found and "max 96.5" in found


def test_html_keeps_headings_links_and_cells_not_scripts() -> None:
    text = "<html><head><title>Prices</title><script>var secret_1=1</script></head><body><h1>Fares</h1>"
    text += "".join(f"<tr><td>R{i}</td><td>{i * 10}</td></tr>" for i in range(2)) + "<a href='/book/77'>book</a>"
    found = distil(text + "<p>filler words here</p>" * 400, 150, NONE, pieces).text
    assert "Fares" in found and "/book/77" in found and "secret_1" not in found


def test_a_blob_is_named_and_hashed() -> None:
    text = "QUJDREVGR0g=" * 900
    found = distil(text, 100, NONE, pieces)
    assert found.kind == "blob" and "base64, 10800 chars" in found.text and "sha256" in found.text


def test_repeated_lines_are_said_once_with_their_number() -> None:
    text = "\n".join(f"ls: cannot access 'file_{i}': No such file or directory" for i in range(100))
    found = distil(text, 650, NONE, pieces).text
    assert found.count("No such file") < 30 and sum(f"file_{i}" in found for i in range(100)) == 100

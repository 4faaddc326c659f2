"""The definition of facts: by hand, and against the definition that lies beside the recordings."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.lab.demo import facts as ours

SHARED = Path(__file__).resolve().parents[3] / "shared"
ROUND = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "sql", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("mail ann.lee@example.org today", "ann.lee@example.org", "email"),
        ("see https://example.org/a?b=1.", "https://example.org/a?b=1", "url"),
        ("open ./src/main.c now", "./src/main.c", "path"),
        ("edit setup.cfg!", "setup.cfg", "file"),
        ("on 2026-03-04 10:20", "2026-03-04 10:20", "date"),
        ("at 0x7fFe", "0x7fFe", "hex"),
        ("costs 1,250.50 EUR", "1,250.50", "number"),
        ("order ORD-48007 is", "ORD-48007", "identifier"),
        ('say "two words" to', "two words", "quotation"),
    ],
)
def test_each_kind_of_value(text: str, value: str, kind: str) -> None:
    assert ours.values(text)[value] == kind


def test_plain_words_and_small_numbers_are_no_values() -> None:
    assert ours.values("There were 12 plain words, nothing else") == {}


def test_a_value_counts_only_as_a_whole_word() -> None:
    assert ours.has("the id is ORD-48.", "ORD-48")
    assert not ours.has("the id is ORD-487", "ORD-48")
    assert not ours.has("xORD-48", "ORD-48")


def test_a_fact_is_older_than_two_rounds_and_not_repeated_since() -> None:
    history = [{"role": "user", "content": "order ORD-48007 and C-3105"}, *ROUND, *ROUND]
    reply = calling('{"query": "SELECT * FROM items WHERE order_id = \'ORD-48007\'"}')
    assert ours.facts([*history, reply], len(history), {"sql"}) == {"ORD-48007": "identifier"}
    repeated = [*history[:-1], {"role": "user", "content": "ORD-48007 please"}]
    assert ours.facts([*repeated, reply], len(repeated), {"sql"}) == {}
    assert ours.facts([*history[:3], reply], 3, {"sql"}) == {}


def test_a_value_inside_a_longer_fact_does_not_count_twice() -> None:
    history = [{"role": "user", "content": "on 2026-03-04 in src/a_b.py"}, *ROUND, *ROUND]
    reply = {"role": "assistant", "content": "2026-03-04: src/a_b.py"}
    assert set(ours.facts([*history, reply], len(history), set())) == {"2026-03-04", "src/a_b.py"}


@given(st.text(), st.text(min_size=1, max_size=12), st.text())
def test_a_value_between_spaces_is_always_found(before: str, value: str, after: str) -> None:
    assert ours.has(f"{before} {value} {after}", value)


@pytest.mark.shared_data
def test_agrees_with_the_definition_beside_the_recordings() -> None:
    path = SHARED / "tools" / "context_facts.py"
    files = sorted((SHARED / "data" / "agent").glob("*.jsonl"))
    if not path.is_file() or not files:
        pytest.skip("the recorded conversations are not beside the repository (../shared/data/agent)")
    spec = spec_from_file_location("context_facts", path)
    assert spec and spec.loader
    theirs = module_from_spec(spec)
    spec.loader.exec_module(theirs)
    compared = 0
    for file in files:
        for line in file.read_bytes().splitlines()[:2]:
            conversation = orjson.loads(line)
            messages = conversation["messages"][:60]
            names = {t.get("function", t).get("name") for t in conversation.get("tools") or ()}
            for at in (i for i, m in enumerate(messages) if m["role"] == "assistant"):
                expected = theirs.facts(messages, at, names)
                assert set(ours.facts(messages, at, names)) == set(expected)
                compared += len(expected)
            assert ours.view(messages) == theirs.view(messages)
    assert compared > 100

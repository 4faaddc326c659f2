"""The condensed block grows at its end, says nothing twice, and marks what no longer holds."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any, ClassVar

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsteward.context import block, summary
from kvsteward.context.block import Leaving, condense
from kvsteward.context.layout import Epoch, Item, Verdict, View, derive
from kvsteward.context.lines import extract
from kvsteward.context.marks import Policy
from kvsteward.context.pipeline import Arrival, Summarise, decode_epoch, encode_epoch, prepare
from kvsteward.context.summary import Sources
from kvsteward.context.tokens import Estimator

SYSTEM = {"role": "system", "content": "You are a careful clerk. Never guess an id."}
EXTRACTIVE = Policy(summary="extractive")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def looked_up(number: int, row: str) -> tuple[dict[str, Any], dict[str, Any]]:
    function = {"name": "look_up", "arguments": json.dumps({"order": f"W{number:07d}"})}
    calls = [{"id": f"c{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}, {
        "role": "tool",
        "tool_call_id": f"c{number}",
        "content": row,
    }


def worked(chat: Any, compactions: int, first: str = "Find the parcels of sara_doe_496.") -> list[View]:
    """A clerk's session, until it was compacted so often: the view of each compaction."""
    views: list[View] = []
    chat.say(SYSTEM)
    number = 0
    while len(views) < compactions:
        number += 1
        calls, row = looked_up(
            number, f"parcel 1Z{number:06d}, {number * 137} grams, to Oslo on 2026-03-{number:02d}. " * 4
        )
        prepared = [chat.say(user(first if number == 1 else f"What about order W{number:07d}, the next of the list?"))]
        chat.answer(calls)
        prepared.append(chat.say(row))
        chat.answer(said(f"Order W{number:07d} is on its way with 1Z{number:06d}."))
        views += [p.view for p in prepared if p.epoch]
    return views


def begins_with(after: View, before: View) -> bool:
    """Whether a view begins with all that stood in another one through its condensed block."""
    front = len(before.pinned)
    a, b = after.render(), before.render()
    return list(a[:front]) == list(b[:front]) and str(a[front]["content"]).startswith(f"{before.epoch.block}\n")


def test_a_compaction_leaves_the_block_of_the_one_before(session):
    views = worked(session(4096, EXTRACTIVE), 5)
    assert [v.epoch.sections for v in views] == [0, 1, 0, 1, 0]
    for before, after in pairwise(views):
        assert begins_with(after, before) == (after.epoch.sections > 0)


def test_a_section_says_what_is_new_and_nothing_again(session):
    before, after = worked(session(4096, EXTRACTIVE), 2)
    section = after.epoch.block.removeprefix(f"{before.epoch.block}\n")
    lines = section.splitlines()
    assert lines[:2] == ["[kvsteward] Condensed later:", "Asked since:"]
    assert after.epoch.dropped > before.epoch.dropped
    assert f"Of the {after.epoch.dropped - before.epoch.dropped} messages that left since:" in lines
    assert not {line for line in lines if line.startswith("- ")} & set(before.epoch.block.splitlines())
    shown = [fact for fact in after.epoch.facts if f", {fact.value}" in section or f": {fact.value}" in section]
    assert shown, "there are values in it"
    assert [fact.value for fact in shown if fact.value in before.epoch.block] == []


@pytest.mark.parametrize(("many", "sections"), [(4, 1), (60, 0)], ids=["few", "many"])
def test_a_block_of_stale_lines_is_written_anew_once_more_new_values_than_a_section_holds_are_worth_it(many, sections):
    """1,000 tokens of room, 800 of which are taken by a text without a value."""
    block = "[kvsteward] Earlier messages are condensed here.\n" + "and so it went on for a long while " * 90
    before = Epoch(through=1, block=block, block_tokens=800, dropped=1)
    rows = [f"parcel 1Z{n:06d} weighs {n * 137 + 100} grams" for n in range(many)]
    dropped = [Item(f"{n:064x}", n, user(row), 20, 20) for n, row in enumerate(rows, 2)]
    view = View((), before, tuple(dropped))
    epoch = condense(Leaving(view, dropped, (), (), (), None, ()), 1_000, 2_000, Estimator())
    assert epoch.sections == sections
    assert epoch.block.startswith(block) == bool(sections)
    assert epoch.block.count("1Z") >= min(many, 20)


def test_a_replaced_list_is_struck_and_the_new_one_stands_word_for_word(session):
    chat = session(4096, EXTRACTIVE)
    old, new = "- [ ] weigh the parcels\n- [ ] call Oslo", "- [ ] weigh the parcels"  # the new is part of the old
    chat.say(SYSTEM, user("Find the parcels of sara_doe_496."))
    chat.answer(said(old))
    blocks: list[str] = []
    while len(blocks) < 2:
        prepared = chat.say(user("What about the next order? " + "Look at it closely. " * 12))
        blocks += [prepared.epoch.block] if prepared.epoch else []
        chat.answer(said(new if len(blocks) == 1 and said(new) not in chat.log else "It is on its way."))
    section = blocks[1].removeprefix(f"{blocks[0]}\n")
    assert section != blocks[1]
    assert f"word for word:\n{old}\n" in blocks[0]
    assert f"From the assistant (plan, to-do list, promises), word for word:\n{new}\n" in section
    assert "No longer valid, done or replaced by a newer one:\n* - [ ] weigh the parcels - [ ] call Oslo\n" in section


def test_decisions_of_before_there_were_sections_are_read_and_appended_to(session):
    chat = session(4096, EXTRACTIVE)
    (before,) = worked(chat, 1)
    payload = orjson.loads(encode_epoch(before.epoch))
    del payload["sections"]
    old: Epoch = decode_epoch(orjson.dumps(payload))
    assert old == before.epoch
    path = [*before.pinned, *before.items]
    assert derive(path, [(path[-1].hash, old)], {}).render() == before.render()
    after = None
    while after is None:
        prepared = chat.say(user("What about the others? " * 12))
        after = prepared.view if prepared.epoch else None
        chat.answer(said("They are on their way. " * 6))
    assert begins_with(after, before)


def test_the_engine_is_asked_for_what_came_since_and_its_lines_are_kept_together(session):
    chat = session(4096, summary=json.dumps({"facts": ["Order W0000001 is on its way.", "The parcels go to Oslo."]}))
    views = worked(chat, 3)
    questions = [str(q.messages[-1]["content"]) for q in chat.asked if isinstance(q, Summarise)]
    assert ["condensed before" in q for q in questions] == [False, True, True]
    assert [v.epoch.sections for v in views] == [0, 1, 0]
    assert [v.epoch.judged.outcome for v in views] == ["used", "replaced", "used"], "it said nothing new"
    assert views[1].epoch.judged.reason == "it says nothing new"
    for view in views:
        assert view.epoch.block.count("- The parcels go to Oslo.\n") == 1


_TEXT = st.text(st.sampled_from('abc 0123_/@.é{}[]":,-*\n'), max_size=500)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(_TEXT, _TEXT, st.sampled_from([1, 8])), min_size=8, max_size=30),
    budget=st.sampled_from([2048, 3000]),
)
def test_random_sessions_are_appended_to_or_written_anew(session, turns, budget):
    chat = session(budget, EXTRACTIVE)
    chat.say(SYSTEM)
    last: View | None = None
    for asked, answer, times in turns:
        prepared = chat.say(user(asked * times))
        if prepared.epoch:
            assert prepared.epoch.sections == 0 or (last is not None and begins_with(prepared.view, last))
            assert prepared.epoch.sections in {0, 1 + (last.epoch.sections if last else -1)}
            last = prepared.view
        chat.answer(said(answer))


def item(number: int, text: str) -> Item:
    return Item(f"{number:032x}", number, said(text), 50, 50)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- [ ] read the ledger\n- [ ] write the report", ""),
        ("My to-do list:\n- [x] read the ledger\n\n1. [ ] write the report\nThe ledger has a gap.", "The ledger has a gap."),
        ("This is what is left before the release:\n\n- [ ] write the report", ""),
        ("The ledger is read now.\n- [x] read the ledger\n- [ ] write the report", "The ledger is read now."),
        ("Here is the plan:\n1. Read the ledger.\n   All of it.\n2. Write it up.\nI begin with March.", "I begin with March."),
        ("There are three rivers:\n1. The Rhine is long.\n2. The Elbe is wide.", "There are three rivers:"),
        ("* [a link](https://x.example) to the ledger", "* [a link](https://x.example) to the ledger"),
    ],
)  # fmt: skip
def test_a_checklist_says_nothing_in_the_extractive_summary(text, line):
    made = extract("", [item(1, text)], 400, Estimator())
    assert made == (f"- {line}" if line else "")


def test_a_checklist_line_of_an_earlier_summary_is_not_carried_on():
    earlier = "- - [ ] read the ledger\n- The ledger has a gap.\n- [x] write the report"
    made = extract(earlier, [item(1, "March is done as well.")], 400, Estimator())
    assert made == "- The ledger has a gap.\n- March is done as well."


def test_of_checklists_the_newest_alone_is_in_view_and_not_as_a_summary(session):
    chat = session(4096, EXTRACTIVE)
    chat.say(SYSTEM)
    shown, newest = [], ""
    for number in range(60):
        prepared = chat.say(user(f"What about branch {number}? " + "It is one of many. " * 12))
        if prepared.epoch:
            shown.append((prepared.view, newest))
        months = (f"- [{'x' if month < number % 12 else ' '}] close the books of month {month}" for month in range(12))
        newest = "\n".join(months)
        chat.answer(said(f"{newest}\nBranch {number} has {number * 137} entries."))
    assert len(shown) > 3
    for view, newest in shown:
        assert "entries." in view.epoch.summary
        assert "close the books" not in view.epoch.summary
        assert newest in "\n".join(str(message["content"]) for message in view.render())


class Counting(Sources):
    """Counts how often the texts of a view are read, and how often each line is looked up in them."""

    read = 0
    lines: ClassVar[Counter[str]] = Counter()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        Counting.read += 1

    def has_all_of(self, line: str) -> bool:
        Counting.lines[line] += 1
        return super().has_all_of(line)


@pytest.mark.parametrize(("passes", "forms"), [(1, 2), (2, 3)], ids=["one pass", "a second, stricter pass"])
def test_a_draft_is_held_against_its_sources_once(session, monkeypatch, passes, forms):
    """Each pass tries a block that is written anew, and the first, which has the room for it, a section."""
    tried: list[Verdict] = []
    verify = block.verify
    monkeypatch.setattr(block, "verify", lambda *given, **named: tried.append(verify(*given, **named)) or tried[-1])
    monkeypatch.setattr(summary, "Sources", Counting)
    chat = session(4096, summary=json.dumps({"facts": ["The parcels go to Oslo.", "Order W0000001 is on its way."]}))
    worked(chat, 1)
    while chat.draft is None:
        chat.say(user("What about the others? " * 12))
        chat.answer(said("They are on their way. " * 6))
    marks = chat.policy.marks(4096, None)
    arrival = Arrival("f" * 32, chat.depth + 1, user("And now?"))
    questions = prepare(
        *(chat.view, [arrival]), tools=None, known_for="model", marks=marks, policy=chat.policy, estimator=Estimator(),
        draft=chat.draft, force=True,
    )  # fmt: skip
    tried.clear()
    Counting.read, Counting.lines = 0, Counter()
    counts = iter([marks.high + 1, *[marks.high + 1] * (passes - 1), marks.low])
    reply: Any = None
    with pytest.raises(StopIteration) as stop:
        while True:
            questions.send(reply)
            reply = next(counts)
    assert stop.value.value.epoch.judged.lines == 2
    assert len(tried) == forms
    assert Counting.read == 1
    assert set(Counting.lines.values()) == {1}
    assert Counting.lines["Order W0000001 is on its way."] == 1

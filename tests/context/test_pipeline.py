"""What must be true of a session's view, turn after turn."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsteward.context.layout import Verdict, cuts, derive
from kvsteward.context.marks import Policy
from kvsteward.context.pipeline import Count, Summarise, decode_epoch, encode_epoch
from kvsteward.errors import ConfigError, ContextOverflowError

SYSTEM = {"role": "system", "content": "You are a careful clerk. Never guess an id."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(call_id: str, name: str = "look_up", arguments: str = '{"id": 1}') -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def orphans(messages: list[Any]) -> list[str]:
    """Calls without results before the next message, and results without their call."""
    waiting: set[str] = set()
    found: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                found.append(f"result of {message['tool_call_id']} without its call")
            waiting.discard(message["tool_call_id"])
            continue
        if waiting:
            found.append(f"calls {waiting} without results")
        waiting = {c["id"] for c in message.get("tool_calls") or ()}
    return found


def test_short_session_is_passed_on_as_it_is(session):
    chat = session(4096)
    chat.say(SYSTEM, user("Hello"))
    chat.answer(said("Hello!"))
    chat.say(user("What is my name?"))
    assert chat.view.render() == chat.log
    assert chat.asked == [], "a short turn costs no round trip"


def test_view_only_grows_between_compactions(session):
    chat = session(2048)
    before: list[Any] = []
    compactions = 0
    chat.say(SYSTEM)
    for turn in range(60):
        prepared = chat.say(user(f"Question {turn}: what about order #W{turn:07d}? " + "Please be exact. " * 4))
        view = list(prepared.view.render())
        if prepared.epoch is None:
            assert view[: len(before)] == before
        else:
            compactions += 1
        before = view
        chat.answer(said(f"Order #W{turn:07d} was shipped on 2026-03-{turn % 28 + 1:02d}."))
    assert compactions >= 2


def test_prompt_and_answer_stay_inside_the_budget(session, engine_length):
    chat = session(1024, max_output=100)
    for turn in range(40):
        prepared = chat.say(user(f"{turn} " + "words and more words " * 12))
        assert engine_length(prepared.view.render()) <= 1024 - 100
        chat.answer(said("yes " * 60))


def test_system_messages_stay_byte_for_byte(session):
    chat = session(1024)
    chat.say(SYSTEM)
    for turn in range(30):
        prepared = chat.say(user(f"{turn} " + "lorem ipsum dolor " * 15))
        assert prepared.view.render()[0] is SYSTEM
        chat.answer(said("ok"))


def test_goal_and_values_of_dropped_turns_stay_in_view(session):
    chat = session(2048)
    chat.say(SYSTEM, user("Book a flight for customer sara_doe_496 under $1,200, never on a Friday."))
    chat.answer(call("c1", "get_user", '{"user_id": "sara_doe_496"}'))
    chat.say(result("c1", '{"reservation": "HAT214", "email": "sara@example.org", "miles": 48211}'))
    chat.answer(call("c2", "get_reservation", '{"code": "HAT214"}'))
    chat.say(result("c2", '{"flights": ["HAT300", "HAT208"], "total": 987}'))
    chat.answer(said("I have it."))
    while not chat.view.epoch.block:
        chat.say(user("Tell me more about the weather. " * 8))
        chat.answer(said("It is fine. " * 10))
    shown = str(chat.view.render())
    for value in ("sara_doe_496", "never on a Friday", "HAT214", "sara@example.org", "HAT300", "HAT208"):
        assert value in shown


def test_what_stands_first_in_the_condensed_part_outlives_a_compaction(session):
    """The engine has it cached: of two condensed parts, the later begins as the earlier did, with the whole Plan."""
    chat = session(2048)
    chat.say(SYSTEM, user("Find the cheapest flight to Oslo for sara_doe_496. Never book on a Friday."))
    chat.answer(said("I will look."))
    blocks: list[str] = []
    turn = 0
    while len(blocks) < 3:
        turn += 1
        prepared = chat.say(user(f"Turn {turn}: what about flight SK{turn:04d}? " + "Tell me more about it. " * 8))
        if prepared.epoch:
            blocks.append(prepared.epoch.block)
        chat.answer(said(f"Flight SK{turn:04d} is full on day {turn}. " * 3))
    for before, after in pairwise(blocks):
        same = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        assert "Never book on a Friday." in before[:same]


def test_last_rounds_stay_verbatim(session):
    chat = session(2048, Policy(keep_rounds=2))
    for turn in range(40):
        prepared = chat.say(user(f"Turn {turn}. " + "Some words to fill the page. " * 6))
        if prepared.epoch:
            tail = prepared.view.render()[-4:]
            assert [m["content"] for m in tail if m["role"] == "user"][-1].startswith(f"Turn {turn}.")
            assert sum(i.role == "assistant" for i in prepared.view.items) <= 2
            assert all(i.message in chat.log for i in prepared.view.items)
        chat.answer(said(f"Answer {turn}."))


def test_long_tool_result_is_reduced_once_on_entry(session):
    chat = session(4096)
    rows = [{"id": f"A{n:04d}", "price": n * 3, "note": "standard delivery within five days"} for n in range(400)]
    chat.say(SYSTEM, user("Which products cost more than 1,000?"))
    chat.answer(call("c1", "list_products", "{}"))
    prepared = chat.say(result("c1", str(rows).replace("'", '"')))
    (reduction,) = prepared.reductions
    assert reduction.kind == "distil"
    assert reduction.tokens_after <= prepared.marks.tool_limit + 20 < reduction.tokens_before
    shown = prepared.view.items[-1].text
    assert reduction.hash[:8] in shown, "the model is told how to get the whole text"
    chat.answer(said("Many."))
    again = chat.say(user("Thanks"))
    assert again.reductions == ()
    assert again.view.items[2].text == shown


def test_summary_is_asked_before_it_is_needed_by_appending_to_the_cached_prefix(session):
    chat = session(2048, summary=json.dumps({"intent": ["The user asks what about the order."]}))
    while not chat.view.epoch.block:
        chat.say(user("What about the order? " * 12))
        prompt = list(chat.view.render())
        due = not chat.draft
        chat.answer(said("It is on its way. " * 6))
        if due and chat.draft:
            question = next(q for q in chat.asked if isinstance(q, Summarise))
            assert list(question.messages[:-2]) == prompt
            assert [m["role"] for m in question.messages[-2:]] == ["assistant", "user"]
            assert question.schema is not None
    assert sum(isinstance(q, Summarise) for q in chat.asked) == 1
    assert "The user asks what about the order." in chat.view.epoch.block
    assert chat.view.epoch.judged.outcome == "used"


def test_a_draft_covers_what_leaves_and_the_rest_is_extracted(session):
    chat = session(2048, summary='{"facts": ["The order of turn 1 was shipped."]}')
    turn = 0
    while not chat.view.epoch.block:
        turn += 1
        chat.say(user(f"Turn {turn}: what about the order? " + "Please say it again. " * 6))
        if turn == 4:
            chat.answer(said("The order of turn 1 was shipped."))
            chat.prepare_summary()
            assert chat.draft.through == 7, "the newest answer is not covered"
        else:
            chat.answer(said(f"This is answer {turn}."))
    summary = chat.view.epoch.summary
    assert summary.count("The order of turn 1 was shipped.") == 1
    assert "This is answer 12." in summary, "as many of the newest as fit"
    assert "This is answer 2." not in summary


def test_a_draft_of_another_history_is_late(session):
    chat = session(2048, summary='{"facts": ["about the order"]}')
    while not chat.view.epoch.block:
        chat.say(user("What about the order? " * 12))
        chat.answer(said("It is on its way. " * 6))
        if chat.draft:
            chat.draft = replace(chat.draft, at="0" * 64)
    assert chat.view.epoch.judged == Verdict("late", "none was ready")
    assert "It is on its way." in chat.view.epoch.summary


@pytest.mark.parametrize(
    ("summary", "outcome"),
    [(None, "late"), ("", "replaced"), ("word " * 2000, "replaced"), ("Parcel 1Z999AA1 came. " * 3, "replaced")],
)
def test_no_or_a_bad_summary_is_replaced_by_an_extractive_one(session, summary, outcome):
    chat = session(2048, summary=summary)
    while not chat.view.epoch.block:
        chat.say(user("What about the order? " * 12))
        chat.answer(said("Parcel 1Z999AA10123456784 is on its way. " * 4))
    assert "Parcel 1Z999AA10123456784 is on" in chat.view.epoch.summary
    assert "word word word" not in chat.view.epoch.block
    assert chat.view.epoch.judged.outcome == outcome
    assert decode_epoch(encode_epoch(chat.view.epoch)) == chat.view.epoch


def test_engine_is_asked_for_a_count_only_near_the_mark(session):
    chat = session(16_384)
    for turn in range(20):
        chat.say(user(f"Turn {turn}: a short question."))
        chat.answer(said("A short answer."))
    assert not chat.asked


def test_an_engine_that_cannot_count_is_served_by_the_estimate(session, engine_length):
    chat = session(1024, counts=False)
    for turn in range(40):
        prepared = chat.say(user(f"{turn} " + "words " * 40))
        assert not prepared.exact
        assert engine_length(prepared.view.render()) <= prepared.marks.hard
        chat.answer(said("ok"))


def test_what_cannot_fit_is_refused_with_the_numbers(session):
    chat = session(512)
    with pytest.raises(ContextOverflowError, match="512"):
        chat.say({"role": "system", "content": "rule " * 2000}, user("hi"))


def test_a_huge_newest_message_is_shortened_not_refused(session, engine_length):
    chat = session(1024)
    prepared = chat.say(SYSTEM, user("Read this: " + "The quick brown fox jumps over the lazy dog. " * 800))
    assert engine_length(prepared.view.render()) <= prepared.marks.hard


def test_many_results_of_one_message_are_shortened_until_they_fit(session, engine_length):
    chat = session(2048)
    calls = [call(f"c{n}")["tool_calls"][0] for n in range(12)]
    chat.say(SYSTEM, user("Look at all of them"))
    chat.answer({"role": "assistant", "content": None, "tool_calls": calls})
    prepared = chat.say(*(result(f"c{n}", f"row {n}: " + "value 12345 and more text " * 40) for n in range(12)))
    assert engine_length(prepared.view.render()) <= prepared.marks.hard
    assert orphans(list(prepared.view.render())) == []


def test_forced_compaction_shortens_a_view_that_the_engine_refused(session, engine_length):
    chat = session(4096)
    for turn in range(10):
        chat.say(user(f"{turn} " + "words " * 60))
        chat.answer(said("ok " * 40))
    before = engine_length(chat.view.render())
    prepared = chat.say(user("next"), force=True)
    assert prepared.epoch is not None
    assert engine_length(prepared.view.render()) < before


def test_other_tools_make_the_count_invalid(session):
    chat = session(4096)
    chat.say(user("hello " * 50))
    chat.answer(said("hello"))
    assert chat.view.known_tokens
    assert chat.view.for_tools("other").known_tokens == 0


def test_epoch_survives_its_encoding(session):
    chat = session(1024)
    for turn in range(20):
        chat.say(user(f"Order #W{turn:05d} " + "words " * 30))
        chat.answer(said("noted"))
    epoch = chat.view.epoch
    assert epoch.block
    assert decode_epoch(encode_epoch(epoch)) == epoch


def test_view_is_derived_again_from_log_and_decisions(session):
    chat = session(1024)
    epochs: list[Any] = []
    path: list[Any] = []
    for turn in range(30):
        prepared = chat.say(user(f"Order #W{turn:05d} " + "words " * 30))
        path.append(prepared.view.items[-1])
        if prepared.epoch:
            epochs.append((path[-1].hash, decode_epoch(encode_epoch(prepared.epoch))))
        chat.answer(said(f"noted {turn}"))
        path.append(chat.view.items[-1])
    assert len(epochs) >= 2
    assert derive(path, epochs, {}).render() == chat.view.render()


@pytest.mark.parametrize(
    ("low", "high"), [(0.5, 0.5), (0.0, 0.5), (0.9, 0.8), (0.5, 1.2)], ids=["equal", "zero", "crossed", "over"]
)
def test_marks_in_the_wrong_order_are_refused(low, high):
    with pytest.raises(ConfigError, match="low"):
        Policy(low_water_ratio=low, high_water_ratio=high)


# -- random sessions ------------------------------------------------------------------------------------------------

_TEXT = st.text(st.sampled_from('abc 0123_/.@é{}[]":,\n'), max_size=400)


@st.composite
def rounds(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """A session as an agent makes it: user turns, answers, calls with one or more results, in any mix."""
    script: list[list[dict[str, Any]]] = []
    count = 0
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["talk", "call", "calls"]))
        if kind == "talk":
            script.append([user(draw(_TEXT)), said(draw(_TEXT))])
            continue
        ids = [f"c{count + n}" for n in range(1 if kind == "call" else draw(st.integers(2, 4)))]
        count += len(ids)
        opening = [user(draw(_TEXT))] if draw(st.booleans()) or not script else []
        calls = {"role": "assistant", "content": None, "tool_calls": [call(i)["tool_calls"][0] for i in ids]}
        results = [result(i, draw(_TEXT) * draw(st.sampled_from([1, 20]))) for i in ids]
        script.append([*opening, calls, *results])
    return script


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=rounds(), budget=st.sampled_from([512, 1024, 3000]))
def test_random_sessions_never_split_a_call_nor_pass_the_budget(session, engine_length, script, budget):
    length = engine_length
    chat = session(budget)
    chat.say(SYSTEM)
    waiting: list[dict[str, Any]] = []
    for message in [m for part in script for m in part]:
        if message["role"] != "assistant":
            waiting.append(message)
            continue
        _check(chat, waiting, length)
        chat.answer(message)
        waiting = []
    _check(chat, waiting, length)


def _check(chat: Any, waiting: list[dict[str, Any]], length: Any) -> None:
    try:
        prepared = chat.say(*waiting)
    except ContextOverflowError as error:
        pytest.fail(f"nothing here is too long to be shortened: {error}")
    view = list(prepared.view.render())
    assert orphans(view) == []
    assert length(view) <= prepared.marks.hard
    assert view[0] is SYSTEM
    assert prepared.view.render()[-1]["role"] == (waiting[-1]["role"] if waiting else view[-1]["role"])


@given(script=rounds())
def test_cuts_never_stand_between_a_call_and_its_results(script):
    from kvsteward.context.layout import Item

    flat = [Item(str(n), n + 1, m, 1, 1) for n, m in enumerate(m for part in script for m in part)]
    for index in cuts(flat):
        assert orphans([item.message for item in flat[index:]]) == []


def test_questions_are_the_only_way_to_the_engine(session):
    chat = session(1024)
    for turn in range(20):
        chat.say(user(f"{turn} " + "words " * 40))
        chat.answer(said("ok"))
    assert {type(q) for q in chat.asked} <= {Count, Summarise}

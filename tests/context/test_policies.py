"""Policies in YAML: read, checked by field, printed and read again."""

from __future__ import annotations

import dataclasses

import pytest

from kvsteward.context.hygiene import RULES
from kvsteward.context.marks import Policy
from kvsteward.context.policies import dump_policy, load_policy, parse_policy, presets, with_options
from kvsteward.errors import ConfigError, ContextOverflowError

WHOLE = """
about: For the test.
compact: true
summary: extractive
answer_tokens: 99
marks: {high: 0.7, low: 0.2, block: 0.1, memory_price: 0.03}
plan: {by_rules: true, goal: false, promises: 0, patterns: ['SLA']}
fact: {keep: ['#W\\d{7}']}
trace: {verbatim_rounds: 5, tool_limit_tokens: 64, reduce: false, selective: 0.5}
hygiene:
  tools: false
  default_rules: false
  rules: [{name: build, match: '^build', note: false}]
"""


ASKS = """
plan: {unsure: engine}
trace: {prose: engine}
"""


def user(text, given=None):
    return {"role": "user", "content": text} | ({"kvsteward": {"class": given}} if given else {})


def said(text):
    return {"role": "assistant", "content": text}


def test_every_field_is_read():
    policy = parse_policy(WHOLE)
    assert (policy.high_water_ratio, policy.low_water_ratio, policy.block_ratio) == (0.7, 0.2, 0.1)
    assert (policy.memory_price, policy.selective) == (0.03, 0.5)
    assert (policy.summary, policy.answer_tokens, policy.keep_rounds) == ("extractive", 99, 5)
    assert (policy.tool_limit_tokens, policy.reduce, policy.keep) == (64, False, (r"#W\d{7}",))
    assert (policy.plan.goal, policy.plan.promises, policy.plan.patterns) == (False, 0, ("SLA",))
    assert [r.name for r in policy.hygiene.rules] == ["build"]
    assert policy.hygiene.tools is False


def test_the_defaults_are_those_of_the_program():
    assert parse_policy("{}") == Policy()
    assert parse_policy("about: x").hygiene.rules == RULES


def test_who_is_asked_is_read_and_nobody_by_default():
    policy = parse_policy(ASKS)
    assert (policy.plan.unsure, policy.prose) == ("engine", "engine")
    for quiet in (Policy(), *map(load_policy, presets())):
        assert (quiet.plan.unsure, quiet.prose) == ("rules", "extractive")
    printed = dump_policy(policy)
    assert "unsure: engine" in printed
    assert "prose: engine" in printed


@pytest.mark.parametrize("text", [WHOLE, ASKS, "{}", *presets().values()], ids=["whole", "asks", "empty", *presets()])
def test_what_is_printed_is_read_again(text):
    policy = parse_policy(text)
    assert parse_policy(dump_policy(policy)) == policy


def test_presets():
    assert list(presets()) == ["coding", "device-control", "legal", "support"]
    assert (load_policy("legal").compact, load_policy("legal").reduce) == (False, False)
    assert load_policy("legal").hygiene.enabled is False
    assert load_policy("device-control").tool_limit_tokens == 160
    assert all(load_policy(name).about for name in presets())


def test_a_file_may_begin_with_another(tmp_path):
    (tmp_path / "house.yaml").write_text("base: support\nplan: {promises: 1}\n")
    (tmp_path / "room.yaml").write_text("base: house.yaml\nmarks: {high: 0.9}\n")
    policy = load_policy("room.yaml", tmp_path)
    assert (policy.plan.promises, policy.high_water_ratio) == (1, 0.9)
    assert policy.plan.patterns == load_policy("support").plan.patterns
    (tmp_path / "loop.yaml").write_text("base: loop.yaml\n")
    with pytest.raises(ConfigError, match="bases end"):
        load_policy("loop.yaml", tmp_path)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("plan: {promisses: 1}", "plan.promisses"),
        ("plann: {}", "plann"),
        ("marks: {high: much}", "marks.high"),
        ("marks: {high: 0.3}", "marks"),
        ("trace: {verbatim_rounds: 0}", "keep_rounds"),
        ("trace: {tool_limit_tokens: 1.5}", "trace.tool_limit_tokens"),
        ("summary: maybe", "summary"),
        ("plan: {patterns: ['(']}", "plan.patterns"),
        ("plan: {unsure: maybe}", "plan.unsure"),
        ("plan: {unsure: engine, by_rules: false}", "plan.unsure"),
        ("base: legal\nplan: {unsure: engine}", "plan.unsure"),
        ("trace: {prose: model}", "trace.prose"),
        ("trace: {prose: engine, reduce: false}", "trace.prose"),
        ("trace: {prose: engine, selective: 0.3}", "trace.prose"),
        ("fact: {keep: ['[']}", "fact.keep"),
        ("plan: {patterns: [7]}", "plan.patterns[0]"),
        ("hygiene: {rules: [{name: a}]}", "hygiene.rules[0]"),
        ("hygiene: {rules: [{name: a, match: '('}]}", "hygiene.rules.a.match"),
        ("compact: perhaps", "compact"),
        ("base: nowhere", "nowhere"),
        ("- a", "mapping"),
        ("a: [", "YAML"),
    ],
)
def test_what_is_wrong_is_named(text, field):
    with pytest.raises(ConfigError) as error:
        parse_policy(text, "house.yaml")
    assert field in error.value.message
    assert "house.yaml" in error.value.message or field == "nowhere"
    assert error.value.hint


def test_a_policy_that_is_not_there_names_the_presets():
    with pytest.raises(ConfigError) as error:
        load_policy("suport")
    assert "support" in error.value.hint


def test_the_command_line_says_otherwise():
    policy = with_options(load_policy("device-control"), high_water_ratio=0.9, keep_rounds=None)
    assert (policy.high_water_ratio, policy.keep_rounds) == (0.9, 2)


# -- what they do ---------------------------------------------------------------------------------------------------


def test_legal_has_no_window(session):
    chat = session(1024, load_policy("legal"))
    long = "The tenant pays on the first. " * 60
    prepared = chat.say(user(long))
    assert prepared.reductions == ()
    chat.answer(said("Yes."))
    with pytest.raises(ContextOverflowError, match="condenses nothing") as error:
        chat.say(user(long))
    assert "1024" in error.value.message
    assert "larger budget" in error.value.hint
    assert chat.view.render() == chat.log[:2]


def test_values_that_a_policy_keeps_outlive_all_others(session):
    policy = dataclasses.replace(Policy(), keep=(r"\bzeta \w+\b",))
    chat = session(1024, policy)
    chat.say(user("Hello"))
    chat.answer(said("The word is zeta omicron, mind it."))
    epochs = 0
    for turn in range(60):
        epochs += (
            chat.say(user(f"Order #W{turn:07d} and id_{turn}_x of 2026-01-{turn % 28 + 1:02d}. " * 3)).epoch is not None
        )
        chat.answer(said("filed"))
    assert epochs >= 3
    assert "zeta omicron" in chat.view.epoch.block


def test_values_of_a_message_marked_as_fact_stay(session):
    chat = session(1024)
    chat.say(user("Hello"), user("My badge is QX-4711-77.", "fact"))
    for turn in range(60):
        chat.answer(said("filed " * 3))
        chat.say(user(f"Order #W{turn:07d} and id_{turn}_x of 2026-01-{turn % 28 + 1:02d}. " * 3))
    assert chat.view.epoch.dropped > 40
    assert "QX-4711-77" in chat.view.epoch.block

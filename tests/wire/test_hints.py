"""The sender's half of hints; what it makes, the receiver reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsteward.kv.vllm.hints import FIELD, parse
from kvsteward.policy.retention import WEIGHTS
from kvsteward.wire.hints import keeping, pausing, with_hint


@given(st.none() | st.floats(0, 1e6), st.sampled_from(sorted(WEIGHTS)), st.lists(st.text(max_size=200), max_size=40))
def test_the_connector_reads_what_the_gateway_says(ttl_s, priority, tools):
    told = parse(with_hint(None, {**keeping(ttl_s, priority), **pausing(tools)}))
    assert told.hint.priority == priority
    assert told.hint.ttl_s is None if ttl_s is None else told.hint.ttl_s <= ttl_s
    assert told.stop == "tool_calls"
    assert set(told.tools) <= set(tools)
    assert len(told.tools) == min(16, sum(len(tool) <= 128 for tool in tools))


def test_the_client_s_own_word_wins_and_its_other_keys_stay():
    params = {"do_remote_decode": True, "kvsteward": {"version": 1, "ttl_s": 5, "final": True}}
    assert with_hint(params, keeping(600, "batch")) == {
        "do_remote_decode": True,
        "kvsteward": {"version": 1, "class": "batch", "ttl_s": 5, "final": True},
    }
    assert with_hint({"other": 1}, keeping(None, "default")) == {
        "other": 1,
        FIELD: {"version": 1, "class": "default"},
    }


def test_a_client_does_not_speak_for_others():
    params = {"kvsteward": {"version": 1, "session": "theirs", "scope": "0f", "note": True, "moved": True}}
    assert with_hint(params, {"final": True}) == {"kvsteward": {"version": 1, "final": True}}


def test_a_note_names_a_session_by_its_salt_and_its_id():
    note = {"version": 1, "note": True, "final": True, "session": "s"}
    assert parse({FIELD: note}).stored == "s"
    assert parse({FIELD: {**note, "scope": "0123456789abcdef"}}).stored == "0123456789abcdef:s"
    assert parse({FIELD: {"version": 1, "scope": "0123456789abcdef"}}).stored == ""


def test_what_is_not_understood_is_left_as_it_is():
    for params in ("text", [1], {"kvsteward": "x"}, {"kvsteward": {"version": 2, "ttl_s": 1}}):
        assert with_hint(params, keeping(1, "default")) is None

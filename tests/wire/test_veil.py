"""What a client sees of an answer in which one tool is hidden."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.wire.answer import AnswerReader
from kvsteward.wire.sse import frame
from kvsteward.wire.veil import Veil


def chunk(delta, finish=None, id_="a", **fields):
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return frame(
        {"id": id_, "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **fields}
    )


def call(index, name="", arguments="", id_=None):
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"tool_calls": [{"index": index, "function": function, **({"id": id_} if id_ else {})}]}


def usage(prompt, cached, output, id_="a"):
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return frame({"id": id_, "choices": [], "usage": counts})


def shown(veil, *events):
    return [seen for event in events if (seen := veil.feed(event))]


def read(events):
    reader = AnswerReader()
    for event in events:
        reader.feed(event)
    return reader


def test_text_passes_byte_for_byte():
    events = [chunk({"role": "assistant", "content": ""}), chunk({"content": "hello"}), chunk({}, "stop")]
    veil = Veil("ours")
    assert shown(veil, *events) == events
    assert veil.end() == []


def test_our_call_alone_is_hidden_and_the_answer_goes_on():
    veil = Veil("ours")
    first = shown(
        veil,
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Let me look."}),
        chunk(call(0, "ours", "", "c1")),
        chunk(call(0, arguments='{"query":')),
        chunk(call(0, arguments='"x"}')),
        chunk({}, "tool_calls"),
        usage(100, 10, 5),
    )
    assert len(first) == 2
    (ours,) = veil.end()
    assert ours["function"] == {"name": "ours", "arguments": '{"query":"x"}'}
    veil.begin(more=True)
    second = shown(
        veil,
        chunk({"role": "assistant", "content": ""}, id_="b"),
        chunk({"content": "It is 7."}, id_="b"),
        chunk({}, "stop", id_="b"),
        usage(150, 100, 4, "b"),
    )
    assert veil.end() == []
    answer = read([*first, *second, veil.last_event()])
    assert answer.message() == {"role": "assistant", "content": "Let me look.\n\nIt is 7."}
    assert answer.finish == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens, answer.usage.output_tokens) == (250, 110, 9)
    assert {json.loads(e[6:])["id"] for e in [*first, *second]} == {"a"}


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_a_client_call_ours_is_stripped_and_the_others_renumbered(ours_first):
    veil = Veil("ours")
    names = ["ours", "theirs"] if ours_first else ["theirs", "ours"]
    events = [chunk(call(n, name, '{"a":1}', f"c{n}")) for n, name in enumerate(names)]
    answer = read(shown(veil, chunk({"role": "assistant"}), *events, chunk({}, "tool_calls")))
    assert veil.end() == []
    assert [c["function"]["name"] for c in answer.message()["tool_calls"]] == ["theirs"]
    assert answer.finish == "tool_calls"
    (fragment,) = (json.loads(e[6:])["choices"][0]["delta"]["tool_calls"][0] for e in [veil_event(names)])
    assert fragment["index"] == 0


def veil_event(names):
    """The one event in which the client's call is shown."""
    veil = Veil("ours")
    veil.feed(chunk({"role": "assistant"}))
    (event,) = shown(veil, *[chunk(call(n, name, "{}", f"c{n}")) for n, name in enumerate(names)])
    return event


def test_a_name_that_comes_late_is_waited_for():
    veil = Veil("ours")
    veil.feed(chunk({"role": "assistant"}))
    assert veil.feed(chunk(call(0, id_="c1"))) == b""
    seen = veil.feed(chunk(call(0, "theirs", "{")))
    assert [f.get("id") for f in json.loads(seen[6:])["choices"][0]["delta"]["tool_calls"]] == ["c1", None]


def test_the_last_round_ends_even_if_only_our_tool_is_called():
    veil = Veil("ours")
    veil.begin(more=False)
    answer = read(shown(veil, chunk({"content": "hm"}), chunk(call(0, "ours", "{}", "c1")), chunk({}, "tool_calls")))
    assert veil.end() == []
    assert answer.finish == "stop"
    assert "tool_calls" not in answer.message()


@given(
    st.lists(
        st.lists(st.sampled_from(["text", "ours", "theirs", "more", "call+finish"]), max_size=6), min_size=1, max_size=4
    )
)
def test_no_mix_shows_the_hidden_tool_or_two_ends(rounds):
    veil, seen = Veil("ours"), []
    for number, parts in enumerate(rounds):
        veil.begin(more=number < len(rounds) - 1)
        index = -1
        events = [chunk({"role": "assistant", "content": ""}, id_=str(number))]
        for part in parts:
            if part in {"ours", "theirs"}:
                index += 1
                events.append(chunk(call(index, part, "{", f"c{number}{index}"), id_=str(number)))
            elif part == "more" and index >= 0:
                events.append(chunk(call(index, arguments="}"), id_=str(number)))
            else:
                events.append(chunk({"content": "words "}, id_=str(number)))
        finish = "tool_calls" if index >= 0 else "stop"
        last = call(index, arguments=" ") if "call+finish" in parts and index >= 0 else {}
        seen += shown(veil, *events, chunk(last, finish, id_=str(number)))
        if not veil.end():
            break
    assert b"ours" not in b"".join(seen)
    answer = read(seen)
    assert answer.ended
    finishes = [c["choices"][0]["finish_reason"] for c in (json.loads(e[6:]) for e in seen)]
    assert sum(bool(f) for f in finishes) == 1
    assert (answer.finish == "tool_calls") == bool((answer.message() or {}).get("tool_calls"))

"""A streamed answer, put together again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.errors import EngineError
from kvsteward.wire import answer as module
from kvsteward.wire.answer import AnswerReader, is_usage_only
from kvsteward.wire.sse import DONE, frame
from kvsteward.wire.usage import Usage


def chunk(delta, *, index=0, finish=None, **more):
    choice = {"index": index, "delta": delta, "finish_reason": finish, **more}
    return frame(
        {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [choice]}
    )


def read(*events: bytes) -> AnswerReader:
    reader = AnswerReader()
    for event in events:
        reader.feed(event)
    return reader


def test_text_usage_and_finish():
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    reader = read(
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hel"}),
        b": keep-alive\n\n",
        chunk({"content": "lo"}, finish="stop"),
        frame({"id": "chatcmpl-1", "choices": [], "usage": usage}),
        DONE,
    )
    assert reader.message() == {"role": "assistant", "content": "Hello"}
    assert reader.usage == Usage(10, 8, 3)
    assert reader.usage.new_tokens == 2
    assert (reader.finish, reader.ended, reader.response_id) == ("stop", True, "chatcmpl-1")
    completion = reader.completion()
    assert completion["object"] == "chat.completion"
    assert completion["choices"][0]["message"]["content"] == "Hello"
    assert completion["usage"] == usage
    assert completion["model"] == "m"


def test_tool_calls_are_joined_by_index_whatever_their_order():
    reader = read(
        chunk({"role": "assistant", "content": None}),
        chunk(
            {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}}]}
        ),
        chunk(
            {
                "tool_calls": [
                    {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x"'}}
                ]
            }
        ),
        chunk(
            {
                "tool_calls": [
                    {"index": 0, "function": {"arguments": ":1}"}},
                    {"index": 1, "function": {"arguments": "{}"}},
                ]
            }
        ),
        chunk({}, finish="tool_calls"),
    )
    calls = reader.message()["tool_calls"]
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("a", "f", '{"x":1}'),
        ("b", "g", "{}"),
    ]
    assert reader.message()["content"] is None


def test_reasoning_logprobs_several_choices_and_engine_fields_are_kept():
    reader = read(
        chunk({"reasoning_content": "think "}, logprobs={"content": [{"token": "a"}]}),
        chunk({"reasoning_content": "more", "content": "x"}, logprobs={"content": [{"token": "b"}]}),
        chunk({"content": "second"}, index=1, finish="length"),
        chunk({}, finish="stop", stop_reason=42),
        frame({"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 1}, "timings": {"cache_n": 1}}),
    )
    first, second = reader.completion()["choices"]
    assert first["message"]["reasoning_content"] == "think more"
    assert first["logprobs"]["content"] == [{"token": "a"}, {"token": "b"}]
    assert first["stop_reason"] == 42
    assert (second["index"], second["message"]["content"], second["finish_reason"]) == (1, "second", "length")
    assert reader.completion()["timings"] == {"cache_n": 1}
    assert reader.usage == Usage(1, 1, 0)


def test_an_error_in_the_stream_is_seen():
    reader = read(chunk({"content": "Hel"}), frame({"error": {"message": "out of memory"}}), DONE)
    assert b"out of memory" in reader.failed
    assert reader.message()["content"] == "Hel"


def test_a_cut_stream_has_not_ended():
    assert not read(chunk({"content": "Hel"})).ended
    assert not read().ended
    assert read().message() is None


def test_half_an_event_and_garbage_are_passed_over():
    assert read(b"data: {broken\n\n", b"data: 7\n\n", chunk({"content": "x"})).message()["content"] == "x"


def test_usage_only_chunks_are_told_from_others():
    usage = {"prompt_tokens": 1}
    assert is_usage_only(frame({"choices": [], "usage": usage}))
    assert is_usage_only(b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n')
    assert not is_usage_only(chunk({"content": '"choices":[]'}))
    assert not is_usage_only(frame({"choices": []}))
    assert not is_usage_only(DONE)


def test_an_answer_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 200)
    with pytest.raises(EngineError, match="200 bytes"):
        read(*(chunk({"content": "x" * 100}) for _ in range(3)))


texts = st.text(alphabet=st.sampled_from('ab"\\\n{}[],:é'), max_size=4)
deltas = st.one_of(
    st.fixed_dictionaries({"content": texts}),
    st.fixed_dictionaries({"reasoning_content": texts}),
    st.fixed_dictionaries({"content": st.none(), "reasoning_content": texts}),
    st.just({"role": "assistant", "content": ""}),
    st.just({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"content":"x"}'}}]}),
)
chunks = st.builds(
    lambda delta, index, finish, more: chunk(delta, index=index, finish=finish, **more),
    deltas,
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([None, None, None, "stop"]),
    st.sampled_from([{}, {}, {"logprobs": {"content": [{"token": "a"}]}}, {"token_ids": [1]}]),
)
others = st.sampled_from(
    [
        b": keep-alive\n\n",
        frame({"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}),
        frame({"id": "chatcmpl-2", "model": "other", "choices": [{"index": 0, "delta": {"content": "z"}}]}),
        frame({"error": {"message": "x"}}),
        DONE,
    ]
)


@given(st.lists(st.one_of(chunks, chunks, chunks, others), max_size=24), st.integers(1, 24))
def test_an_event_taken_by_its_mould_says_what_it_says_alone(events, asked_every):
    quick, slow = AnswerReader(), AnswerReader()
    slow._moulds_left = 0
    for number, event in enumerate(events):
        for reader in (quick, slow):
            reader.feed(event)
            if number % asked_every == 0:
                reader.message()
    assert quick.completion() == slow.completion()
    assert (quick.message(), quick.usage, quick.finish, quick.ended, quick.failed) == (
        slow.message(), slow.usage, slow.finish, slow.ended, slow.failed,
    )  # fmt: skip


def test_a_stream_of_plain_text_is_taken_by_one_mould():
    reader = read(chunk({"role": "assistant", "content": ""}), *(chunk({"content": f"{i}\n"}) for i in range(50)))
    assert reader.message() == {"role": "assistant", "content": "".join(f"{i}\n" for i in range(50))}
    assert reader._mould is not None and len(reader._mould.pieces) == 1

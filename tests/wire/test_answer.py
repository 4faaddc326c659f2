"""A streamed answer, put together again."""

from __future__ import annotations

import pytest

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

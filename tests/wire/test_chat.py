"""What a request may look like, and what is said about one that may not."""

from __future__ import annotations

import orjson
import pytest

from kvsteward.errors import ProtocolError
from kvsteward.wire.chat import check_tool_pairs, encode, has_images, parse_chat, text_of

HELLO = [{"role": "user", "content": "hi"}]


def raw(**fields):
    return orjson.dumps({"model": "m", "messages": HELLO, **fields})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{not json", None),
        (b"[1,2]", None),
        (b"", None),
        (b"{}", "messages"),
        (raw(messages=[]), "messages"),
        (raw(messages="hi"), "messages"),
        (raw(messages=["hi"]), "messages[0]"),
        (raw(messages=[{"role": "robot", "content": "x"}]), "messages[0].role"),
        (raw(messages=[{"content": "x"}]), "messages[0].role"),
        (raw(messages=[{"role": "user", "content": 7}]), "messages[0].content"),
        (raw(messages=[{"role": "user", "content": ["x"]}]), "messages[0].content"),
        (raw(messages=[{"role": "assistant", "tool_calls": [{"function": {}}]}]), "messages[0].tool_calls"),
        (raw(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
        (raw(stream="yes"), "stream"),
        (raw(stream_options=[]), "stream_options"),
        (raw(model=7), "model"),
        (raw(max_tokens="many"), "max_tokens"),
        (raw(n=True), "n"),
    ],
)
def test_bad_requests_name_their_field(body, param):
    with pytest.raises(ProtocolError) as caught:
        parse_chat(body)
    assert caught.value.param == param
    assert caught.value.status == 400
    assert caught.value.hint


def test_unknown_fields_pass_through_untouched():
    fields = {"temperature": 0.3, "vllm_xargs": {"a": [1]}, "x_new": None, "logit_bias": {"5": -1}}
    sent = orjson.loads(encode(parse_chat(raw(**fields))))
    assert sent == {"model": "m", "messages": HELLO, **fields}


def test_a_stream_reports_its_usage_and_keeps_the_clients_options():
    request = parse_chat(raw(stream=True, stream_options={"continuous_usage_stats": True}))
    assert not request.wants_usage
    sent = orjson.loads(encode(request))
    assert sent["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


def test_own_fields_do_not_reach_the_engine():
    sent = orjson.loads(encode(parse_chat(raw(session_id="s", previous_response_id="r", kvsteward={}))))
    assert set(sent) == {"model", "messages"}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_capped_answer_keeps_the_clients_field(name):
    request = parse_chat(raw(**{name: 900}))
    assert request.max_output_tokens == 900
    assert orjson.loads(encode(request, max_tokens=50))[name] == 50


def test_orphan_tool_messages_are_refused():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    good = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": ""}]
    check_tool_pairs(good)
    with pytest.raises(ProtocolError, match="'c1'"):
        check_tool_pairs(good[1:])
    with pytest.raises(ProtocolError, match=r"messages\[0\]"):
        check_tool_pairs(good[::-1])


def test_images_and_text():
    image = {
        "role": "user",
        "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}],
    }
    assert has_images([image])
    assert not has_images(HELLO)
    assert text_of(image) == "see"
    assert text_of({"role": "assistant", "content": None}) == ""

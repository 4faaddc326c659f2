"""The class that a caller gives to a message: read, checked, and never shown to an engine or to a hash."""

from __future__ import annotations

import orjson
import pytest

from kvsteward.errors import ProtocolError
from kvsteward.wire.chat import class_of, encode, parse_chat
from kvsteward.wire.fingerprint import link, root

PLAIN = {"role": "user", "content": "My cat is called Tom."}


def body(*messages, **fields):
    return orjson.dumps({"messages": list(messages), **fields})


@pytest.mark.parametrize("given", ["plan", "fact", "trace"])
def test_a_message_says_its_class(given):
    (message,) = parse_chat(body({**PLAIN, "kvsteward": {"class": given}})).messages
    assert class_of(message) == given


def test_a_hash_does_not_cover_it():
    assert link(root(), {**PLAIN, "kvsteward": {"class": "plan"}}) == link(root(), PLAIN)


def test_a_request_says_the_class_of_its_messages():
    own = {**PLAIN, "kvsteward": {"class": "trace"}}
    answer = {"role": "assistant", "content": "ok"}
    request = parse_chat(body(PLAIN, answer, own, metadata={"kvsteward": {"class": "plan"}, "user": "u1"}))
    assert [class_of(m) for m in request.messages] == ["plan", None, "trace"]
    sent = orjson.loads(encode(request, messages=[PLAIN]))
    assert sent["metadata"] == {"user": "u1"}
    alone = parse_chat(body(PLAIN, metadata={"kvsteward": {"class": "plan"}}))
    assert "metadata" not in orjson.loads(encode(alone))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kvsteward": {"class": "plna"}}, "messages[0].kvsteward.class"),
        ({"kvsteward": {}}, "messages[0].kvsteward.class"),
        ({"kvsteward": {"class": ["plan"]}}, "messages[0].kvsteward.class"),
        ({"kvsteward": {"class": "plan", "keep": True}}, "messages[0].kvsteward"),
        ({"kvsteward": "plan"}, "messages[0].kvsteward"),
    ],
)
def test_what_is_no_class_is_refused_by_name(fields, named):
    with pytest.raises(ProtocolError) as error:
        parse_chat(body({**PLAIN, **fields}))
    assert error.value.param == named
    with pytest.raises(ProtocolError) as error:
        parse_chat(body(PLAIN, metadata=fields))
    assert error.value.param == named.replace("messages[0]", "metadata")

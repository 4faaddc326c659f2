"""Whose turn it is: one schema at a time, in a fixed order."""

from __future__ import annotations

import pytest

from kvsteward.errors import ProtocolError
from kvsteward.wire.identity import identify


@pytest.mark.parametrize(
    ("headers", "body", "how", "value"),
    [
        ({"x-session-id": "s"}, {"session_id": "b"}, "header", "s"),
        ({"x-claude-code-session-id": "s"}, {}, "header", "s"),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a1"}, {}, "header", "s/a1"),
        ({"session-id": "s", "thread-id": "t"}, {}, "header", "s/t"),
        ({"session_id": "s"}, {}, "header", "s"),
        ({"x-session-affinity": "s"}, {}, "header", "s"),
        ({"x-litellm-session-id": "s"}, {}, "header", "s"),
        ({"x-dynamo-session-id": "s"}, {}, "header", "s"),
        ({"x-smg-routing-key": "s"}, {}, "header", "s"),
        ({}, {"session_id": "b", "prompt_cache_key": "k"}, "body", "b"),
        ({}, {"vllm_xargs": {"session_id": "b"}}, "body", "b"),
        ({}, {"metadata": {"session_id": "b"}}, "body", "b"),
        ({}, {"previous_response_id": "r", "prompt_cache_key": "k"}, "previous_response_id", "r"),
        ({}, {"conversation": {"id": "c"}}, "conversation", "c"),
        ({}, {"prompt_cache_key": "k"}, "prompt_cache_key", "k"),
        ({}, {}, "fingerprint", ""),
    ],
)
def test_order_of_sources(headers, body, how, value):
    found = identify(headers, body)
    assert (found.how, found.value) == (how, value)


def test_two_schemas_are_never_mixed():
    found = identify({"x-claude-code-session-id": "s", "thread-id": "t"}, {})
    assert found.value == "s"


def test_a_request_id_is_not_a_session():
    assert identify({"x-request-id": "r", "x-correlation-id": "c"}, {"user": "u"}).how == "fingerprint"


@pytest.mark.parametrize("value", ["x" * 257, "a\x00b", "a\nb"])
def test_unusable_ids_are_refused(value):
    with pytest.raises(ProtocolError, match="x-session-id"):
        identify({"x-session-id": value}, {})

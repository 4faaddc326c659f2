"""Two histories of the same meaning have the same hashes; any other difference changes all hashes after it."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.wire.fingerprint import body_hash, chain, link, root

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 2, "a": 1}'}}


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a":1,"b":2}'}}],
                "refusal": None,
                "annotations": [],
            },
        ),
        ({"role": "assistant", "content": " Hello\n"}, {"role": "assistant", "content": "Hello"}),
        ({"role": "assistant", "content": "x", "reasoning_content": "hm"}, {"content": "x", "role": "assistant"}),
        ({"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}),
    ],
)
def test_what_clients_change_without_meaning_it(sent, echoed):
    assert link(root(), sent) == link(root(), echoed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, {"role": "tool", "content": "a", "tool_call_id": "2"}),
        ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [{**CALL, "id": "c2"}]}),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "b"}}]},
        ),
    ],
)
def test_what_differs(one, other):
    assert link(root(), one) != link(root(), other)


_MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=20)})


@given(history=st.lists(_MESSAGE, min_size=1, max_size=8), position=st.integers(0, 7))
def test_a_change_is_seen_in_every_later_hash(history, position):
    position %= len(history)
    edited = [dict(m) for m in history]
    edited[position]["content"] += "!x"
    before, after = list(chain(history)), list(chain(edited))
    assert before[:position] == after[:position]
    assert all(a != b for a, b in zip(before[position:], after[position:], strict=True))


def test_tenants_never_meet():
    message = {"role": "user", "content": "hi"}
    assert list(chain([message], tenant="a")) != list(chain([message], tenant="b"))


def test_body_hash_sees_every_byte():
    assert body_hash(orjson.dumps({"a": 1})) != body_hash(b'{"a": 1}')

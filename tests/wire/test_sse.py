"""The splitter hands on what came, whatever the cuts; the frames are read as the standard says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.errors import EngineError
from kvsteward.wire.sse import DONE, EventSplitter, data_of, frame

_EVENT = st.sampled_from(
    [
        b'data: {"a":1}\n\n',
        b": keep-alive\n\n",
        b"event: ping\ndata: x\ndata: y\n\n",
        b"data:tight\r\n\r\n",
        b"data: [DONE]\n\n",
    ]
)


@given(events=st.lists(_EVENT, max_size=20), cuts=st.lists(st.integers(1, 40), max_size=60))
def test_events_come_whole_whatever_the_cuts(events, cuts):
    stream = b"".join(events)
    splitter, found, start = EventSplitter(), [], 0
    for size in [*cuts, len(stream)]:
        found += splitter.feed(stream[start : start + size])
        start += size
    assert b"".join(found) + splitter.rest() == stream
    assert [data_of(e) for e in found] == [data_of(e) for e in events]


@given(stream=st.binary(max_size=300), cut=st.integers(1, 50))
def test_nothing_is_lost_or_added(stream, cut):
    splitter = EventSplitter()
    found = [e for i in range(0, len(stream), cut) for e in splitter.feed(stream[i : i + cut])]
    assert b"".join(found) + splitter.rest() == stream


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b'data: {"x":1}\n\n', b'{"x":1}'),
        (b"data:no-space\n\n", b"no-space"),
        (b"event: a\ndata: one\ndata: two\n\n", b"one\ntwo"),
        (b"data: crlf\r\n\r\n", b"crlf"),
        (b": comment\n\n", None),
        (b"event: only\n\n", None),
        (DONE, b"[DONE]"),
    ],
)
def test_data_of(event, data):
    assert data_of(event) == data


def test_an_event_without_end_is_bounded():
    splitter = EventSplitter(limit_bytes=100)
    splitter.feed(b"data: " + b"x" * 50)
    with pytest.raises(EngineError, match="100 bytes"):
        splitter.feed(b"x" * 60)


def test_frame_can_be_read_again():
    assert data_of(frame({"é": [1, None]})) == '{"é":[1,null]}'.encode()

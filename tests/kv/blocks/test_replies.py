"""The reader of Valkey's replies: the same answers as the client's own, however the bytes are cut."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest
import valkey
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsteward.kv.blocks.replies import BUFFER_BYTES, LARGE_BYTES, Replies

HEAD = 128
Closed = valkey.exceptions.ConnectionError


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def wire(value: object) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(wire, value))
    assert isinstance(value, bytes)
    return bulk(value)


def plain(value: object) -> object:
    if isinstance(value, memoryview):
        return bytes(value)
    return [plain(item) for item in value] if isinstance(value, list) else value


class Talk:
    """A reader on one end of a socket; the test says the rest."""

    def __init__(self, room_for=lambda head, length: None) -> None:
        self.other, self.mine = socket.socketpair()
        self.mine.settimeout(20)
        self.reader = Replies(room_for, HEAD, valkey.connection.DefaultParser.parse_error, Closed)
        self.reader.on_connect(SimpleNamespace(_sock=self.mine))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.other.close()
        self.mine.close()

    def say(self, data: bytes, pieces: int = 1 << 20) -> threading.Thread:
        def send() -> None:
            for start in range(0, len(data), pieces):
                self.other.sendall(data[start : start + pieces])

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        return thread


values = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
large = st.integers(LARGE_BYTES - 2, 3 * BUFFER_BYTES).map(lambda size: bytes([size % 251]) * size)


@settings(deadline=None, max_examples=60)
@given(several=st.lists(values | large, min_size=1, max_size=4), pieces=st.sampled_from([1000, 4099, 1 << 20]))
def test_values_come_back_as_they_were_sent(several, pieces):
    with Talk() as talk:
        thread = talk.say(b"".join(map(wire, several)), pieces)
        assert [plain(talk.reader.read_response()) for _ in several] == several
        thread.join(20)
        assert not talk.reader.can_read(0)


def test_a_large_value_is_read_into_the_room_that_its_head_asks_for():
    body = b"k" * HEAD + bytes(range(256)) * 2000
    room = memoryview(bytearray(len(body) + 10))
    asked = []

    def room_for(head, length):
        asked.append((bytes(head), length))
        return room

    with Talk(room_for) as talk:
        talk.say(bulk(body) + b":7\r\n")
        answer = talk.reader.read_response()
        assert answer.obj is room.obj
        assert bytes(answer) == body
        assert asked == [(b"k" * HEAD, len(body))]
        assert talk.reader.read_response() == 7


def test_a_value_that_nobody_wants_is_read_past():
    with Talk(lambda head, length: memoryview(b"")) as talk:
        talk.say(bulk(b"x" * 300_000) + b"+OK\r\n")
        assert talk.reader.read_response() == b""
        assert talk.reader.read_response() == b"OK"


def test_errors_are_the_client_s():
    with Talk() as talk:
        talk.say(b"-OOM no memory\r\n-WRONGTYPE x\r\n-ERR max number of clients reached\r\n*2\r\n:1\r\n-ERR in it\r\n")
        assert isinstance(talk.reader.read_response(), valkey.exceptions.OutOfMemoryError)
        assert isinstance(talk.reader.read_response(), valkey.exceptions.ResponseError)
        with pytest.raises(Closed):
            talk.reader.read_response()
        one, error = talk.reader.read_response()
        assert one == 1
        assert isinstance(error, valkey.exceptions.ResponseError)


@pytest.mark.parametrize(
    "said",
    [b"", b"$5\r\nab", b"$20000\r\n" + b"x" * 300, b":1", b"?what\r\n", b"$2\r\nabXX", b"x" * (BUFFER_BYTES + 1)],
)
def test_what_is_cut_or_no_reply_is_a_lost_connection(said):
    with Talk() as talk:
        thread = talk.say(said)
        thread.join(20)
        talk.other.shutdown(socket.SHUT_WR)
        with pytest.raises(Closed):
            talk.reader.read_response()


def test_a_reader_without_a_socket_says_so():
    with Talk() as talk:
        talk.reader.on_disconnect()
        with pytest.raises(Closed):
            talk.reader.read_response()
        with pytest.raises(Closed):
            talk.reader.can_read(0)


def test_can_read_sees_what_came_and_a_closed_socket():
    with Talk() as talk:
        assert not talk.reader.can_read(0)
        assert not talk.reader.can_read(0.01)
        talk.say(b":1\r\n").join(5)
        assert talk.reader.can_read(1)
        assert talk.reader.read_response() == 1
        talk.other.close()
        with pytest.raises(Closed):
            talk.reader.can_read(1)

"""Reads a server's replies with one copy of each large value: from the socket to where it is wanted.

The client's own reader copies a value of 2 MiB four times; in pipelines its buffer grows besides. This one is given
to the client as its `parser_class`: RESP2, nothing else. It knows nothing of blocks but the length of a header: it
asks `room_for` with the value's first bytes where the rest is to go.

Invariant: each call of `read_response` takes exactly one reply off the connection, or raises.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any

LARGE_BYTES = 16 << 10
"""From here on a value is read to its place; smaller ones go through the buffer."""
BUFFER_BYTES = 64 << 10
RoomFor = Callable[[memoryview, int], memoryview | None]


class Replies:
    """`room_for(head, length)` gets the first `head_bytes` of a large value and its length. It returns memory of at
    least that length to read the value into, None for new memory, or memory of no length to read it past (then b""
    comes back).

    `parse_error` makes the client's exception of an error's text, `closed` is its exception for a lost connection.
    """

    def __init__(
        self,
        room_for: RoomFor,
        head_bytes: int,
        parse_error: Callable[[str], Exception],
        closed: type[Exception],
        socket_read_size: int = 0,
    ) -> None:
        self._room_for, self._head_bytes, self._parse_error, self._closed = room_for, head_bytes, parse_error, closed
        self._socket: socket.socket | None = None
        self._raw = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._raw)
        self._start = self._end = 0

    # what the client calls

    def on_connect(self, connection: Any) -> None:
        self._socket = connection._sock
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        self._socket = None
        self._start = self._end = 0

    def can_read(self, timeout: float) -> bool:
        """Whether something came, or the other side closed, which raises."""
        if self._start < self._end:
            return True
        if self._socket is None:
            raise self._closed("not connected")
        before = self._socket.gettimeout()
        self._socket.settimeout(timeout)
        try:
            self._more()
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        finally:
            self._socket.settimeout(before)
        return True

    def read_response(self, disable_decoding: bool = False) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            error = self._parse_error(rest.decode(errors="replace"))
            if isinstance(error, self._closed):
                raise error
            return error
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._bulk(int(rest))
        if kind == b"*":
            return None if rest == b"-1" else [self.read_response() for _ in range(int(rest))]
        raise self._closed(f"not a reply: {line[:40]!r}")

    # the bytes

    def _bulk(self, length: int) -> bytes | memoryview:
        value = self._exactly(length) if length < LARGE_BYTES else self._large(length)
        if self._exactly(2) != b"\r\n":
            raise self._closed("a value that does not end where it should")
        return value

    def _large(self, length: int) -> bytes | memoryview:
        while self._end - self._start < self._head_bytes:
            self._more()
        room = self._room_for(self._buffer[self._start : self._start + self._head_bytes], length)
        if room is None:
            room = memoryview(bytearray(length))
        elif not room.nbytes:
            self._skip(length)
            return b""
        room = room[:length]
        got = min(length, self._end - self._start)
        room[:got] = self._buffer[self._start : self._start + got]
        self._start += got
        while got < length:
            got += self._receive(room[got:])
        return room

    def _skip(self, length: int) -> None:
        while length:
            if self._start == self._end:
                self._more()
            step = min(length, self._end - self._start)
            self._start += step
            length -= step

    def _exactly(self, length: int) -> bytes:
        while self._end - self._start < length:
            self._more()
        data = bytes(self._buffer[self._start : self._start + length])
        self._start += length
        return data

    def _line(self) -> bytes:
        while True:
            end = self._raw.find(b"\r\n", self._start, self._end)
            if end >= 0:
                line = bytes(self._buffer[self._start : end])
                self._start = end + 2
                return line
            self._more()

    def _more(self) -> None:
        """At least one byte more in the buffer."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            kept = bytes(self._buffer[self._start : self._end])
            if len(kept) == BUFFER_BYTES:
                raise self._closed("a line that does not end")
            self._buffer[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        self._end += self._receive(self._buffer[self._end :])

    def _receive(self, into: memoryview) -> int:
        if self._socket is None:
            raise self._closed("not connected")
        got = self._socket.recv_into(into)
        if not got:
            raise self._closed("the server closed the connection")
        return got

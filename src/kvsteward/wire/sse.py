"""Server-sent events as bytes: a bounded splitter and the few frames that we write ourselves.

The splitter hands back each event exactly as it came, terminator included, so that a relay can pass on bytes that it
never re-encoded. Comments (`: keep-alive`) are events without data. Invariant: the concatenation of all that `feed`
and `rest` returned is the input.

The format: https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6.
"""

from __future__ import annotations

from typing import Any

import orjson

from kvsteward.errors import EngineError

DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 16 * 2**20


class EventSplitter:
    """Cuts a byte stream into events. Mutable; one for each stream."""

    __slots__ = ("_held", "_limit_bytes")

    def __init__(self, limit_bytes: int = MAX_EVENT_BYTES) -> None:
        self._held = b""
        self._limit_bytes = limit_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that this chunk completes. Raises EngineError if one grows over the limit."""
        data = self._held + chunk if self._held else chunk
        if b"\r" in data:
            return self._feed_mixed(data)
        end = data.find(b"\n\n")
        if end == len(data) - 2 and end >= 0:  # one whole event, as engines send them
            self._held = b""
            return [data]
        parts = data.split(b"\n\n")
        self._hold(parts.pop())
        return [part + b"\n\n" for part in parts]

    def rest(self) -> bytes:
        """What is left after the last whole event (a stream that was cut)."""
        held, self._held = self._held, b""
        return held

    def _feed_mixed(self, data: bytes) -> list[bytes]:
        """The slow path: events may end in CRLF CRLF, CR CR or a mix."""
        events: list[bytes] = []
        start = 0
        while True:
            end = _blank_line_end(data, start)
            if end < 0:
                break
            events.append(data[start:end])
            start = end
        self._hold(data[start:])
        return events

    def _hold(self, rest: bytes) -> None:
        if len(rest) > self._limit_bytes:
            raise EngineError(
                f"the engine sent one event of more than {self._limit_bytes} bytes",
                hint="Is the upstream URL an OpenAI-compatible server? Its stream is not server-sent events.",
            )
        self._held = rest


def _blank_line_end(data: bytes, start: int) -> int:
    """The index after the first blank line, or -1. A CR at the very end may be half of a CRLF: wait for more."""
    ends = [
        found + len(mark)
        for mark in (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n")
        if (found := data.find(mark, start)) >= 0
    ]
    return min(ends, default=-1)


def data_of(event: bytes) -> bytes | None:
    """The data of an event (its lines joined), or None for a comment or an event without data."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2:
        return event[6:-2]
    lines = []
    for line in event.splitlines():
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
    return b"\n".join(lines) if lines else None


def frame(payload: Any) -> bytes:
    """One event that carries `payload` as JSON."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"

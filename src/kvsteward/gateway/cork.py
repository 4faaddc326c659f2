"""One system call where the HTTP server makes two: writes of one turn of the event loop leave together.

uvloop sends each `write` at once, and an answer is at least two of them (head, body), a stream also ends in one of its
own. On loopback a `send` is the dearest thing that a small answer costs: it wakes the client each time.

Knows no HTTP. Invariant: bytes leave in the order of their writes, no later than the next turn of the loop.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HELD_BYTES = 64 * 1024


class Cork:
    """A transport that holds what is written until the loop's next turn, or until `flush`. All else is the
    transport's own."""

    __slots__ = ("_held", "_loop", "_scheduled", "_size", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._size = 0
        self._scheduled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._held.append(data)
        self._size += len(data)
        if self._size > _HELD_BYTES:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turned)

    def _turned(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Hands all that is held to the socket."""
        if self._held:
            held, self._held, self._size = self._held, [], 0
            if not self._transport.is_closing():
                self._transport.write(b"".join(held) if len(held) > 1 else held[0])

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class CorkedProtocol(HttpToolsProtocol):
    """uvicorn's protocol over a cork. A whole answer leaves as soon as it is complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._cork = Cork(transport, self.loop)
        super().connection_made(cast("asyncio.Transport", self._cork))

    def on_response_complete(self) -> None:
        self._cork.flush()
        super().on_response_complete()

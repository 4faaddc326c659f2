"""One HTTP exchange over ASGI: the body in, bytes out, and the client's departure.

Invariant: inside `until_gone`, a client that disconnects cancels what is being done for it, streamed or not; the
block then raises ClientGone and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from kvsteward.errors import BodyTooLargeError, KVStewardError
from kvsteward.wire.errors import error_body
from kvsteward.wire.sse import DONE, frame

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
_EVENT_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_WATCH_AFTER_S = 0.1


class ClientGone(Exception):
    """The client closed its connection. Not an error of anybody's: a reason to stop."""


class UntilGone:
    """Cancels its block when the client leaves, which is then left by ClientGone.

    A client that has just sent a request is seldom gone at once, and watching it costs a task: the watch begins
    `_WATCH_AFTER_S` after the block did, and most answers of a fast engine never need one. A class and not a
    generator: it is on the hot path.
    """

    __slots__ = ("_gone", "_receive", "_task", "_timer", "_watcher")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._start)

    def _start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if kind is asyncio.CancelledError and self._gone and self._task.uncancel() == 0:
            raise ClientGone from None


class Exchange:
    """A request and its response. Mutable, one for each request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.headers: dict[str, str] = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self.started = False
        self.streaming = False
        self.shape: Callable[[dict[str, Any]], Any] | None = None
        """Turns a chat completion into another protocol's answer."""
        self.reply_headers: dict[str, str] = {}
        """Set before the first byte: they go out with whatever answer comes."""

    async def body(self, limit_bytes: int) -> bytes:
        """The whole body. Raises BodyTooLargeError as soon as the limit is passed, ClientGone if it never came."""
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit_bytes:
            raise BodyTooLargeError(f"the body has {declared} bytes, the limit is {limit_bytes}")
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit_bytes:
                raise BodyTooLargeError(f"the body is larger than {limit_bytes} bytes")
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts) if len(parts) != 1 else parts[0]

    def until_gone(self) -> UntilGone:
        """A context that is cancelled when the client leaves."""
        return UntilGone(self._receive)

    async def start(self, status: int, content_type: bytes, length_bytes: int | None = None) -> None:
        headers = [(b"content-type", content_type)]
        if length_bytes is not None:
            headers.append((b"content-length", b"%d" % length_bytes))
        for name, value in self.reply_headers.items():
            headers.append((name.encode("latin-1"), value.encode("latin-1", "replace")))
        if content_type is EVENTS:
            self.streaming = True
            headers += _EVENT_HEADERS
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": data, "more_body": True})

    def end(self, data: bytes = b"") -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": data})

    async def reply(self, status: int, data: bytes, content_type: bytes = JSON) -> None:
        """A whole answer at once."""
        await self.start(status, content_type, len(data))
        await self.end(data)

    async def reply_completion(self, completion: dict[str, Any], raw: bytes | None = None) -> None:
        """A chat completion, in its own bytes where there are some and nobody wants another shape."""
        if self.shape is not None:
            await self.reply_json(200, self.shape(completion))
        else:
            await self.reply(200, raw if raw is not None else orjson.dumps(completion))

    async def reply_json(self, status: int, payload: Any) -> None:
        await self.reply(status, orjson.dumps(payload))

    async def fail(self, error: KVStewardError, request_id: str) -> None:
        """The error in OpenAI's shape: as the answer, or as the last event of a stream that has begun."""
        body = error_body(error, request_id)
        if self.started:
            await self.end(frame(body) + DONE if self.streaming else b"")
            return
        if error.retry_after_s is not None:
            self.reply_headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        elif error.status in {429, 500, 502, 503, 504, 507} and error.status != 503:
            self.reply_headers["x-should-retry"] = "false"
        await self.reply(error.status, orjson.dumps(body))

"""One HTTP exchange over ASGI: the body in, bytes out, and the client's departure.

Invariant: inside `until_gone`, a client that disconnects cancels what is being done for it, streamed or not; the
block then raises ClientGone and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from kvsteward.errors import BodyTooLargeError, KVStewardError
from kvsteward.wire.errors import error_body
from kvsteward.wire.sse import DONE, frame

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The client closed its connection. Not an error of anybody's: a reason to stop."""


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

    @asynccontextmanager
    async def until_gone(self) -> AsyncIterator[None]:
        """Cancels its block when the client leaves."""
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()

    async def start(self, status: int, content_type: bytes, extra: Mapping[str, str] | None = None) -> None:
        headers = [(b"content-type", content_type)]
        for name, value in {**self.reply_headers, **(extra or {})}.items():
            headers.append((name.encode("latin-1"), value.encode("latin-1", "replace")))
        if content_type == EVENTS:
            self.streaming = True
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def reply(self, status: int, data: bytes, content_type: bytes = JSON) -> None:
        """A whole answer at once."""
        await self.start(status, content_type, {"content-length": str(len(data))})
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

"""An upstream that answers at once: the least that an OpenAI-compatible server can do, so that what is measured is
what stands in front of it.

One uvloop process, no HTTP library on the way. A streamed answer is 100 chunks, each written in a turn of the loop of
its own, as an engine sends its tokens. It knows nothing of the gateway. Run: `python _upstream.py` prints its port.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from typing import Any, Final, cast

import uvloop

MODEL: Final = "bench-model"
CHUNKS: Final = 100
PIECES: Final = tuple(f"word{i:02d} " for i in range(CHUNKS))
ANSWER: Final = "".join(PIECES)
CONTEXT_TOKENS: Final = 131_072
_USAGE: Final = {"prompt_tokens": 400, "completion_tokens": CHUNKS, "total_tokens": 400 + CHUNKS}
_VARIANTS: Final = 128
_CREATED: Final = 1_760_000_000
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_STREAM_END: Final = b"0\r\n\r\n"

_CARD = {"id": MODEL, "object": "model", "owned_by": "bench", "max_model_len": CONTEXT_TOKENS}
_SERVER_INFO = {"served_model_name": MODEL, "model_path": MODEL, "version": "0", "max_total_num_tokens": None}
_GETS: dict[str, Any] = {
    "/v1/models": {"object": "list", "data": [_CARD]},
    "/health": {"status": "ok"},
    "/health_generate": {"status": "ok"},
    "/get_model_info": {"model_path": MODEL, "tokenizer_path": "", "is_generation": True},
    "/model_info": {"model_path": MODEL, "tokenizer_path": "", "is_generation": True},
    "/get_server_info": _SERVER_INFO,
    "/server_info": _SERVER_INFO,
}


def completion(serial: int) -> bytes:
    """A whole answer. Its id is its own, as an engine's is."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER},
        "logprobs": None,
        "finish_reason": "stop",
    }
    body = {
        "id": f"chatcmpl-{serial:012d}",
        "object": "chat.completion",
        "created": _CREATED,
        "model": MODEL,
        "choices": [choice],
        "usage": _USAGE,
    }
    return response(json.dumps(body, separators=(",", ":")).encode())


def response(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def stream(serial: int) -> tuple[list[bytes], bytes]:
    """The chunks of a streamed answer, framed for chunked transfer, and the usage chunk for those who ask for it."""

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {
            "id": f"chatcmpl-s{serial:011d}",
            "object": "chat.completion.chunk",
            "created": _CREATED,
            "model": MODEL,
            "choices": choices,
            **more,
        }
        return framed(b"data: %s\n\n" % json.dumps(body, separators=(",", ":")).encode())

    chunks = []
    for index, piece in enumerate(PIECES):
        delta = {"role": "assistant", "content": piece} if index == 0 else {"content": piece}
        finish = "stop" if index == CHUNKS - 1 else None
        chunks.append(event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]))
    return chunks, event([], usage=_USAGE)


def framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Replies:
    """All that can be answered, made once."""

    def __init__(self) -> None:
        self.gets = {path.encode(): response(json.dumps(body).encode()) for path, body in _GETS.items()}
        self.whole = itertools.cycle([completion(serial) for serial in range(_VARIANTS)])
        self.streams = itertools.cycle([stream(serial) for serial in range(_VARIANTS)])
        self.absent = response(b'{"error":{"message":"no such path"}}', b"404 Not Found")
        self.done = framed(b"data: [DONE]\n\n") + _STREAM_END


class Upstream(asyncio.Protocol):
    """One connection. Requests come with `content-length`, one after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, replies: Replies) -> None:
        self._loop, self._replies = loop, replies
        self._data = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._data[:end].lower()
        size = _content_length(head)
        if len(self._data) < end + 4 + size:
            return
        body, self._data = self._data[end + 4 : end + 4 + size], self._data[end + 4 + size :]
        self._answer(self._path(head), body)

    @staticmethod
    def _path(head: bytes) -> bytes:
        return head.split(b" ", 2)[1].partition(b"?")[0]

    def _answer(self, path: bytes, body: bytes) -> None:
        if path != b"/v1/chat/completions":
            self._transport.write(self._replies.gets.get(path, self._replies.absent))
        elif b'"stream":true' in body or b'"stream": true' in body:
            chunks, usage = next(self._replies.streams)
            asked = b'"include_usage":true' in body or b'"include_usage": true' in body
            self._transport.write(_STREAM_HEAD)
            self._next(iter([*chunks, usage] if asked else chunks))
        else:
            self._transport.write(next(self._replies.whole))

    def _next(self, chunks: Any) -> None:
        if self._transport.is_closing():
            return
        chunk = next(chunks, None)
        if chunk is None:
            self._transport.write(self._replies.done)
        else:
            self._transport.write(chunk)
            self._loop.call_soon(self._next, chunks)


def _content_length(head: bytes) -> int:
    at = head.find(b"content-length:")
    return int(head[at + 15 : (head.find(b"\r\n", at) + 1 or len(head) + 1) - 1]) if at >= 0 else 0


async def main() -> None:
    loop, replies = asyncio.get_running_loop(), Replies()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = await loop.create_server(lambda: Upstream(loop, replies), sock=listener)
    print(listener.getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())

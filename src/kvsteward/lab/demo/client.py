"""The client: an OpenAI-style agent that streams, and reads the gateway's account of its session.

Knows HTTP. Invariant: a turn is complete only with status 200, a finish reason and the end of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
import orjson

from kvsteward.errors import EngineError
from kvsteward.wire.answer import AnswerReader
from kvsteward.wire.sse import EventSplitter, data_of
from kvsteward.wire.usage import Usage

_TURN_LIMIT_S = 600.0
_MAX_ERROR_CHARS = 400


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one turn. `error` None: it completed."""

    text: str = ""
    usage: Usage = field(default_factory=Usage)
    ttft_s: float | None = None
    error: str | None = None


class Client:
    """One session in one mode. Mutable only in its connection."""

    def __init__(self, http: aiohttp.ClientSession, url: str, session_id: str, mode: str) -> None:
        self._http, self._url, self._session_id = http, url, session_id
        self._headers = {"X-Session-Id": session_id, "X-KVSteward-Mode": mode}

    async def turn(self, messages: Sequence[Mapping[str, Any]], tools: Any, max_tokens: int) -> Answer:
        """One chat completion, streamed. Never raises for what the server does: it is the answer's `error`."""
        body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if tools:
            body["tools"] = tools
        data, started = orjson.dumps(body), monotonic()
        headers = {**self._headers, "Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=_TURN_LIMIT_S)
        try:
            url = f"{self._url}/v1/chat/completions"
            async with self._http.post(url, data=data, headers=headers, timeout=limit) as reply:
                if reply.status != 200:
                    return Answer(error=f"HTTP {reply.status}: {_message(await reply.read())}")
                return await _streamed(reply, started)
        except (aiohttp.ClientError, TimeoutError, EngineError) as error:
            return Answer(error=f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS])

    async def view(self) -> dict[str, Any]:
        """What the model sees of this session, and what was decided to get there."""
        return await self._get("view")

    async def session(self) -> dict[str, Any]:
        """The session's own figures."""
        return await self._get("")

    async def log_has(self, value: str) -> list[Mapping[str, Any]]:
        """Messages of the log that hold a text."""
        found = await self._get("log", q=value)
        return [entry["message"] for entry in found["data"]]

    async def item(self, digest: str) -> Mapping[str, Any] | None:
        """The whole message that a hash in the view names, or None."""
        url = f"{self._url}/v1/sessions/{self._session_id}/items/{digest}"
        async with self._http.get(url) as reply:
            return (await reply.json())["message"] if reply.status == 200 else None

    async def _get(self, what: str, **query: str) -> dict[str, Any]:
        url = f"{self._url}/v1/sessions/{self._session_id}/{what}".rstrip("/")
        async with self._http.get(url, params=query) as reply:
            reply.raise_for_status()
            found: dict[str, Any] = await reply.json(loads=orjson.loads)
            return found


async def _streamed(reply: aiohttp.ClientResponse, started: float) -> Answer:
    reader, splitter = AnswerReader(), EventSplitter()
    first_s: float | None = None
    async for chunk in reply.content.iter_any():
        for event in splitter.feed(chunk):
            reader.feed(event)
            if first_s is None and _speaks(event):
                first_s = monotonic() - started
    message = reader.message() or {}
    if reader.failed is not None or not reader.ended or reader.finish is None:
        return Answer(error=str(reader.failed or "the stream ended before the answer")[:_MAX_ERROR_CHARS])
    return Answer(str(message.get("content") or ""), reader.usage or Usage(), first_s)


def _speaks(event: bytes) -> bool:
    """True for an event that carries a word of the answer (or of a call), not only its role."""
    data = data_of(event)
    if not data or data == b"[DONE]":
        return False
    choices = orjson.loads(data).get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))


def _message(raw: bytes) -> str:
    try:
        return str(orjson.loads(raw)["error"]["message"])[:_MAX_ERROR_CHARS]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return raw.decode(errors="replace")[:_MAX_ERROR_CHARS]

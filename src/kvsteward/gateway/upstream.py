"""What an engine is sent and what it replies: its events, its whole body, and whether it came to its end.

Knows no client. Invariant: nothing is read without a bound, and an answer that was cut is never taken for a whole one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from kvsteward.context.images import with_ids
from kvsteward.engines.base import EngineInfo, EngineReply
from kvsteward.errors import EngineError
from kvsteward.wire.answer import AnswerReader, is_usage_only
from kvsteward.wire.errors import engine_error
from kvsteward.wire.sse import EventSplitter, data_of
from kvsteward.wire.veil import Veil

PATH = "/v1/chat/completions"
MAX_ERROR_BYTES = 1 * 2**20


async def check_accepted(reply: EngineReply) -> None:
    """Raises the engine's error where it refused the request."""
    if reply.status != 200:
        raise engine_error(reply.status, await read_all(reply, MAX_ERROR_BYTES))


async def events_of(reply: EngineReply, reader: AnswerReader) -> AsyncIterator[bytes]:
    """The engine's whole events, as they came, without the closing frame: the answer is written to the log before the
    client is told that it is complete."""
    splitter = EventSplitter()
    async for chunk in reply.chunks():
        events = splitter.feed(chunk)
        if not events:
            continue
        for event in events:
            reader.feed(event)
        if b"[DONE]" in events[-1] and data_of(events[-1]) == b"[DONE]":
            events.pop()
        if events:
            yield events[0] if len(events) == 1 else b"".join(events)


async def veiled_events(reply: EngineReply, veil: Veil, reader: AnswerReader) -> AsyncIterator[bytes]:
    """As `events_of`, without what the veil hides. `reader` is fed what the client may see."""
    async for events in events_of(reply, AnswerReader()):
        shown = [seen for event in EventSplitter().feed(events) if (seen := veil.feed(event))]
        for event in shown:
            reader.feed(event)
        if shown:
            yield b"".join(shown)


def without_usage(events: bytes) -> bytes:
    """Takes out the usage chunk that the client did not ask for."""
    if b'"choices":[]' not in events and b'"choices": []' not in events:
        return events
    return b"".join(event for event in EventSplitter().feed(events) if not is_usage_only(event))


async def read_all(reply: EngineReply, limit_bytes: int) -> bytes:
    """The rest of a reply's body, cut at a bound."""
    parts: list[bytes] = []
    size = 0
    async for chunk in reply.chunks():
        parts.append(chunk)
        size += len(chunk)
        if size > limit_bytes:
            break
    return b"".join(parts)


async def collected(reply: EngineReply) -> AnswerReader:
    """A streamed answer, read to its end."""
    reader, splitter = AnswerReader(), EventSplitter()
    async for chunk in reply.chunks():
        for event in splitter.feed(chunk):
            reader.feed(event)
    check_ended(reader)
    return reader


def check_ended(reader: AnswerReader) -> None:
    """Raises the error that the engine put into its stream, or EngineError for a stream that was cut."""
    failed = reader.failed
    if failed is not None:
        raise engine_error(500, failed)
    if not reader.ended:
        raise EngineError("the engine closed the stream before it had finished")


def for_engine(info: EngineInfo, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages with what only this engine's dialect has."""
    return with_ids(messages) if info.dialect == "vllm" else messages

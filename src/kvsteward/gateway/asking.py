"""Questions to an engine on the gateway's own account: how they are sent, within which bounds, and what is heard.

A turn waits for those about its own messages (`waited`); others are put while nobody waits (`Spare`). Each is a prompt
of its own. On an engine with slots all have one name beside the sessions', so that its table of slots knows whose cache
goes: a free slot's, or that of the session that was longest idle.

Invariant: whatever becomes of a question, a turn goes on, and what was reserved is released.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvsteward.context.ask import Ask, Reply
from kvsteward.engines.base import Engine, EngineRequest
from kvsteward.errors import ContextOverflowError, EngineError, KVStewardError, OverloadedError
from kvsteward.gateway.fleet import Station
from kvsteward.gateway.upstream import PATH, for_engine
from kvsteward.policy.admission import Demand
from kvsteward.wire.answer import AnswerReader
from kvsteward.wire.chat import ChatRequest, encode
from kvsteward.wire.sse import EventSplitter

if TYPE_CHECKING:
    from kvsteward.gateway.app import Steward
    from kvsteward.gateway.turn import Turn

T = TypeVar("T")
log = logging.getLogger("kvsteward")

MAX_ANSWER_BYTES = 2**20
_MAX_KEPT = 1_024
_STRUCTURED = frozenset({"vllm", "llama-server"})
"""Engines that hold an answer to a JSON schema."""
SLOTTED = frozenset({"llama-server"})
"""Engines that keep a session's cache in a slot, which works on one request at a time."""
_SLOT_NAME = ":questions:"
_TEMPLATED = frozenset({"vllm", "sglang", "llama-server"})
"""Engines that take fields for the chat template."""
_LEAST_S = 0.05


class Asking:
    """What a gateway knows of asking its engines. Mutable, for one event loop."""

    def __init__(self, steward: Steward) -> None:
        self._steward = steward
        self._plain: set[str] = set()
        """Engines that refused a schema."""

    def structured(self, at: Station) -> bool:
        """Whether an engine holds its answer to a schema, as far as we know."""
        return at.name not in self._plain and at.info.dialect in _STRUCTURED

    def schema_refused(self, at: Station, status: int) -> None:
        """An engine answered a question that had a schema with this status."""
        if status in {400, 422, 501}:
            self._plain.add(at.name)  # asked in plain words from now on

    async def waited(self, turn: Turn, question: Ask) -> Reply:
        """The reply to a question that a turn waits for, in what is left of its time for that. The same question is put
        once in a turn, however often its view is prepared."""
        key = str(question.messages)
        if key not in turn.replies:
            started = self._steward.now()
            left = self._steward.settings.prose_timeout_s - turn.asked_s
            reply = await self._in_time(turn, question, left) if left > _LEAST_S else Reply(None, failed="no time left")
            turn.asked_s += self._steward.now() - started
            turn.replies[key] = reply
        return turn.replies[key]

    async def _in_time(self, turn: Turn, question: Ask, left_s: float) -> Reply:
        started = self._steward.now()
        try:
            async with asyncio.timeout(left_s), turn.at.gate.admitted(self.demand(question)):
                name = f"{turn.id}-{question.purpose}"
                return await self.put(turn.at, turn.request, question, name, turn.cache_fields)
        except TimeoutError:
            failed = "no answer in time"
        except OverloadedError:
            failed = "no room in the engine's queue"
        except ContextOverflowError:
            failed = "too long for the engine"
        except EngineError as error:
            failed = error.message
        return Reply(None, seconds=self._steward.now() - started, failed=failed)

    def demand(self, question: Ask) -> Demand:
        estimator = self._steward.desk.estimator
        return Demand(sum(estimator.message(message) for message in question.messages), question.max_tokens)

    async def put(
        self, at: Station, request: ChatRequest, question: Ask, request_id: str, cache_fields: Mapping[str, Any]
    ) -> Reply:
        """Asks, with the model of `request`. `cache_fields`: those of the tenant's turns, so that its questions share
        no cache with others' either. The caller has the room. Raises EngineError."""
        started = self._steward.now()
        base = _body(at, request, question)
        messages = for_engine(at.info, question.messages)
        body = encode(base, messages=messages, stream=True, max_tokens=question.max_tokens, fields=cache_fields)
        slot = _SLOT_NAME if at.info.dialect in SLOTTED else None
        status, reader = await heard(at.engine, EngineRequest(PATH, body, request_id, slot))
        seconds = self._steward.now() - started
        if reader is None:
            if question.schema is not None:
                self.schema_refused(at, status)
            return Reply(None, seconds=seconds, failed=f"the engine answered {status}")
        text, failed = said(reader)
        usage = reader.usage
        prompt = usage.prompt_tokens if usage else self.demand(question).prompt_tokens
        output = usage.output_tokens if usage else self._steward.desk.estimator.text(text or "")
        return Reply(text, reader.finish != "length", prompt, output, seconds, failed)


class Spare(ABC, Generic[T]):
    """Work for sessions that nobody waits for, and what came of it. It is of the lowest rank: one piece for each
    session and `Settings.summaries_at_once` over all, none while a turn waits for room, each ended by a time limit, by
    the end of its session, and by a turn that would have to wait for its room (`Gate.spare`). Mutable."""

    def __init__(self, steward: Steward) -> None:
        self._steward = steward
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._kept: OrderedDict[str, T] = OrderedDict()

    @abstractmethod
    def _count(self, outcome: str) -> None:
        """Is told of what was "skipped" or "given_up"."""

    @property
    def running(self) -> int:
        return len(self._tasks)

    def _begin(
        self, session_id: str, at: Station, work: Callable[[], Awaitable[T | None]], failed: Callable[[str], T | None]
    ) -> None:
        """Begins, if there is room for it. `failed` says what is kept of work that ended with an error."""
        settings = self._steward.settings
        if len(self._tasks) >= settings.summaries_at_once or at.draining or at.gate.pool.waiting:
            self._count("skipped")
            return

        async def run() -> None:
            try:
                async with asyncio.timeout(settings.summary_timeout_s):
                    found = await work()
            except asyncio.CancelledError:
                self._count("given_up")
                raise
            except (KVStewardError, TimeoutError) as error:
                log.info("no answer to a question about %s: %r", session_id, error)
                found = failed(str(error) or "no answer in time")
            if found is not None:
                self._kept[session_id] = found
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)

        task = self._tasks[session_id] = asyncio.create_task(run())
        task.add_done_callback(lambda _: self._tasks.pop(session_id, None))

    def forget(self, session_id: str) -> None:
        """The session has ended, or its view has changed: what is there or being made is of no use any more."""
        self._kept.pop(session_id, None)
        if session_id in self._tasks:
            self._tasks[session_id].cancel()

    async def _give_up(self, session_id: str) -> None:
        """Returns when the engine has been told."""
        task = self._tasks.get(session_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        for session_id in list(self._tasks):
            await self._give_up(session_id)


async def heard(engine: Engine, request: EngineRequest) -> tuple[int, AnswerReader | None]:
    """The status, and the whole answer where it is 200 and not over its bound."""
    reader, splitter, received = AnswerReader(), EventSplitter(), 0
    async with engine.open(request) as reply:
        if reply.status != 200:
            return reply.status, None
        async for chunk in reply.chunks():
            received += len(chunk)
            if received > MAX_ANSWER_BYTES:
                return reply.status, None
            for event in splitter.feed(chunk):
                reader.feed(event)
    return reply.status, reader


def said(reader: AnswerReader) -> tuple[str | None, str]:
    """The text of an answer, or None and why there is none."""
    message = reader.message()
    if reader.failed is not None:
        return None, "the engine failed while it answered"
    if message is None or not reader.ended:
        return None, "the answer broke off"
    if message.get("tool_calls"):
        return None, "a tool call"
    text = message.get("content")
    return (text, "") if isinstance(text, str) and text.strip() else (None, "an empty answer")


def _body(at: Station, request: ChatRequest, question: Ask) -> ChatRequest:
    kept = {name: request.body[name] for name in ("model", "cache_salt") if request.body.get(name)}
    body: dict[str, Any] = {"temperature": 0, **kept}
    if at.info.dialect in _TEMPLATED:
        given = request.body.get("chat_template_kwargs")
        body["chat_template_kwargs"] = {**(given if isinstance(given, Mapping) else {}), "enable_thinking": False}
    if question.schema is not None:
        body["response_format"] = format_of(question.purpose, question.schema)
    return replace(request, body=body, messages=(), stream=True, wants_usage=True)


def format_of(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's `response_format` for a schema."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}

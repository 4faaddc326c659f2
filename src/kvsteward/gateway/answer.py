"""An answer on its way: from the engine to the client as it comes, and beside it into the log.

Knows the turn that it answers, not how the turn was prepared. Invariant: an answer is in the log before the client is
told that it is complete, and what was said before a break is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from kvsteward.context.layout import Item, View
from kvsteward.context.pipeline import Prepared
from kvsteward.engines.base import EngineReply
from kvsteward.errors import EngineError, StoreError
from kvsteward.gateway.desk import Resolved
from kvsteward.gateway.relay import EVENTS, Exchange
from kvsteward.gateway.upstream import check_ended, events_of, read_all, without_usage
from kvsteward.wire.answer import AnswerReader
from kvsteward.wire.fingerprint import link
from kvsteward.wire.sse import DONE
from kvsteward.wire.usage import Usage, parse_usage

if TYPE_CHECKING:
    from kvsteward.gateway.app import Steward
    from kvsteward.gateway.turn import Turn

logger = logging.getLogger("kvsteward")


class AnswerLog:
    """Writes an answer into the log: drafts while it comes, the whole when it ends. Mutable, one for each turn."""

    def __init__(self, steward: Steward, turn: Turn, resolved: Resolved, prepared: Prepared) -> None:
        self._steward, self._turn = steward, turn
        self.resolved, self.prepared = resolved, prepared
        self.view_usage: Usage | None = None
        """What the view and its answer take, where the engine was given more than the view."""
        self.view_after: View | None = None
        """With the answer in it, counted by the engine."""
        self._drafted_s = steward.now()
        self._writing: asyncio.Task[None] | None = None
        self.reader = AnswerReader()
        self.called: tuple[str, ...] = ()
        """The tools that the answer calls."""
        self._ended = False

    def maybe_draft(self, now: float) -> None:
        """Keeps what was said so far, so that a crash loses less than a second of it."""
        if now - self._drafted_s < self._steward.settings.draft_every_s or (self._writing and not self._writing.done()):
            return
        self._drafted_s = now
        message = self.reader.message()
        if message is not None:
            self._writing = asyncio.create_task(self._draft(orjson.dumps(message)))

    async def _draft(self, text: bytes) -> None:
        desk, session = self._steward.desk, self.resolved.session
        now = self._steward.wall()
        try:
            await desk.call(desk.store.draft, session.id, self._turn.id, self.resolved.head, text, now=now)
        except StoreError as error:  # a draft is a safety net; the answer itself will fail loudly if the disk is full
            logger.warning("cannot keep a draft of %s: %s", self._turn.id, error.message)

    async def ended(self) -> None:
        """The stream came to its end: what it said is in the log when this returns."""
        reader = self.reader
        await self.write(reader.message(), reader.usage, reader.finish or "stop", reader.response_id)

    async def broken_off(self, finish: str) -> None:
        """The turn ended early: what was said until then is kept."""
        if not self._ended:
            await self.write(self.reader.message(), self.reader.usage, finish, self.reader.response_id)

    async def write(
        self, message: dict[str, Any] | None, usage: Usage | None, finish: str, response_id: str | None
    ) -> None:
        """Ends the turn in the log. Without a word from the engine there is nothing to log."""
        self._ended = True
        if self._writing is not None:
            await asyncio.wait([self._writing])
        desk, view, session = self._steward.desk, self.prepared.view, self.resolved.session
        if message is None:
            return
        self.called = called(message)
        estimate = desk.estimator.message(message)
        spent, usage = usage, self.view_usage or usage
        tokens = usage.output_tokens if usage and usage.output_tokens else estimate
        if usage:  # a client may replace this answer by another: then the count of the prompt is still known
            known = view.counted(usage.prompt_tokens, view.known_for)
            desk.recount(session.id, self.resolved.head, known)
        item = Item(link(self.resolved.head, message), view.depth + 1, message, tokens, tokens)
        view = view.with_items([item])
        if usage:
            view = view.counted(usage.resident_tokens, view.known_for)
        await desk.log_answer(
            session.id,
            self.resolved.head,
            item.depth,
            message,
            finish=finish,
            response_id=response_id,
            tokens=tokens,
            turn_id=self._turn.id,
            view=view,
            again_tokens=again_tokens(self.resolved, self.prepared, usage) if self.prepared.epoch else None,
        )
        self._turn.open_in = None
        if usage and spent:
            self._steward.count_answer(self._turn, self.resolved, self.prepared, usage, spent)
            self.view_after = view


def again_tokens(resolved: Resolved, prepared: Prepared, usage: Usage | None) -> int:
    """What a compaction cost: prompt tokens that no cache held, without those that came with this turn. By the estimate
    for the turn's own messages; an engine that does not tell what was cached makes it the whole prompt."""
    if usage is None:
        return 0
    arrived = {a.hash for a in resolved.arrivals}
    fresh = sum(i.tokens for i in (*prepared.view.pinned, *prepared.view.items) if i.hash in arrived)
    return max(0, usage.new_tokens - fresh)


def called(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the functions that an answer calls."""
    functions = [call.get("function") for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return tuple(str(function["name"]) for function in functions if isinstance(function, dict) and function.get("name"))


async def streamed(steward: Steward, exchange: Exchange, turn: Turn, reply: EngineReply, log: AnswerLog) -> None:
    """The engine streams. The client gets the events as they come, or one whole answer if it asked for that."""
    async for events in events_of(reply, log.reader):
        await passed_on(steward, exchange, turn, log, events)
    check_ended(log.reader)
    await completed(exchange, turn, log)


async def passed_on(steward: Steward, exchange: Exchange, turn: Turn, log: AnswerLog, events: bytes) -> None:
    """Events on their way to the client, and now and then to the log."""
    now = steward.now()
    if turn.first_token_s is None:
        turn.first_token_s = now
        steward.telemetry.ttft.observe(now - turn.started_s)
    log.maybe_draft(now)
    if turn.request.stream:
        if not exchange.started:
            await exchange.start(200, EVENTS)
        shown = events if turn.request.wants_usage else without_usage(events)
        if shown:
            await exchange.write(shown)


async def completed(exchange: Exchange, turn: Turn, log: AnswerLog) -> None:
    """The answer is whole: it goes into the log, then the client is told."""
    await asyncio.shield(log.ended())
    if turn.request.stream:
        if not exchange.started:
            await exchange.start(200, EVENTS)
        await exchange.end(DONE)
    else:
        await exchange.reply_completion(log.reader.completion())


async def whole(steward: Steward, exchange: Exchange, turn: Turn, reply: EngineReply, log: AnswerLog) -> None:
    """The engine answers at once, and so do we, with its own bytes."""
    try:
        raw = await read_all(reply, 256 * 2**20)
        answer = orjson.loads(raw)
        choice = answer["choices"][0]
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise EngineError(f"the engine's answer is not a chat completion: {error!r}") from error
    usage = parse_usage(answer)
    await asyncio.shield(
        log.write(choice.get("message"), usage, choice.get("finish_reason") or "stop", answer.get("id"))
    )
    await exchange.reply_completion(answer, raw)

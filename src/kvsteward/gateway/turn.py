"""One turn, from the request's bytes to the answer in the log. Read `managed` from top to bottom.

The life of a turn is a table; an illegal step raises StateError:

    received -> prepared -> waiting -> streaming -> done
                                    (any of them) -> failed | abandoned

"failed": an error was sent to the client. "abandoned": the client left; the engine was told by a closed socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from kvsteward.context.hygiene import Moved, clean, same_tools
from kvsteward.context.images import with_ids
from kvsteward.context.layout import Item, View
from kvsteward.context.marks import Marks, load_of
from kvsteward.context.pipeline import Count, Prepared, prepare
from kvsteward.context.recall import TOOL_NAME, with_room
from kvsteward.engines.base import EngineReply, EngineRequest
from kvsteward.errors import ContextOverflowError, EngineError, StateError, StoreError, UnsupportedError
from kvsteward.gateway import recall
from kvsteward.gateway.desk import Resolved, Tools, public_id, tools_key
from kvsteward.gateway.relay import EVENTS, JSON, ClientGone, Exchange
from kvsteward.gateway.settings import Tenant
from kvsteward.gateway.upstream import (
    MAX_ERROR_BYTES,
    PATH,
    check_accepted,
    check_ended,
    collected,
    events_of,
    read_all,
    veiled_events,
    without_usage,
)
from kvsteward.policy.admission import Demand
from kvsteward.wire.answer import AnswerReader
from kvsteward.wire.chat import PINNED_ROLES, ChatRequest, encode, has_images, parse_chat, with_tools
from kvsteward.wire.fingerprint import link
from kvsteward.wire.identity import identify
from kvsteward.wire.sse import DONE
from kvsteward.wire.usage import Usage, parse_usage
from kvsteward.wire.veil import Veil

if TYPE_CHECKING:
    from kvsteward.gateway.app import Steward

logger = logging.getLogger("kvsteward")

LIFE: Mapping[str, frozenset[str]] = {
    "received": frozenset({"prepared", "failed", "abandoned"}),
    "prepared": frozenset({"waiting", "failed", "abandoned"}),
    "waiting": frozenset({"streaming", "prepared", "failed", "abandoned"}),
    "streaming": frozenset({"done", "failed", "abandoned"}),
    "done": frozenset({"abandoned", "failed"}),
    "failed": frozenset(),
    "abandoned": frozenset(),
}


@dataclass(slots=True)
class Turn:
    """One turn on its way. Mutable; `step` is the only way to change its state."""

    id: str
    request: ChatRequest
    tenant: Tenant
    started_s: float
    state: str = "received"
    open_in: str | None = None
    """The session that counts this turn as active, until its answer is logged or it fails."""
    first_token_s: float | None = None
    recall: bool = False
    """Our tool is offered beside the client's."""
    moved: tuple[Moved, ...] | None = None
    """What left the system prompt because it changes; None where the request has no system prompt."""
    tools_sent: Any = None
    tools: Any = None
    """The client's tools as they came, and as the engine is shown them."""

    def step(self, state: str) -> None:
        if state not in LIFE[self.state]:
            raise StateError(f"a turn cannot go from {self.state} to {state}")
        self.state = state


async def chat(steward: Steward, exchange: Exchange, turn_id: str, tenant: Tenant) -> None:
    """`POST /v1/chat/completions`."""
    raw = await exchange.body(steward.settings.max_body_bytes)
    turn = Turn(turn_id, parse_chat(raw), tenant, steward.now())

    async def work() -> None:
        if mode_of(steward, exchange, tenant) == "passthrough":
            await passthrough(steward, exchange, turn, raw)
        else:
            await managed(steward, exchange, turn)

    await ended(steward, turn, exchange, work)


async def ended(steward: Steward, turn: Turn, exchange: Exchange, work: Callable[[], Awaitable[None]]) -> None:
    """Does the work of a turn. Whatever happens to it, it ends in one of the three last states and is counted."""
    try:
        async with exchange.until_gone():
            steward.check_model(turn.request)
            await work()
    except ClientGone:
        turn.step("abandoned")
        steward.watch_release(turn.id)
    except BaseException:
        turn.step("failed")
        raise
    finally:
        steward.count_turn(turn.state)


def mode_of(steward: Steward, exchange: Exchange, tenant: Tenant) -> str:
    """Per request, else per tenant, else per deployment."""
    asked = exchange.headers.get("x-kvsteward-mode", "").lower()
    if asked not in {"", "managed", "passthrough"}:
        raise UnsupportedError(
            f"X-KVSteward-Mode must be 'managed' or 'passthrough', not '{asked}'", param="X-KVSteward-Mode"
        )
    return asked or ("passthrough" if "passthrough" in (steward.settings.mode, tenant.mode) else "managed")


def check_modalities(steward: Steward, request: ChatRequest) -> None:
    """Raises UnsupportedError for an image that the model cannot see."""
    if "image" not in steward.engine.info.modalities and has_images(request.messages):
        raise UnsupportedError("this model reads text only; the request has an image", param="messages")


async def managed(steward: Steward, exchange: Exchange, turn: Turn) -> None:
    """A turn inside its session's budget."""
    check_modalities(steward, turn.request)
    tidied(steward, turn)
    identity = identify(exchange.headers, turn.request.body)
    resolved = await steward.desk.resolve(turn.request, identity, turn.tenant)
    await run(steward, exchange, turn, resolved)


def tidied(steward: Steward, turn: Turn) -> None:
    """Takes what changes from turn to turn out of the front of the prompt, before the history is hashed."""
    request = turn.request
    cleaned = clean(request.messages, request.tools, steward.policy(turn.tenant).hygiene)
    if request.messages[0]["role"] in PINNED_ROLES:
        turn.moved = cleaned.moved
    turn.tools_sent = request.tools
    turn.request = with_tools(replace(request, messages=cleaned.messages), cleaned.tools)


async def run(steward: Steward, exchange: Exchange, turn: Turn, resolved: Resolved) -> None:
    """A turn whose session is known. An engine that finds the prompt too long after all gets one that is condensed."""
    session_id = resolved.session.id
    turn.tools = same_tools(resolved.view.tools, turn.request.tools)
    turn.request = with_tools(turn.request, turn.tools)
    if recall.wanted(steward, exchange.headers, turn.request):
        turn.recall, turn.request = True, recall.offered(turn.request)
    for force in (False, True):
        async with steward.desk.lock(session_id):
            prepared = await prepared_turn(steward, turn, resolved, force=force)
        turn.step("prepared")
        try:
            await answered(steward, exchange, turn, resolved, prepared)
            return
        except ContextOverflowError:
            if force or exchange.started or prepared.epoch is not None:
                raise
        finally:
            if turn.open_in is not None:
                turn.open_in = None
                await asyncio.shield(steward.desk.turn_failed(session_id))


async def prepared_turn(steward: Steward, turn: Turn, resolved: Resolved, *, force: bool = False) -> Prepared:
    """The view of this turn, with everything that the client said in the log."""
    desk, tools, policy = steward.desk, turn.request.tools, steward.policy(turn.tenant)
    recorded = Tools(turn.tools_sent if turn.tools_sent is not None else turn.tools, turn.tools)
    started = steward.now()
    draft = await steward.scribe.before_turn(resolved.session.id)
    try:
        prepared = await ask(
            steward,
            turn,
            prepare(
                resolved.view,
                resolved.arrivals,
                tools=tools,
                known_for=tools_key(tools) + turn.request.model,
                marks=marks_of(steward, turn, resolved.view),
                policy=policy,
                estimator=desk.estimator,
                force=force,
                moved=turn.moved,
                draft=draft,
            ),
        )
    except BaseException:
        await asyncio.shield(desk.log_arrivals(resolved, None, recorded))
        raise
    prepared = replace(prepared, view=replace(prepared.view, tools=turn.tools))
    await desk.log_arrivals(resolved, prepared, recorded)
    turn.open_in = resolved.session.id
    if prepared.epoch is not None:
        steward.scribe.after_compaction(resolved.session.id)
    steward.count_prepared(prepared, steward.now() - started)
    return prepared


def marks_of(steward: Steward, turn: Turn, view: View) -> Marks:
    budget = steward.budget_tokens(turn.tenant)
    load = load_of(view, steward.desk.estimator.json(turn.request.tools), steward.misses.ratio)
    marks = steward.policy(turn.tenant).marks(budget, turn.request.max_output_tokens, load)
    return with_room(marks) if turn.recall else marks


async def ask(steward: Steward, turn: Turn, questions: Generator[Count, Any, Prepared]) -> Prepared:
    """Drives the pipeline: what it asks, the engine answers."""
    answer: Any = None
    while True:
        try:
            question = questions.send(answer)
        except StopIteration as stop:
            prepared: Prepared = stop.value
            return prepared
        steward.telemetry.exact_counts.inc()
        answer = await count(steward, turn.request, question)


async def count(steward: Steward, request: ChatRequest, question: Count) -> int | None:
    """The engine's own count, or None if it cannot count or cannot be asked now: then the estimate must do."""
    try:
        return await steward.engine.count_prompt_tokens({**request.body, "messages": list(question.messages)})
    except EngineError:
        return None


async def answered(steward: Steward, exchange: Exchange, turn: Turn, resolved: Resolved, prepared: Prepared) -> None:
    """Waits for room in the KV budget, then lets the engine answer."""
    request, session_id = turn.request, resolved.session.id
    stream = request.stream or steward.engine.info.streams_only or turn.recall
    room = prepared.marks.budget - prepared.tokens
    output = min(request.max_output_tokens or room, room)
    cap = output if steward.must_cap_output(request, prepared) else None
    body = encode(request, messages=for_engine(steward, prepared.view.render()), stream=stream, max_tokens=cap)
    extra = recall.room_tokens(prepared) if turn.recall else 0
    demand = Demand(
        prepared.tokens + extra, max(1, min(output, room - extra)), returning=steward.residency.of(session_id) > 0
    )
    exchange.reply_headers |= {
        "x-kvsteward-session": public_id(resolved.session),
        "x-kvsteward-tokens-in-view": str(prepared.tokens),
        "x-kvsteward-tokens-saved": str(saved_tokens(resolved, prepared)),
    }
    turn.step("waiting")
    log = AnswerLog(steward, turn, resolved, prepared)
    try:
        async with steward.gate.admitted(demand) as waited_s:
            steward.telemetry.queue_time.observe(waited_s)
            engine_request = EngineRequest(PATH, body, turn.id, session_id, engine_headers(exchange))
            if turn.recall:
                await recalled(steward, exchange, turn, engine_request, log)
            else:
                async with steward.engine.open(engine_request) as reply:
                    await check_accepted(reply)
                    turn.step("streaming")
                    await (streamed if stream else whole)(steward, exchange, turn, reply, log)
    except BaseException as error:
        # Here the socket to the engine is closed already: writing the log must not keep the engine at work.
        await asyncio.shield(log.broken_off("abandoned" if isinstance(error, asyncio.CancelledError) else "error"))
        raise
    turn.step("done")
    if log.view_after is not None:  # only now is the room of this turn free again
        steward.scribe.after_turn(session_id, request, log.view_after, prepared.marks, steward.policy(turn.tenant))


def for_engine(steward: Steward, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages with what only this engine's dialect has."""
    return with_ids(messages) if steward.engine.info.dialect == "vllm" else messages


def saved_tokens(resolved: Resolved, prepared: Prepared) -> int:
    """How much longer the prompt would be if the whole history were sent."""
    arrived = {a.hash for a in resolved.arrivals}
    view = prepared.view
    log_tokens = resolved.log_tokens + sum(i.log_tokens for i in (*view.pinned, *view.items) if i.hash in arrived)
    return max(0, log_tokens - view.message_tokens)


def again_tokens(resolved: Resolved, prepared: Prepared, usage: Usage | None) -> int:
    """What a compaction cost: prompt tokens that no cache held, without those that came with this turn. By the estimate
    for the turn's own messages; an engine that does not tell what was cached makes it the whole prompt."""
    if usage is None:
        return 0
    arrived = {a.hash for a in resolved.arrivals}
    fresh = sum(i.tokens for i in (*prepared.view.pinned, *prepared.view.items) if i.hash in arrived)
    return max(0, usage.new_tokens - fresh)


def engine_headers(exchange: Exchange) -> dict[str, str]:
    """What of the client's headers an engine may need: tracing and its own routing, never the client's key."""
    keep = ("traceparent", "tracestate", "x-data-parallel-rank")
    return {name: exchange.headers[name] for name in keep if name in exchange.headers}


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


async def recalled(steward: Steward, exchange: Exchange, turn: Turn, first: EngineRequest, log: AnswerLog) -> None:
    """One answer in several rounds: as long as the model calls our tool alone, it is answered and goes on. The last
    round has no such tool. The client sees one answer."""
    session_id, prepared, veil = log.resolved.session.id, log.prepared, Veil(TOOL_NAME)
    room, more = recall.room_tokens(prepared), list[Mapping[str, Any]]()
    for left in range(steward.settings.recall_rounds, -1, -1):
        veil.begin(more=left > 0)
        request = replace(first, body=round_body(steward, turn, prepared, more, left)) if more else first
        async with steward.engine.open(request) as reply:
            await check_accepted(reply)
            if turn.state == "waiting":
                turn.step("streaming")
            async for events in veiled_events(reply, veil, log.reader):
                await passed_on(steward, exchange, turn, log, events)
            check_ended(veil.round)
        calls = [{**call, "id": call["id"] or f"recall_{len(more)}_{n}"} for n, call in enumerate(veil.end())]
        if not calls:
            break
        answers = await recall.answer_calls(steward, session_id, log.resolved.head, prepared, calls, room)
        room -= sum(steward.desk.estimator.message(message) for message in answers)
        more += [{**(veil.round.message() or {}), "tool_calls": calls}, *answers]
    usage, start = veil.last_event(), veil.first_prompt()
    if usage:
        log.reader.feed(usage)
        await passed_on(steward, exchange, turn, log, usage)
    if start and more:
        said = steward.desk.estimator.message(log.reader.message() or {})
        log.view_usage = replace(start, output_tokens=said)
    await completed(exchange, turn, log)


def round_body(steward: Steward, turn: Turn, prepared: Prepared, more: Sequence[Mapping[str, Any]], left: int) -> bytes:
    """The view and the rounds so far. What they take is no longer free for the answer."""
    request = turn.request if left else recall.withdrawn(turn.request)
    used = sum(steward.desk.estimator.message(message) for message in more)
    room = max(16, prepared.marks.budget - prepared.tokens - used)
    output = min(request.max_output_tokens or room, room)
    messages = for_engine(steward, [*prepared.view.render(), *more])
    return encode(request, messages=messages, stream=True, max_tokens=output)


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


async def passthrough(steward: Steward, exchange: Exchange, turn: Turn, raw: bytes) -> None:
    """The request as it is, in its own bytes. Nothing is logged; a client that leaves still stops the engine."""
    request = turn.request
    stream = request.stream or steward.engine.info.streams_only
    body = raw if request.stream == stream else encode(request, stream=True)
    turn.step("prepared")
    turn.step("waiting")
    async with steward.engine.open(EngineRequest(PATH, body, turn.id, None, engine_headers(exchange))) as reply:
        turn.step("streaming")
        if reply.status != 200:
            content_type = reply.headers.get("content-type", "application/json").encode("latin-1")
            await exchange.reply(reply.status, await read_all(reply, MAX_ERROR_BYTES), content_type)
        elif stream and not request.stream:
            await exchange.reply_completion((await collected(reply)).completion())
        elif stream:
            await exchange.start(200, EVENTS)
            async for chunk in reply.chunks():
                await exchange.write(chunk)
            await exchange.end()
        else:
            await exchange.reply(200, await read_all(reply, 256 * 2**20), JSON)
    turn.step("done")

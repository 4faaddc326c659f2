"""One turn, from the request's bytes to the answer in the log. Read `managed` from top to bottom.

The life of a turn is a table; an illegal step raises StateError:

    received -> prepared -> waiting -> streaming -> done
                                    (any of them) -> failed | abandoned

"failed": an error was sent to the client. "abandoned": the client left; the engine was told by a closed socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvsteward.context.ask import Ask, Reply
from kvsteward.context.hygiene import Moved, clean, same_tools
from kvsteward.context.layout import View
from kvsteward.context.marks import Marks, load_of
from kvsteward.context.pipeline import Count, Prepared, prepare
from kvsteward.context.recall import with_room
from kvsteward.context.selective import Pieces, Score
from kvsteward.engines.base import EngineRequest, Keep
from kvsteward.errors import (
    ContextOverflowError,
    EngineError,
    EngineUnavailableError,
    OverloadedError,
    StateError,
    UnsupportedError,
)
from kvsteward.gateway import recall
from kvsteward.gateway.answer import AnswerLog, streamed, whole
from kvsteward.gateway.desk import Resolved, Tools, public_id, tools_key
from kvsteward.gateway.fleet import Station
from kvsteward.gateway.relay import EVENTS, JSON, ClientGone, Exchange
from kvsteward.gateway.rounds import recalled
from kvsteward.gateway.settings import Tenant
from kvsteward.gateway.upstream import MAX_ERROR_BYTES, PATH, check_accepted, collected, for_engine, read_all
from kvsteward.policy.admission import Demand
from kvsteward.policy.retention import WEIGHTS
from kvsteward.sessions.base import Session
from kvsteward.wire.chat import PINNED_ROLES, ChatRequest, encode, has_images, parse_chat, with_tools
from kvsteward.wire.identity import identify

if TYPE_CHECKING:
    from kvsteward.gateway.app import Steward

LIFE: Mapping[str, frozenset[str]] = {
    "received": frozenset({"prepared", "failed", "abandoned"}),
    "prepared": frozenset({"waiting", "failed", "abandoned"}),
    "waiting": frozenset({"streaming", "prepared", "failed", "abandoned"}),
    "streaming": frozenset({"done", "failed", "abandoned"}),
    "done": frozenset({"abandoned", "failed"}),
    "failed": frozenset(),
    "abandoned": frozenset(),
}


class Condense(Exception):
    """The engine finds the prompt too long, and a compaction has not been tried yet."""


@dataclass(slots=True)
class Turn:
    """One turn on its way. Mutable; `step` is the only way to change its state."""

    id: str
    request: ChatRequest
    tenant: Tenant
    started_s: float
    at: Station
    """The engine that it goes to."""
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
    keep: Keep | None = None
    """What an engine that takes hints is told of the session."""
    replies: dict[str, Reply] = field(default_factory=dict)
    asked_s: float = 0.0
    """What it has asked the engine's model about its own messages, and how long it has waited for that."""
    told: bool = False
    """What became of these questions is in the log."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """What goes into the body for this engine only."""
        hints = {} if self.keep is None else self.at.engine.hint_fields(self.keep, self.request.body)
        return {**hints, **self.cache_fields}

    @property
    def cache_fields(self) -> Mapping[str, Any]:
        """What keeps the tenant's prompts from sharing a cache with others'."""
        return self.at.engine.cache_fields(self.tenant.cache_salt, self.request.body)

    def step(self, state: str) -> None:
        if state not in LIFE[self.state]:
            raise StateError(f"a turn cannot go from {self.state} to {state}")
        self.state = state


async def chat(steward: Steward, exchange: Exchange, turn_id: str, tenant: Tenant) -> None:
    """`POST /v1/chat/completions`."""
    raw = await exchange.body(steward.settings.max_body_bytes)
    turn = Turn(turn_id, parse_chat(raw), tenant, steward.now(), steward.fleet.first)

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
        steward.watch_release(turn.id, turn.at.engine)
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


def check_modalities(turn: Turn) -> None:
    """Raises UnsupportedError for an image that the model cannot see."""
    if "image" not in turn.at.info.modalities and has_images(turn.request.messages):
        raise UnsupportedError("this model reads text only; the request has an image", param="messages")


async def managed(steward: Steward, exchange: Exchange, turn: Turn) -> None:
    """A turn inside its session's budget."""
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
    """A turn whose session is known. An engine that finds the prompt too long after all gets one that is condensed;
    one that is not there, or takes no more turns, is passed over for another."""
    turn.tools = same_tools(resolved.view.tools, turn.request.tools)
    turn.request = with_tools(turn.request, turn.tools)
    if recall.wanted(steward, exchange.headers, turn.request):
        turn.recall, turn.request = True, recall.offered(turn.request)
    force, tried = False, set[str]()
    while True:
        turn.at, resolved = steward.route(resolved, turn.request.model, tried)
        with steward.fleet.visit(turn.at, resolved.session.id):
            try:
                await tried_once(steward, exchange, turn, resolved, force=force)
                return
            except Condense:
                force = True
            except EngineUnavailableError as error:
                if not elsewhere(steward, turn, tried, error):
                    raise


def elsewhere(steward: Steward, turn: Turn, tried: set[str], error: EngineUnavailableError) -> bool:
    """Whether a turn whose engine was not there may be tried on another. The fleet hears of it."""
    tried.add(turn.at.name)
    if turn.state != "waiting" or not steward.fleet.another(tried, turn.request.model):
        return False
    if not turn.at.draining:
        steward.fleet.lost(turn.at, error.message)
    return True


async def tried_once(steward: Steward, exchange: Exchange, turn: Turn, resolved: Resolved, *, force: bool) -> None:
    """The turn on the engine that it was routed to. Raises Condense where that may help."""
    check_modalities(turn)
    session_id = resolved.session.id
    turn.keep = keep_of(exchange, turn, resolved.session)
    async with steward.desk.lock(session_id):
        prepared = await prepared_turn(steward, turn, resolved, force=force)
    turn.step("prepared")
    try:
        await answered(steward, exchange, turn, resolved, prepared)
    except ContextOverflowError:
        if force or exchange.started or prepared.epoch is not None:
            raise
        raise Condense from None
    finally:
        if turn.open_in is not None:
            turn.open_in = None
            await asyncio.shield(steward.desk.turn_failed(session_id))


async def prepared_turn(steward: Steward, turn: Turn, resolved: Resolved, *, force: bool = False) -> Prepared:
    """The view of this turn, with everything that the client said in the log."""
    desk, tools, policy = steward.desk, turn.request.tools, steward.policy(turn.tenant)
    recorded = Tools(turn.tools_sent if turn.tools_sent is not None else turn.tools, turn.tools)
    started = steward.now()
    draft = await steward.scribe.before_turn(resolved.session.id, turn.at)
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
                classified=steward.sorter.before_turn(resolved.session.id),
            ),
        )
    except BaseException:
        await asyncio.shield(desk.log_arrivals(resolved, None, recorded))
        raise
    asked = () if turn.told else prepared.asked
    prepared = replace(prepared, view=replace(prepared.view, tools=turn.tools), asked=asked)
    await desk.log_arrivals(resolved, prepared, recorded)
    turn.open_in, turn.told = resolved.session.id, True
    if prepared.epoch is not None:
        steward.scribe.forget(resolved.session.id)
    steward.count_prepared(prepared, steward.now() - started)
    return prepared


def marks_of(steward: Steward, turn: Turn, view: View) -> Marks:
    budget = steward.budget_tokens(turn.tenant, turn.at.info)
    estimator = steward.desk.estimator
    load = load_of(view, estimator.json(turn.request.tools), turn.at.misses.ratio, estimator)
    marks = steward.policy(turn.tenant).marks(budget, turn.request.max_output_tokens, load)
    return with_room(marks) if turn.recall else marks


async def ask(steward: Steward, turn: Turn, questions: Generator[Count | Score | Ask, Any, Prepared]) -> Prepared:
    """Drives the pipeline: what it asks, the engine answers."""
    answer: Any = None
    while True:
        try:
            question = questions.send(answer)
        except StopIteration as stop:
            prepared: Prepared = stop.value
            return prepared
        if isinstance(question, Count):
            steward.telemetry.exact_counts.inc()
            answer = await count(turn, question)
        elif isinstance(question, Ask):
            answer = await steward.asking.waited(turn, question)
        else:
            answer = await score(steward, turn, question)


async def count(turn: Turn, question: Count) -> int | None:
    """The engine's own count, or None if it cannot count or cannot be asked now: then the estimate must do."""
    try:
        return await turn.at.engine.count_prompt_tokens({**turn.request.body, "messages": list(question.messages)})
    except EngineError:
        return None


async def score(steward: Steward, turn: Turn, question: Score) -> Pieces | None:
    """How likely the engine finds each token, or None if it cannot be asked now: then the distillers choose."""
    prompt = question.before + question.text
    demand = Demand(steward.desk.estimator.text(prompt), 1)
    started = steward.now()
    try:
        async with asyncio.timeout(steward.settings.selective_timeout_s), turn.at.gate.admitted(demand):
            apart: dict[str, Any] = {"cache_salt": turn.tenant.cache_salt} if turn.tenant.cache_salt else {}
            pieces = await turn.at.engine.prompt_logprobs(
                prompt, model=turn.request.model, request_id=f"{turn.id}-score", **apart
            )
    except (EngineError, ContextOverflowError, OverloadedError, TimeoutError):
        pieces = None
    steward.telemetry.selective_time.observe(steward.now() - started)
    return pieces


async def answered(steward: Steward, exchange: Exchange, turn: Turn, resolved: Resolved, prepared: Prepared) -> None:
    """Waits for room in the KV budget, then lets the engine answer."""
    request, session_id = turn.request, resolved.session.id
    stream = request.stream or turn.at.info.streams_only or turn.recall
    room = prepared.marks.budget - prepared.tokens
    output = min(request.max_output_tokens or room, room)
    cap = output if steward.must_cap_output(request, prepared, turn.at.info) else None
    messages = for_engine(turn.at.info, prepared.view.render())
    body = encode(request, messages=messages, stream=stream, max_tokens=cap, fields=turn.fields)
    extra = recall.room_tokens(prepared) if turn.recall else 0
    demand = Demand(
        prepared.tokens + extra, max(1, min(output, room - extra)), returning=turn.at.residency.of(session_id) > 0
    )
    exchange.reply_headers |= {
        "x-kvsteward-session": public_id(resolved.session),
        "x-kvsteward-tokens-in-view": str(prepared.tokens),
        "x-kvsteward-tokens-saved": str(saved_tokens(resolved, prepared)),
    }
    if prepared.asked:
        exchange.reply_headers["x-kvsteward-tokens-asked"] = str(sum(asked.tokens for asked in prepared.asked))
    turn.step("waiting")
    log = AnswerLog(steward, turn, resolved, prepared)
    try:
        async with turn.at.gate.admitted(demand) as waited_s:
            steward.telemetry.queue_time.observe(waited_s)
            engine_request = EngineRequest(PATH, body, turn.id, session_id, engine_headers(exchange))
            if turn.recall:
                await recalled(steward, exchange, turn, engine_request, log)
            else:
                async with turn.at.engine.open(engine_request) as reply:
                    await check_accepted(reply)
                    turn.step("streaming")
                    await (streamed if stream else whole)(steward, exchange, turn, reply, log)
    except BaseException as error:
        # Here the socket to the engine is closed already: writing the log must not keep the engine at work.
        await asyncio.shield(log.broken_off("abandoned" if isinstance(error, asyncio.CancelledError) else "error"))
        raise
    turn.step("done")
    if turn.keep is not None:
        turn.keep = replace(turn.keep, tools=log.called)
    if log.view_after is not None:  # only now is the room of this turn free again
        policy = steward.policy(turn.tenant)
        work = (turn.at, request, log.view_after, prepared.marks, policy)
        steward.scribe.after_turn(session_id, *work, turn.keep, turn.cache_fields)
        steward.sorter.after_turn(session_id, *work, turn.cache_fields)
    if steward.librarian is not None:
        steward.librarian.after_turn(session_id)
    if turn.keep is not None and turn.keep.tools:
        steward.note_pause(turn.at.engine, session_id, turn.keep)


def keep_of(exchange: Exchange, turn: Turn, session: Session) -> Keep | None:
    """What is known of the session; None where the engine does not want to know. Raises UnsupportedError."""
    asked = exchange.headers.get("x-kvsteward-class", turn.tenant.priority)
    if asked not in WEIGHTS:
        raise UnsupportedError(
            f"X-KVSteward-Class must be one of {', '.join(WEIGHTS)}, not '{asked}'", param="X-KVSteward-Class"
        )
    return Keep(session.ttl_s, asked) if turn.at.engine.takes_hints else None


def saved_tokens(resolved: Resolved, prepared: Prepared) -> int:
    """How much longer the prompt would be if the whole history were sent."""
    arrived = {a.hash for a in resolved.arrivals}
    view = prepared.view
    log_tokens = resolved.log_tokens + sum(i.log_tokens for i in (*view.pinned, *view.items) if i.hash in arrived)
    return max(0, log_tokens - view.message_tokens)


def engine_headers(exchange: Exchange) -> dict[str, str]:
    """What of the client's headers an engine may need: tracing and its own routing, never the client's key."""
    keep = ("traceparent", "tracestate", "x-data-parallel-rank")
    return {name: exchange.headers[name] for name in keep if name in exchange.headers}


async def passthrough(steward: Steward, exchange: Exchange, turn: Turn, raw: bytes) -> None:
    """The request as it is, in its own bytes. Nothing is logged; a client that leaves still stops the engine."""
    turn.step("prepared")
    turn.step("waiting")
    tried = set[str]()
    while True:
        turn.at, _ = steward.fleet.route(None, None, turn.request.model, tried)
        with steward.fleet.visit(turn.at, None):
            try:
                await passed(exchange, turn, raw)
                return
            except EngineUnavailableError as error:
                if not elsewhere(steward, turn, tried, error):
                    raise


async def passed(exchange: Exchange, turn: Turn, raw: bytes) -> None:
    """A request and its answer, untouched."""
    request = turn.request
    stream = request.stream or turn.at.info.streams_only
    if turn.cache_fields:
        body = encode(request, stream=stream, fields=turn.cache_fields)
    else:
        body = raw if request.stream == stream else encode(request, stream=True)
    async with turn.at.engine.open(EngineRequest(PATH, body, turn.id, None, engine_headers(exchange))) as reply:
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

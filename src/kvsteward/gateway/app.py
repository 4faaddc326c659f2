"""The composition root: settings, engine and store become one ASGI application.

Everything is a constructor argument; nothing is global. The two hot paths (chat completions, the simple chat) are
dispatched before the router; all else is an ordinary Starlette application.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from kvsteward.context.marks import Policy
from kvsteward.context.pipeline import Prepared
from kvsteward.engines.base import Engine, EngineInfo, EngineLoad
from kvsteward.errors import EngineError, KVStewardError, NotFoundError, OverloadedError, StoreError
from kvsteward.gateway import api, turn
from kvsteward.gateway.auth import tenant_of
from kvsteward.gateway.desk import Desk, Resolved
from kvsteward.gateway.gate import Gate
from kvsteward.gateway.relay import ClientGone, Exchange
from kvsteward.gateway.scribe import Scribe
from kvsteward.gateway.settings import Settings, Tenant
from kvsteward.gateway.telemetry import Telemetry
from kvsteward.gateway.upstream import PATH
from kvsteward.policy.misses import Misses
from kvsteward.policy.residency import Residency
from kvsteward.sessions.base import SessionStore
from kvsteward.wire.chat import ChatRequest
from kvsteward.wire.usage import Usage

log = logging.getLogger("kvsteward")

DEFAULT_BUDGET_TOKENS = 8_192
"""Where neither the deployment nor the engine names a limit."""
_SAMPLES = 900
_LOAD_LIMIT_S = 5.0
_SHOWN_SESSIONS = 24
_MAX_REQUEST_ID_CHARS = 128


class Steward:
    """All that the turns of one gateway share. Mutable, for one event loop."""

    def __init__(self, settings: Settings, engine: Engine, store: SessionStore) -> None:
        self.settings = settings
        self.engine = engine
        self.telemetry = Telemetry()
        self.desk = Desk(store, settings, self.wall)
        self.gate = Gate(None, None, settings.limits, self.now)
        self.residency = Residency()
        self.misses = Misses()
        self.scribe = Scribe(self)
        self.load = EngineLoad()
        self.samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self.recent_ttft_s: deque[float] = deque(maxlen=200)
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: dict[str, Counter] = {}

    @staticmethod
    def now() -> float:
        return time.monotonic()

    @staticmethod
    def wall() -> float:
        return time.time()

    async def start(self) -> None:
        """Reaches the engine, ends what a crash left open, and starts the housekeeping."""
        self._learn(await self.engine.start())
        recovered = await self.desk.call(self.desk.store.recover, now=self.wall())
        if recovered:
            log.warning("recovered %d answers that a crash had interrupted", recovered)
        self._spawn(self._sweep())
        self._spawn(self._sample())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.scribe.close()
        await self.engine.close()
        await self.desk.close()

    def _learn(self, info: EngineInfo) -> None:
        """What the engine is, at the start and again after it came back."""
        self.gate.resize(info.kv_capacity_tokens, info.max_running)
        self.residency.capacity_tokens = info.kv_capacity_tokens
        self.telemetry.capacity_tokens.set(info.kv_capacity_tokens or 0)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what a turn asks -----------------------------------------------------------------------------------------

    def budget_tokens(self, tenant: Tenant) -> int:
        """The smallest of what the tenant, the deployment and the engine allow for one session."""
        limits = (tenant.budget_tokens, self.settings.budget_tokens, self.engine.info.context_limit_tokens)
        return min((limit for limit in limits if limit), default=DEFAULT_BUDGET_TOKENS)

    def policy(self, tenant: Tenant) -> Policy:
        """The tenant's, else the deployment's."""
        return tenant.policy or self.settings.policy

    def must_cap_output(self, request: ChatRequest, prepared: Prepared) -> bool:
        """True where an answer of the length that the engine would allow could pass the session's budget."""
        asked = request.max_output_tokens
        room = prepared.marks.budget - prepared.tokens
        if asked is not None:
            return asked > room
        limit = self.engine.info.context_limit_tokens
        return limit is None or prepared.marks.budget < limit

    def check_model(self, request: ChatRequest) -> None:
        models = self.engine.info.models
        if request.model and models and request.model not in models:
            raise NotFoundError(
                f"the model '{request.model}' does not exist here",
                hint=f"Models of this deployment: {', '.join(models)}.",
                param="model",
            )

    def count_turn(self, outcome: str) -> None:
        counter = self._ended.get(outcome)
        if counter is None:
            counter = self._ended[outcome] = self.telemetry.turns.labels(outcome)
        counter.inc()

    def count_prepared(self, prepared: Prepared, seconds: float) -> None:
        self.telemetry.prepare_time.observe(seconds)
        self.telemetry.reductions.inc(sum(r.kind == "distil" for r in prepared.reductions))
        if prepared.epoch is not None:
            self.telemetry.compactions.inc()
            if prepared.epoch.judged is not None:
                self.telemetry.summaries.labels(prepared.epoch.judged.outcome).inc()

    def count_answer(self, done: turn.Turn, resolved: Resolved, prepared: Prepared, usage: Usage, spent: Usage) -> None:
        """`usage` is what the view and its answer take; `spent` what was computed for it in all rounds."""
        t = self.telemetry
        t.prompt_tokens.inc(spent.prompt_tokens)
        t.cached_tokens.inc(spent.cached_tokens)
        t.output_tokens.inc(spent.output_tokens)
        self.prompt_tokens_total += spent.prompt_tokens
        self.cached_tokens_total += spent.cached_tokens
        t.session_tokens.observe(usage.resident_tokens)
        t.saved_tokens.inc(turn.saved_tokens(resolved, prepared))
        if prepared.epoch is not None:
            t.again_tokens.inc(turn.again_tokens(resolved, prepared, usage))
        if done.first_token_s is not None:
            self.recent_ttft_s.append(done.first_token_s - done.started_s)
        before = resolved.view
        if prepared.epoch is None and before.known_tokens and before.known_for == prepared.view.known_for:
            self.misses.observe(before.known_tokens, usage.cached_tokens)
        self.residency.touch(resolved.session.id, usage.resident_tokens)
        estimator = self.desk.estimator
        # Estimated anew: the items' own figures stem from earlier rates, and comparing with them would never settle.
        estimate = estimator.json(done.request.tools) + sum(estimator.message(m) for m in prepared.view.render())
        self.desk.estimator = estimator.observed(estimate, usage.prompt_tokens)

    def watch_release(self, request_id: str) -> None:
        """A client left: makes sure that the engine let go."""
        self._spawn(self._confirm(request_id))

    async def _confirm(self, request_id: str) -> None:
        try:
            released = await self.engine.confirm_released(request_id, within_s=self.settings.release_within_s)
        except EngineError:
            return  # an engine that is down works on nothing
        if not released:
            self.telemetry.unreleased.inc()
            log.warning("the engine still works on %s, whose client has left", request_id)

    # -- housekeeping ---------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Expired sessions give back their KV; logs that nobody used for long are wiped."""
        while True:
            await asyncio.sleep(self.settings.sweep_every_s)
            try:
                await self.sweep()
            except StoreError as error:
                log.error("cannot sweep the sessions: %s", error.message)

    async def sweep(self) -> int:
        expired = await self.desk.call(
            self.desk.store.sweep, now=self.wall(), log_retention_s=self.settings.log_retention_s
        )
        for session in expired:
            await self.give_back(session.id)
        return len(expired)

    async def give_back(self, session_id: str) -> None:
        """Frees what a session has in the KV pool, where the engine can."""
        self.desk.forget(session_id)
        self.scribe.forget(session_id)
        self.residency.release(session_id)
        try:
            await self.engine.release_session(session_id)
        except EngineError as error:
            log.warning("could not release the KV of %s: %s", session_id, error.message)

    async def _sample(self) -> None:
        """Reads the engine once a second, for the page and for /v1/internal/memory."""
        was_down = False
        while True:
            try:
                async with asyncio.timeout(_LOAD_LIMIT_S):
                    self.load = await self.engine.load()
                if was_down:
                    self._learn(await self.engine.start())
                was_down = False
            except (EngineError, TimeoutError):
                self.load, was_down = EngineLoad(), True
            pool = self.gate.pool
            self.telemetry.running.set(pool.running)
            self.telemetry.waiting.set(pool.waiting)
            self.telemetry.resident_tokens.set(self.residency.total_tokens)
            self.samples.append(self.sample())
            await asyncio.sleep(1.0)

    def sample(self) -> dict[str, Any]:
        """One point of the page's charts."""
        held = self.residency.sessions()
        largest = dict(sorted(held.items(), key=lambda kv: -kv[1])[:_SHOWN_SESSIONS])
        rest = self.residency.total_tokens - sum(largest.values())
        pool = self.gate.pool
        return {
            "at_s": self.wall(),
            "sessions": largest,
            "other_tokens": rest,
            "running": pool.running,
            "waiting": pool.waiting,
            "prompt_tokens_total": self.prompt_tokens_total,
            "cached_tokens_total": self.cached_tokens_total,
            "ttft_ms": round(median(self.recent_ttft_s) * 1000, 1) if self.recent_ttft_s else None,
            "engine": asdict(self.load),
        }


class Gateway:
    """The ASGI application."""

    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        self._router: ASGIApp = Starlette(
            routes=api.routes(steward), exception_handlers=api.exception_handlers(), lifespan=self._lifespan
        )
        self._hot = {PATH: turn.chat, "/chat": api.simple_chat}

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        await self.steward.start()
        try:
            yield
        finally:
            await self.steward.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._hot.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            await self._router(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        request_id = _request_id(exchange) or self.steward.desk.ids.new()
        exchange.reply_headers["x-request-id"] = request_id
        try:
            tenant = tenant_of(exchange.headers, self.steward.settings)
            await handler(self.steward, exchange, request_id, tenant)
        except ClientGone:
            return
        except KVStewardError as error:
            if error.status >= 500 and not isinstance(error, OverloadedError):
                log.warning("%s: %s", request_id, error.message)
            await exchange.fail(error, request_id)
        except Exception as error:  # the last line: a fault of ours must not become a bare 500
            log.exception("%s: fault in kvsteward", request_id)
            await exchange.fail(KVStewardError(f"internal error ({type(error).__name__})"), request_id)


def _request_id(exchange: Exchange) -> str:
    """The client's own, if it is usable, else empty."""
    sent = exchange.headers.get("x-request-id", "")
    if sent and len(sent) <= _MAX_REQUEST_ID_CHARS and sent.isascii() and sent.isprintable():
        return sent
    return ""


def create_app(settings: Settings, engine: Engine, store: SessionStore) -> Gateway:
    """The application. Starting it starts the engine; stopping it stops the engine and closes the store."""
    return Gateway(Steward(settings, engine, store))

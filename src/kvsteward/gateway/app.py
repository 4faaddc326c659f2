"""The composition root: settings, engine and store become one ASGI application.

Everything is a constructor argument; nothing is global. The two hot paths (chat completions, the simple chat) are
dispatched before the router; all else is an ordinary Starlette application.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from itertools import count
from statistics import median
from typing import Any

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from kvsteward.context.marks import Policy
from kvsteward.context.pipeline import Prepared
from kvsteward.engines.base import Engine, EngineInfo, Keep
from kvsteward.errors import (
    EngineError,
    EngineUnavailableError,
    KVStewardError,
    NotFoundError,
    OverloadedError,
    StoreError,
)
from kvsteward.gateway import api, turn
from kvsteward.gateway.answer import again_tokens
from kvsteward.gateway.asking import Asking
from kvsteward.gateway.auth import tenant_of
from kvsteward.gateway.desk import Desk, Resolved
from kvsteward.gateway.fleet import Fleet, Station
from kvsteward.gateway.librarian import Librarian
from kvsteward.gateway.relay import ClientGone, Exchange
from kvsteward.gateway.scribe import Scribe
from kvsteward.gateway.settings import Settings, Tenant, check_asks, check_isolation, check_selective
from kvsteward.gateway.sorter import Sorter
from kvsteward.gateway.telemetry import Telemetry
from kvsteward.gateway.upstream import PATH
from kvsteward.sessions.base import Session, SessionStore
from kvsteward.wire.chat import ChatRequest
from kvsteward.wire.usage import Usage

log = logging.getLogger("kvsteward")

DEFAULT_BUDGET_TOKENS = 8_192
"""Where neither the deployment nor the engine names a limit."""
_SAMPLES = 900
_LOAD_LIMIT_S = 5.0
_WATCH_EVERY_S = 1.0
_HELD_EVERY = 5
"""Readings of an engine for one of what its sessions hold."""
_MAX_NOTES = 64
_NOTE_LIMIT_S = 2.0
_RELEASES = 8
_SHOWN_SESSIONS = 24
_MAX_REQUEST_ID_CHARS = 128


class Steward:
    """All that the turns of one gateway share. Mutable, for one event loop."""

    def __init__(self, settings: Settings, engines: Sequence[Engine], store: SessionStore) -> None:
        self.settings = settings
        self.telemetry = Telemetry()
        self.desk = Desk(store, settings, self.wall)
        self.fleet = Fleet(engines, settings.limits, self.now)
        self.asking = Asking(self)
        self.scribe = Scribe(self)
        self.sorter = Sorter(self)
        self.librarian = self._librarian(settings, store)
        self.samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self.recent_ttft_s: deque[float] = deque(maxlen=200)
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: dict[str, Counter] = {}
        self._notes = 0

    def _librarian(self, settings: Settings, store: SessionStore) -> Librarian | None:
        """Raises ConfigError where the store keeps no vectors, or what keeps them is not installed."""
        return Librarian(self, settings.embeddings, store.vectors()) if settings.embeddings else None

    @staticmethod
    def now() -> float:
        return time.monotonic()

    @staticmethod
    def wall() -> float:
        return time.time()

    async def start(self) -> None:
        """Reaches the engines, ends what a crash left open, and starts the housekeeping. Raises EngineError if not one
        engine can be reached, ConfigError for an option that an engine cannot honour."""
        check_asks(self.settings)
        await self._reach()
        check_selective(self.settings, [station.info for station in self.fleet.stations if station.up])
        check_isolation(self.settings, [station.engine for station in self.fleet.stations])
        recovered = await self.desk.call(self.desk.store.recover, now=self.wall())
        if recovered:
            log.warning("recovered %d answers that a crash had interrupted", recovered)
        if self.librarian is not None:
            self.librarian.start()
        self._spawn(self._sweep())
        for station in self.fleet.stations:
            self._spawn(self._watch(station))
        self._spawn(self._sample())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.scribe.close()
        await self.sorter.close()
        if self.librarian is not None:
            await self.librarian.close()
        for station in self.fleet.stations:
            await station.engine.close()
        await self.desk.close()

    async def _reach(self) -> None:
        errors: list[EngineError] = []
        for station in self.fleet.stations:
            try:
                self._learn(station, await station.engine.start())
            except EngineError as error:
                errors.append(error)
                station.failed(error.message, surely=True)
                log.warning("%s is down: %s", station.name, error.message)
        if len(errors) == len(self.fleet.stations):
            raise errors[0]

    def _learn(self, station: Station, info: EngineInfo) -> None:
        station.learn(info)
        self.telemetry.capacity_tokens.set(self.fleet.capacity_tokens() or 0)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what a turn asks -----------------------------------------------------------------------------------------

    def route(self, resolved: Resolved, model: str, avoid: Collection[str]) -> tuple[Station, Resolved]:
        """The engine of a turn; its session is bound to it. Raises OverloadedError where none can take it."""
        session = resolved.session
        before = self.fleet.station_of(session.id, session.engine)
        station, reason = self.fleet.route(session.id, session.engine, model, avoid)
        if before is not None and before is not station:
            log.info("%s goes on at %s: %s", session.id, station.name, reason)
            self.let_go(before, session)
        if session.engine != station.name:
            resolved = replace(resolved, session=replace(session, engine=station.name))
        return station, resolved

    def let_go(self, station: Station, session: Session) -> None:
        """A session has left an engine: what it had there goes first. Nobody waits for it."""
        station.residency.release(session.id)
        if station.up:
            self._spawn(self._release(station, session, moved=True))

    async def _release(self, station: Station, session: Session, *, moved: bool = False) -> None:
        salt = self.settings.cache_salt(session.tenant)
        try:
            await station.engine.release_session(session.id, moved=moved, cache_salt=salt)
        except EngineError as error:
            log.warning("could not release the KV of %s: %s", session.id, error.message)

    def budget_tokens(self, tenant: Tenant, info: EngineInfo | None = None) -> int:
        """The smallest of what the tenant, the deployment and the engine allow for one session. Without `info`: that
        all engines allow."""
        infos = [info] if info else [station.info for station in self.fleet.stations]
        limits = (tenant.budget_tokens, self.settings.budget_tokens, *(info.context_limit_tokens for info in infos))
        return min((limit for limit in limits if limit), default=DEFAULT_BUDGET_TOKENS)

    def policy(self, tenant: Tenant) -> Policy:
        """The tenant's, else the deployment's."""
        return tenant.policy or self.settings.policy

    def must_cap_output(self, request: ChatRequest, prepared: Prepared, info: EngineInfo) -> bool:
        """True where an answer of the length that the engine would allow could pass the session's budget."""
        asked = request.max_output_tokens
        room = prepared.marks.budget - prepared.tokens
        if asked is not None:
            return asked > room
        limit = info.context_limit_tokens
        return limit is None or prepared.marks.budget < limit

    def check_model(self, request: ChatRequest) -> None:
        models = self.fleet.models()
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
        self.telemetry.selective_saved.inc(
            sum(r.tokens_before - r.tokens_after for r in prepared.reductions if r.selective)
        )
        for asked in prepared.asked:
            self.telemetry.count_asked(asked)
        if prepared.unsorted:
            self.telemetry.asks.labels("class", "late").inc()
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
            t.again_tokens.inc(again_tokens(resolved, prepared, usage))
        if done.first_token_s is not None:
            self.recent_ttft_s.append(done.first_token_s - done.started_s)
        before = resolved.view
        if prepared.epoch is None and before.known_tokens and before.known_for == prepared.view.known_for:
            done.at.misses.observe(before.known_tokens, usage.cached_tokens)
        done.at.residency.touch(resolved.session.id, usage.resident_tokens)
        estimator = self.desk.estimator
        # Estimated anew: the items' own figures stem from earlier rates, and comparing with them would never settle.
        estimate = estimator.json(done.request.tools) + sum(estimator.message(m) for m in prepared.view.render())
        self.desk.estimator = estimator.observed(estimate, usage.prompt_tokens)

    def note_pause(self, engine: Engine, session_id: str, keep: Keep) -> None:
        """Tells an engine that takes hints what a session waits for. Nobody waits for it, and under load it is left
        out: a note that is late is worth nothing."""
        if self._notes >= _MAX_NOTES:
            self.telemetry.notes.labels("dropped").inc()
            return
        self._notes += 1
        self._spawn(self._note(engine, session_id, keep))

    async def _note(self, engine: Engine, session_id: str, keep: Keep) -> None:
        try:
            async with asyncio.timeout(_NOTE_LIMIT_S):
                await engine.note_pause(session_id, keep)
            self.telemetry.notes.labels("sent").inc()
        except (EngineError, TimeoutError) as error:
            self.telemetry.notes.labels("failed").inc()
            log.warning("could not tell the engine what %s waits for: %s", session_id, error)
        finally:
            self._notes -= 1

    def watch_release(self, request_id: str, engine: Engine) -> None:
        """A client left: makes sure that the engine let go."""
        self._spawn(self._confirm(request_id, engine))

    async def _confirm(self, request_id: str, engine: Engine) -> None:
        try:
            released = await engine.confirm_released(request_id, within_s=self.settings.release_within_s)
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
        await self.desk.settle()
        expired = await self.desk.call(
            self.desk.store.sweep, now=self.wall(), log_retention_s=self.settings.log_retention_s
        )
        for start in range(0, len(expired), _RELEASES):
            await asyncio.gather(*map(self.give_back, expired[start : start + _RELEASES]))
        return len(expired)

    async def give_back(self, session: Session) -> None:
        """Frees what a session has in the KV pool, where the engine can."""
        self.desk.forget(session.id)
        self.scribe.forget(session.id)
        self.sorter.forget(session.id)
        if self.librarian is not None:
            self.librarian.forget(session.id)
        station = self.fleet.station_of(session.id, session.engine)
        self.fleet.forget(session.id)
        if station is not None:
            station.residency.release(session.id)
            if station.up:
                await self._release(station, session)

    async def _watch(self, station: Station) -> None:
        """Reads an engine once a second: what it does, and whether it is there."""
        missed = not station.up
        for reading in count():
            try:
                async with asyncio.timeout(_LOAD_LIMIT_S):
                    load = await station.engine.load()
                    if self.fleet.several:
                        await station.engine.check()
                if missed or not station.up:
                    self._learn(station, await station.engine.start())
                station.read(load)
                missed = False
                if reading % _HELD_EVERY == 0:
                    station.held = await station.engine.held()
            except (EngineError, TimeoutError, ValueError) as error:
                missed, was_up = True, station.up
                station.failed(str(error) or "no answer in time", surely=isinstance(error, EngineUnavailableError))
                if was_up and not station.up:
                    log.warning("%s is down: %s", station.name, station.problem)
                    self.fleet.send_away(station)
            await asyncio.sleep(_WATCH_EVERY_S)

    async def _sample(self) -> None:
        """Once a second a point for the page."""
        while True:
            self.telemetry.running.set(self.fleet.running())
            self.telemetry.waiting.set(self.fleet.waiting())
            self.telemetry.resident_tokens.set(self.fleet.resident_tokens())
            for station in self.fleet.stations:
                self.telemetry.engine_up.labels(station.name).set(station.up and not station.draining)
            self.samples.append(self.sample())
            await asyncio.sleep(1.0)

    def sample(self) -> dict[str, Any]:
        """One point of the page's charts."""
        held = self.fleet.sessions()
        largest = dict(sorted(held.items(), key=lambda kv: -kv[1])[:_SHOWN_SESSIONS])
        rest = self.fleet.resident_tokens() - sum(largest.values())
        return {
            "at_s": self.wall(),
            "sessions": largest,
            "other_tokens": rest,
            "running": self.fleet.running(),
            "waiting": self.fleet.waiting(),
            "prompt_tokens_total": self.prompt_tokens_total,
            "cached_tokens_total": self.cached_tokens_total,
            "ttft_ms": round(median(self.recent_ttft_s) * 1000, 1) if self.recent_ttft_s else None,
            "engine": asdict(self.fleet.load()),
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


def create_app(settings: Settings, engines: Sequence[Engine], store: SessionStore) -> Gateway:
    """The application. Starting it starts the engines; stopping it stops them and closes the store. Raises ConfigError
    for no engine, or two of one name."""
    return Gateway(Steward(settings, engines, store))

"""Everything that is not a chat completion: sessions, the account, models, health, metrics, and the simple chat."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvsteward import __version__
from kvsteward.context.recall import make_ask
from kvsteward.engines.base import Engine
from kvsteward.errors import EngineError, KVStewardError, NotFoundError, ProtocolError, StateError
from kvsteward.gateway import dashboard, fleet_api, turn
from kvsteward.gateway.auth import operates, tenant_of
from kvsteward.gateway.bodies import body_of, json, number_of, whole_of
from kvsteward.gateway.desk import public_id, storage_id
from kvsteward.gateway.recall import look_up
from kvsteward.gateway.relay import Exchange
from kvsteward.gateway.settings import Tenant
from kvsteward.sessions.base import Entry, Session
from kvsteward.wire.chat import parse_chat, parse_object
from kvsteward.wire.errors import error_body
from kvsteward.wire.fingerprint import root

if TYPE_CHECKING:
    from kvsteward.gateway.app import Steward

Endpoint = Callable[["Steward", Request, Tenant], Awaitable[Response]]
_MAX_PAGE = 1_000
_MAX_OFFSET = 1 << 40


def routes(steward: Steward) -> list[BaseRoute]:
    """All routes but the two hot ones."""

    def route(path: str, endpoint: Endpoint, method: str = "GET") -> Route:
        async def handle(request: Request) -> Response:
            return await endpoint(steward, request, tenant_of(request.headers, steward.settings))

        return Route(path, handle, methods=[method])

    async def health(_: Request) -> Response:
        return await _health(steward)

    async def metrics(_: Request) -> Response:
        return Response(steward.telemetry.text(), media_type="text/plain; version=0.0.4")

    return [
        *dashboard.routes(),
        Route("/health", health),
        Route("/metrics", metrics),
        route("/v1/models", _models),
        route("/v1/internal/memory", _memory),
        route("/v1/internal/history", _history),
        route("/v1/sessions", _create, "POST"),
        route("/v1/sessions", _list),
        route("/v1/sessions/{id:path}/log", _log),
        route("/v1/sessions/{id:path}/view", _view),
        route("/v1/sessions/{id:path}/items/{hash}", _item),
        route("/v1/sessions/{id:path}/recall", _recall),
        route("/v1/sessions/{id:path}/move", fleet_api.move, "POST"),
        route("/v1/engines", fleet_api.engines),
        route("/v1/engines/drain", fleet_api.drain, "POST"),
        route("/v1/engines/undrain", fleet_api.undrain, "POST"),
        route("/v1/sessions/{id:path}", _get),
        route("/v1/sessions/{id:path}", _delete, "DELETE"),
        route("/create_session", _create_simple, "POST"),
    ]


def exception_handlers() -> dict[Any, Any]:
    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, KVStewardError)
        return json(error_body(error), error.status)

    async def theirs(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = NotFoundError if error.status_code == 404 else ProtocolError
        ours_ = kind(f"{request.method} {request.url.path}: {error.detail}", hint="The README lists the endpoints.")
        return json(error_body(ours_), error.status_code)

    async def fault(_: Request, error: Exception) -> Response:
        return json(error_body(KVStewardError(f"internal error ({type(error).__name__})")), 500)

    return {KVStewardError: ours, HTTPException: theirs, Exception: fault}


# -- health, models, the account ----------------------------------------------------------------------------------


async def _health(steward: Steward) -> Response:
    """Well as long as one engine answers; `engine` is the first that does, or the first."""
    stations = steward.fleet.stations
    problems = await asyncio.gather(*(_problem(station.engine) for station in stations))
    info, problem = next(
        ((s.info, None) for s, found in zip(stations, problems, strict=True) if found is None),
        (stations[0].info, problems[0]),
    )
    body = {
        "status": "ok" if problem is None else "engine unavailable",
        "version": __version__,
        "engine": {"dialect": info.dialect, "version": info.version, "problem": problem},
        "engines": {"all": len(stations), "answering": problems.count(None)},
        "budget_tokens": steward.budget_tokens(steward.settings.default_tenant),
    }
    return json(body, 200 if problem is None else 503)


async def _problem(engine: Engine) -> str | None:
    try:
        await engine.check()
    except EngineError as error:
        return error.message
    return None


async def _models(steward: Steward, _: Request, tenant: Tenant) -> Response:
    budget = steward.budget_tokens(tenant)
    cards = [
        {"id": name, "object": "model", "created": 0, "owned_by": "kvsteward", "max_model_len": budget}
        for name in steward.fleet.models()
    ]
    return json({"object": "list", "data": cards})


async def _memory(steward: Steward, request: Request, tenant: Tenant) -> Response:
    """The account of all engines together. Blocks are the engine's where it reports them, else those that the session
    ledger implies. With `?limit=N` only the N sessions that were used last."""
    fleet = steward.fleet
    info, load, capacity = fleet.first.info, fleet.load(), fleet.capacity_tokens()
    limit = whole_of(request, "limit", _MAX_PAGE, 1, _MAX_PAGE)
    sessions = await steward.desk.call(steward.desk.store.list, tenant=tenant.name, limit=limit)
    resident = fleet.resident_tokens()
    block = info.block_tokens or 1
    total = capacity // block if capacity else None
    usage = load.kv_usage_ratio
    if usage is None and capacity:
        usage = min(1.0, resident / capacity)
    used = round(usage * total) if usage is not None and total else -(-resident // block)
    return json(
        {
            "now_s": steward.wall(),
            "gpu_memory_utilization": None,
            "num_blocks_used": used,
            "num_blocks_total": total,
            "block_size": block,
            "kv_cache_usage": usage,
            "kv_capacity_tokens": capacity,
            "kv_bytes_per_token": info.kv_bytes_per_token,
            "weight_bytes": info.weight_bytes,
            "k_dtype": info.k_dtype,
            "v_dtype": info.v_dtype,
            "budget_tokens": steward.budget_tokens(tenant),
            "resident_tokens": resident,
            "cache_miss_ratio": round(max(station.misses.ratio for station in fleet.stations), 4),
            "running": fleet.running(),
            "waiting": fleet.waiting(),
            "engine": asdict(load),
            "sessions": [described(steward, session, tenant) for session in sessions],
        }
    )


async def _history(steward: Steward, request: Request, tenant: Tenant) -> Response:
    """Samples of the last minutes, oldest first. With `?after=SECONDS` only newer ones. Sessions of other tenants are
    counted, not named."""
    after = number_of(request, "after", 0.0)
    return json({"samples": [_own(s, tenant) for s in steward.samples if s["at_s"] > after]})


def _own(sample: dict[str, Any], tenant: Tenant) -> dict[str, Any]:
    """A sample as one tenant may see it, with the ids that this tenant uses."""
    prefix = storage_id(tenant.name, "")
    own = {id_.removeprefix(prefix): tokens for id_, tokens in sample["sessions"].items() if id_.startswith(prefix)}
    hidden = sum(sample["sessions"].values()) - sum(own.values())
    return {**sample, "sessions": own, "other_tokens": sample["other_tokens"] + hidden}


# -- sessions -----------------------------------------------------------------------------------------------------


def described(steward: Steward, session: Session, tenant: Tenant) -> dict[str, Any]:
    """A session as its tenant may see it: engines are named to operators only."""
    station = steward.fleet.station_of(session.id, session.engine)
    blocks, tokens = (None, None)
    if station is not None and station.held is not None:
        nothing = (0, 0) if station.held.complete else (None, None)
        blocks, tokens = station.held.sessions.get(session.id, nothing)
    return {
        "id": public_id(session),
        "object": "session",
        "state": session.state,
        "title": session.title,
        "model": session.model,
        "turns": session.turns,
        "created_s": session.created_s,
        "last_used_s": session.last_used_s,
        "ttl_s": session.ttl_s,
        "branched_from": (session.branched_from or "").removeprefix(storage_id(session.tenant, "")) or None,
        "head": session.head,
        "tokens_resident": station.residency.of(session.id) if station else 0,
        "tokens_in_view": session.view_tokens,
        "tokens_in_log": session.log_tokens,
        "tokens_saved": session.saved_tokens,
        "compactions": session.compactions,
        "tokens_prefilled_again": session.again_tokens,
        "engine": station.name if station and operates(tenant, steward.settings) else None,
        "engine_blocks": blocks,
        "engine_tokens": tokens,
    }


def _entry(entry: Entry, *, whole: bool = True) -> dict[str, Any]:
    described = {
        "hash": entry.hash,
        "parent": entry.parent,
        "depth": entry.depth,
        "source": entry.source,
        "tokens": entry.tokens,
        "created_s": entry.created_s,
        "finish": entry.finish,
        "response_id": entry.response_id,
    }
    return {**described, "message": orjson.Fragment(entry.raw)} if whole else described


async def found(steward: Steward, request: Request, tenant: Tenant) -> Session:
    session_id = storage_id(tenant.name, request.path_params["id"])
    session = await steward.desk.call(steward.desk.store.get, session_id)
    if session is None or session.tenant != tenant.name:
        raise NotFoundError(f"there is no session '{request.path_params['id']}'")
    return session


async def _create(steward: Steward, request: Request, tenant: Tenant) -> Response:
    return json(described(steward, await _created(steward, await body_of(request), tenant), tenant), 201)


async def _create_simple(steward: Steward, request: Request, tenant: Tenant) -> Response:
    session = await _created(steward, await body_of(request), tenant)
    return json({"session_id": public_id(session)})


async def _created(steward: Steward, body: dict[str, Any], tenant: Tenant) -> Session:
    """`{"session_id"?, "ttl_s"?, "system"?, "model"?, "title"?}`."""
    for name, kind in (("session_id", str), ("system", str), ("model", str), ("title", str)):
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise ProtocolError(f"'{name}' must be a string", param=name)
    ttl_s = body.get("ttl_s")
    if ttl_s is not None and (not isinstance(ttl_s, int | float) or isinstance(ttl_s, bool) or ttl_s <= 0):
        raise ProtocolError("'ttl_s' must be a positive number of seconds", param="ttl_s")
    session_id = storage_id(tenant.name, body.get("session_id") or uuid.uuid4().hex)
    desk = steward.desk
    session = desk.new_session(session_id, tenant, body.get("model"), body.get("title") or "", ttl_s)
    try:
        await desk.call(desk.store.create, session)
    except StateError:
        raise ProtocolError(f"the session '{body['session_id']}' exists already", param="session_id") from None
    if body.get("system"):
        message = {"role": "system", "content": body["system"]}
        resolved = await desk.after(session, root(tenant.name), 0, [message])
        session = await desk.log_arrivals(resolved, None, None)
    return session


def _page(request: Request) -> dict[str, int]:
    """`?limit=N&offset=N`."""
    limit = whole_of(request, "limit", 100, 1, _MAX_PAGE)
    return {"limit": limit, "offset": whole_of(request, "offset", 0, 0, _MAX_OFFSET)}


async def _list(steward: Steward, request: Request, tenant: Tenant) -> Response:
    page = _page(request)
    sessions = await steward.desk.call(steward.desk.store.list, tenant=tenant.name, **page)
    return json({"object": "list", "data": [described(steward, session, tenant) for session in sessions]})


async def _get(steward: Steward, request: Request, tenant: Tenant) -> Response:
    return json(described(steward, await found(steward, request, tenant), tenant))


async def _delete(steward: Steward, request: Request, tenant: Tenant) -> Response:
    session = await found(steward, request, tenant)
    await steward.desk.call(steward.desk.store.delete, session.id)
    await steward.give_back(session)
    return json({"id": public_id(session), "object": "session.deleted", "deleted": True})


async def _log(steward: Steward, request: Request, tenant: Tenant) -> Response:
    """The path to the head, whole; with `?q=TEXT` the entries of all branches that hold a text, or else its words, best
    first; with `?head=HASH` another branch. `notes` has what left the system prompt because it changes.

    With `?branches=all` a page of all entries as they came, `&limit=N` from `&offset=N` on. It may be shorter, since it
    is bounded in bytes: the next one begins after its last, and an empty one is behind the end."""
    session = await found(steward, request, tenant)
    store = steward.desk.store
    branches = request.query_params.get("branches")
    if branches is not None:
        if branches != "all":
            raise ProtocolError(f"'branches' can only be 'all', not '{branches}'", param="branches")
        page = await steward.desk.call(store.entries, session.id, **_page(request))
        return json({"object": "list", "session": public_id(session), "data": [_entry(entry) for entry in page]})
    needle = request.query_params.get("q")
    entries: Sequence[Entry]
    if needle:
        limit = whole_of(request, "limit", 20, 0, _MAX_PAGE)
        entries = await steward.desk.call(store.lookup, session.id, needle, limit=limit)
    else:
        entries = await steward.desk.call(store.path, session.id, request.query_params.get("head"))
    decisions = await steward.desk.call(store.decisions, session.id)
    notes = [orjson.Fragment(d.payload) for d in decisions if d.kind == "note"]
    body = {"object": "list", "session": public_id(session), "data": [_entry(entry) for entry in entries]}
    return json({**body, "notes": notes})


async def _view(steward: Steward, request: Request, tenant: Tenant) -> Response:
    """What the model sees now, and what was decided to get there."""
    session = await found(steward, request, tenant)
    node = request.query_params.get("head") or session.head
    shown = await steward.desk.shown(session.id, node)
    decisions = await steward.desk.call(steward.desk.store.decisions, session.id)
    tokens = shown.view.known_tokens or shown.view.estimate_tokens(0)
    return json(
        {
            "session": public_id(session),
            "head": node,
            "messages": shown.view.render(),
            "tokens": tokens,
            "exact": bool(shown.view.known_tokens),
            "log_tokens": tokens + max(0, shown.log_tokens - shown.view.message_tokens),
            "dropped_messages": shown.view.epoch.dropped,
            "summary": shown.view.epoch.judged,
            "decisions": [
                {"at": d.at, "kind": d.kind, "created_s": d.created_s, "payload": orjson.Fragment(d.payload)}
                for d in decisions
            ],
        }
    )


async def _item(steward: Steward, request: Request, tenant: Tenant) -> Response:
    session = await found(steward, request, tenant)
    prefix = request.path_params["hash"]
    if len(prefix) < 8 or not all(c in "0123456789abcdef" for c in prefix):
        raise ProtocolError("an item is named by 8 or more hex digits of its hash", param="hash")
    entry = await steward.desk.call(steward.desk.store.item, session.id, prefix)
    if entry is None:
        raise NotFoundError(f"the session has no item '{prefix}'")
    return json(_entry(entry))


async def _recall(steward: Steward, request: Request, tenant: Tenant) -> Response:
    """What the recall tool answers: `?query=WORDS` or `?hash=HEX`, with `&range=FIRST-LAST`, in `&limit=TOKENS`."""
    session = await found(steward, request, tenant)
    ask = make_ask(*(request.query_params.get(name, "") for name in ("hash", "query", "range")))
    if isinstance(ask, str):
        raise ProtocolError(ask, param="query")
    limit = whole_of(request, "limit", 1_024, 64, 65_536)
    shown = await steward.desk.shown(session.id, session.head)
    answer = await look_up(steward, session.id, session.head, shown.view, ask, limit)
    body = {"session": public_id(session), "text": answer.text, "tokens": answer.tokens, "hashes": answer.hashes}
    return json({**body, "search": answer.search} if answer.search else body)


# -- the simple chat ----------------------------------------------------------------------------------------------


async def simple_chat(steward: Steward, exchange: Exchange, turn_id: str, tenant: Tenant) -> None:
    """`POST /chat {"session_id", "message"}`: the gateway keeps the history, the client sends only what is new. Other
    fields (max_tokens, temperature, stream, ...) go to the engine as they are."""
    body = parse_object(await exchange.body(steward.settings.max_body_bytes))
    session_id, message = body.pop("session_id", None), body.pop("message", None)
    if not isinstance(session_id, str) or not session_id:
        raise ProtocolError("'session_id' must be a string", param="session_id")
    if not isinstance(message, str) or not message:
        raise ProtocolError("'message' must be a text", param="message")
    desk = steward.desk
    session = await desk.call(desk.store.get, storage_id(tenant.name, session_id))
    if session is None:
        raise NotFoundError(f"there is no session '{session_id}'", hint="POST /create_session makes one.")
    model = body.pop("model", None) or session.model or next(iter(steward.fleet.models()), "")
    raw = orjson.dumps({**body, "model": model, "messages": [{"role": "user", "content": message}]})
    done = turn.Turn(turn_id, parse_chat(raw), tenant, steward.now(), steward.fleet.first)
    exchange.shape = lambda completion: _simple_answer(session_id, completion)

    async def work() -> None:
        path = await desk.call(desk.store.path, session.id)
        resolved = await desk.after(session, session.head, len(path), done.request.messages)
        await turn.run(steward, exchange, done, resolved)

    await turn.ended(steward, done, exchange, work)


def _simple_answer(session_id: str, completion: dict[str, Any]) -> dict[str, Any]:
    choice = completion["choices"][0] if completion.get("choices") else {}
    message = choice.get("message") or {}
    return {
        "session_id": session_id,
        "message": message.get("content") or "",
        "finish_reason": choice.get("finish_reason"),
        "usage": completion.get("usage"),
    }

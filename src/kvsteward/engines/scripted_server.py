"""The scripted engine behind a URL: an ASGI application that speaks the imitated engine's endpoints.

For tests of adapters and gateways over real sockets. Invariant: it adds no behaviour of its own; it only puts into
HTTP what the engine does, down to a connection that breaks off.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from kvsteward.engines.base import EngineReply, EngineRequest
from kvsteward.engines.scripted import ScriptedEngine
from kvsteward.errors import EngineUnavailableError

Endpoint = Callable[[Request], Awaitable[Response]]


def serve_scripted(engine: ScriptedEngine) -> Starlette:
    """The application. Which endpoints it has depends on `engine.options.imitates`."""
    own = {"vllm": _vllm_routes, "sglang": _sglang_routes, "llama-server": _llama_routes}
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", _Chat(engine)),
        Route("/v1/models", _models(engine)),
        Route("/health", _saying({"status": "ok"})),
    ]
    more = own.get(engine.options.imitates)
    return Starlette(routes=routes + (more(engine) if more else []))


@asynccontextmanager
async def running_scripted(engine: ScriptedEngine) -> AsyncIterator[str]:
    """Serves the engine on a free port of this machine; the value is its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(serve_scripted(engine), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await engine.close()
        await serving
        listener.close()


class _Chat:
    """POST /v1/chat/completions, as a bare ASGI application: it must see the client leave, and be able to break off."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        answering = asyncio.create_task(self._answer(self._request(scope, body), send))
        leaving = asyncio.create_task(_gone(receive))
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not answering.done():
            answering.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        try:
            await answering
        except asyncio.CancelledError:
            return

    async def _answer(self, request: EngineRequest, send: Send) -> None:
        try:
            async with self._engine.open(request) as reply:
                await _relay(reply, send)
        except EngineUnavailableError as error:
            response = JSONResponse({"error": {"message": error.message, "type": "ServiceUnavailableError"}}, 503)
            await response({"type": "http", "method": "POST", "headers": []}, _never, send)

    def _request(self, scope: Scope, body: bytes) -> EngineRequest:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        fields = _object(body)
        session = headers.get("x-session-id") or fields.get("session_id")
        if "id_slot" in fields:
            session = _slot_session(fields["id_slot"])
        request_id = fields.get("rid") or headers.get("x-request-id") or uuid4().hex
        return EngineRequest(scope["path"], body, str(request_id), session, headers)


async def _relay(reply: EngineReply, send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    async for chunk in reply.chunks():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Any:
    await asyncio.Event().wait()


def _saying(value: Any) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return JSONResponse(value)

    return endpoint


def _models(engine: ScriptedEngine) -> Endpoint:
    options = engine.options
    card: dict[str, Any] = {"id": options.model, "object": "model", "owned_by": options.imitates}
    if options.imitates == "llama-server":
        card["meta"] = {"n_ctx": options.context_limit_tokens, "n_ctx_train": options.context_limit_tokens}
    else:
        card["max_model_len"] = options.context_limit_tokens
    return _saying({"object": "list", "data": [card]})


def _counter(engine: ScriptedEngine, answer: Callable[[int], dict[str, Any]]) -> Endpoint:
    async def count(request: Request) -> Response:
        tokens = await engine.count_prompt_tokens(_object(await request.body()))
        return JSONResponse(answer(tokens or 0))

    return count


def _metrics(engine: ScriptedEngine, names: dict[str, str]) -> Endpoint:
    """`names`: from a field of EngineLoad, or "info", to the start of its line."""

    async def metrics(_: Request) -> Response:
        load = await engine.load()
        lines = [f"{name} {getattr(load, field)}" for field, name in names.items() if field != "info"]
        if "info" in names:
            lines.append(names["info"])
        return PlainTextResponse("\n".join(lines) + "\n")

    return metrics


def _vllm_routes(engine: ScriptedEngine) -> list[BaseRoute]:
    label = '{engine="0",model_name="scripted"}'
    info = f'block_size="{engine.options.block_tokens}",cache_dtype="auto",num_gpu_blocks="{engine.pool.blocks}"'
    names = {
        "running": f"vllm:num_requests_running{label}",
        "waiting": f"vllm:num_requests_waiting{label}",
        "kv_usage_ratio": f"vllm:kv_cache_usage_perc{label}",
        "preemptions_total": f"vllm:num_preemptions_total{label}",
        "prefix_queried_tokens_total": f"vllm:prefix_cache_queries_total{label}",
        "prefix_hit_tokens_total": f"vllm:prefix_cache_hits_total{label}",
        "info": f"vllm:cache_config_info{{{info}}} 1.0",
    }
    return [
        *(_connector_routes(engine) if engine.options.hints else []),
        Route("/version", _saying({"version": "0.32.0"})),
        Route("/metrics", _metrics(engine, names)),
        Route("/tokenize", _counter(engine, lambda n: {"count": n, "tokens": []}), methods=["POST"]),
    ]


def _connector_routes(engine: ScriptedEngine) -> list[BaseRoute]:
    """kvsteward's endpoint plug-in (`kv/vllm/endpoint.py`), as far as a gateway reads it."""

    async def sessions(_: Request) -> Response:
        size = engine.options.block_tokens
        held = {session: blocks for session, blocks in engine.held_blocks().items() if blocks}
        data = [{"session": s, "blocks": n, "tokens": n * size, "idle_s": 0.0} for s, n in held.items()]
        total = sum(held.values())
        totals = {"sessions": len(held), "blocks": total, "tokens": total * size}
        return JSONResponse({"connector": "kvsteward", "version": 1, "totals": totals, "data": data})

    async def note(request: Request) -> Response:
        session, verb = request.path_params["session"], request.path_params["verb"]
        engine.notes.append((session, verb, _object(await request.body())))
        if verb == "release":
            await engine.release_session(session)
        return JSONResponse({"session": session, "object": "session.noted", "heard": True})

    return [
        Route("/kvsteward/sessions", sessions),
        Route("/kvsteward/sessions/{session:path}/{verb}", note, methods=["POST"]),
    ]


def _sglang_routes(engine: ScriptedEngine) -> list[BaseRoute]:
    options = engine.options
    names = {
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "kv_usage_ratio": "sglang:token_usage",
        "preemptions_total": "sglang:num_retracted_requests_total",
        "prefix_queried_tokens_total": "sglang:prompt_tokens_total",
        "prefix_hit_tokens_total": "sglang:cached_tokens_total",
    }
    server = {
        "version": "0.5.23",
        "max_total_num_tokens": engine.pool.blocks * options.block_tokens,
        "page_size": options.block_tokens,
        "max_running_requests": options.max_running,
        "kv_cache_dtype": "auto",
    }

    async def abort(request: Request) -> Response:
        engine.abort(str(_object(await request.body()).get("rid")))
        return JSONResponse({})

    return [
        Route("/server_info", _saying(server)),
        Route("/get_model_info", _saying({"model_path": options.model})),
        Route("/metrics", _metrics(engine, names)),
        Route("/tokenize", _counter(engine, lambda n: {"count": n, "tokens": []}), methods=["POST"]),
        Route("/abort_request", abort, methods=["POST"]),
    ]


def _llama_routes(engine: ScriptedEngine) -> list[BaseRoute]:
    options = engine.options
    names = {
        "running": "llamacpp:requests_processing",
        "waiting": "llamacpp:requests_deferred",
        "prefix_hit_tokens_total": "llamacpp:prompt_tokens_cached_total",
    }
    props = {
        "total_slots": options.max_running,
        "default_generation_settings": {"n_ctx": options.context_limit_tokens},
        "modalities": {"vision": "image" in options.modalities},
        "build_info": "scripted",
    }

    async def slots(_: Request) -> Response:
        return JSONResponse(_slots(engine))

    async def erase(request: Request) -> Response:
        slot = request.path_params["slot"]
        await engine.release_session(_slot_session(slot))
        return JSONResponse({"id_slot": slot, "n_erased": 0})

    async def template(request: Request) -> Response:
        return JSONResponse({"prompt": (await request.body()).decode()})

    async def tokenize(request: Request) -> Response:
        rendered = _object(str(_object(await request.body()).get("content")).encode())
        return JSONResponse({"tokens": [0] * (await engine.count_prompt_tokens(rendered) or 0)})

    return [
        Route("/props", _saying(props)),
        Route("/slots", slots),
        Route("/slots/{slot:int}", erase, methods=["POST"]),
        Route("/metrics", _metrics(engine, names)),
        Route("/apply-template", template, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
    ]


def _slots(engine: ScriptedEngine) -> list[dict[str, Any]]:
    """One entry a slot. A request without a slot of its own is shown on the first one that is free."""
    active = engine.active_sessions()
    count = engine.options.max_running
    busy = {slot for slot in range(count) if _slot_session(slot) in active}
    for slot in range(count):
        if len(busy) < min(len(active), count):
            busy.add(slot)
    return [
        {"id": slot, "n_ctx": engine.options.context_limit_tokens, "is_processing": slot in busy}
        for slot in range(count)
    ]


def _slot_session(slot: object) -> str:
    return f"slot-{slot}"


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}

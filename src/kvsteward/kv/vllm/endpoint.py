"""Endpoints on vLLM's own server (`VLLM_PLUGINS=kvsteward vllm serve ...`), for gateways and people:

    GET  /kvsteward/sessions                  what idle sessions have in the pool, the largest first
    POST /kvsteward/sessions/{id}/release     its blocks go first; with {"moved": true} its stored ones stay
    POST /kvsteward/sessions/{id}/note        {"stop", "tools", "ttl_s", "class"}: what it waits for

Both take the `cache_salt` of the session's requests, if they have one.

The connector is in another process. Words go to it as requests that are over before they run (vLLM's own way to tell
a connector of a rejected request), figures come back with vLLM's statistics; so vLLM must not run with
`--disable-log-stats`. Where vLLM asks for an API key, these endpoints do.

Knows nothing of the gateway. Invariant: no answer waits longer than WAIT_S for the engine.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvsteward.errors import ProtocolError
from kvsteward.kv.vllm import compat
from kvsteward.kv.vllm.hints import FIELD, VERSION, parse
from kvsteward.kv.vllm.snapshot import listed
from kvsteward.kv.vllm.stats import SessionMetrics

FRESH_S = 1.0
WAIT_S = 1.0
MAX_BODY_BYTES = 64 * 1024
_OWN = {"version", "note", "session", "scope", "final", "moved"}


class SessionEndpoints:
    """vLLM's `EndpointPlugin`."""

    name = "kvsteward"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def __init__(self) -> None:
        self._client: Any = None
        self._keys: list[str] = []
        self._metrics: SessionMetrics | None = None
        self._news = asyncio.Event()

    def attach_router(self, app: Any) -> None:
        app.add_route("/kvsteward/sessions", self._sessions, methods=["GET"])
        app.add_route("/kvsteward/sessions/{session:path}/release", self._release, methods=["POST"])
        app.add_route("/kvsteward/sessions/{session:path}/note", self._note, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self._client, self._keys = engine_client, compat.api_keys(args)
        found = compat.connector_metrics(engine_client)
        self._metrics = found if isinstance(found, SessionMetrics) else None
        if self._metrics is not None:
            self._metrics.on_news = self._news.set

    async def _sessions(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None or self._metrics is None:
            return refusal or _absent()
        oldest = min((came_s for came_s, _ in self._metrics.latest.values()), default=0.0)
        if time.monotonic() - oldest > FRESH_S:
            await self._tell({})
        return JSONResponse(listed(self._metrics.latest, time.monotonic()))

    async def _release(self, request: Request) -> Response:
        return await self._noted(request, {"final": True})

    async def _note(self, request: Request) -> Response:
        return await self._noted(request, {})

    async def _noted(self, request: Request, hint: dict[str, Any]) -> Response:
        refusal = self._refusal(request)
        if refusal is not None or self._metrics is None:
            return refusal or _absent()
        session = request.path_params["session"]
        try:
            said = await _body(request)
            salt = said.pop("cache_salt", "")
            if not isinstance(salt, str):
                raise ProtocolError("cache_salt must be a text")
            if not hint and _OWN & said.keys():
                raise ProtocolError(f"a note must not have {', '.join(sorted(_OWN & said.keys()))}")
            hint = {**said, **hint, "session": session, **({"scope": compat.scope_of(salt)} if salt else {})}
            parse({FIELD: {"version": VERSION, "note": True, **hint}})
        except ProtocolError as error:
            return _error(400, error.message)
        heard = await self._tell(hint)
        return JSONResponse({"session": session, "object": "session.noted", "heard": heard})

    async def _tell(self, hint: dict[str, Any]) -> bool:
        """Says it to the connector of each rank and waits for the figures that follow. False: they did not come in
        time, and the engine will hear it after its step."""
        assert self._metrics is not None
        latest = self._metrics.latest
        before = {rank: data["heard"] for rank, (_, data) in latest.items()}
        try:
            async with asyncio.timeout(WAIT_S):
                await compat.tell(self._client, {FIELD: {"version": VERSION, "note": True, **hint}})
                while not latest or any(data["heard"] <= before.get(rank, 0) for rank, (_, data) in latest.items()):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _refusal(self, request: Request) -> Response | None:
        if not self._keys:
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(key.encode(), wanted.encode()) for wanted in self._keys]
        return None if scheme.lower() == "bearer" and any(known) else _error(401, "Unauthorized")


async def _body(request: Request) -> dict[str, Any]:
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise ProtocolError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(raw or b"{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ProtocolError("the body must be a JSON object")
    return body


def _absent() -> Response:
    return _error(404, "this vLLM does not run kvsteward's connector, or runs with --disable-log-stats")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "kvsteward", "code": status}}, status)

"""The operator's side of the fleet: the engines and what is bound to them, drain and undrain, and moving a session.

Where there are API keys, an admin's is asked for. Invariant: a session is moved whole or not at all, and never while
one of its turns is on the way.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from kvsteward.errors import ConflictError, EngineUnavailableError, ForbiddenError, NotFoundError, ProtocolError
from kvsteward.gateway.auth import operates
from kvsteward.gateway.bodies import body_of, json
from kvsteward.gateway.desk import public_id, storage_id
from kvsteward.gateway.fleet import Station
from kvsteward.gateway.settings import Tenant
from kvsteward.sessions.base import Session

if TYPE_CHECKING:
    from kvsteward.gateway.app import Steward

MAX_WAIT_S = 300.0


async def engines(steward: Steward, _: Request, tenant: Tenant) -> Response:
    """`GET /v1/engines`."""
    _check(steward, tenant)
    return json({"object": "list", "data": [_engine(steward, station) for station in steward.fleet.stations]})


async def drain(steward: Steward, request: Request, tenant: Tenant) -> Response:
    """`POST /v1/engines/drain {"engine": URL}`: no new turns there; its sessions go on elsewhere, each at its next
    turn. Done when `turns` is 0."""
    return await _set_draining(steward, request, tenant, True)


async def undrain(steward: Steward, request: Request, tenant: Tenant) -> Response:
    return await _set_draining(steward, request, tenant, False)


async def move(steward: Steward, request: Request, tenant: Tenant) -> Response:
    """`POST /v1/sessions/{id}/move {"to": URL, "wait_s"?: SECONDS, "tenant"?: NAME}`: the next turn goes there. The KV
    that the session has in its old engine goes first; what a shared store has of it stays. Raises ConflictError while a
    turn is on the way for longer than `wait_s` (default 0), or when the engine is being drained."""
    _check(steward, tenant)
    body = await body_of(request)
    owner = body.get("tenant", tenant.name)
    wait_s = body.get("wait_s", 0)
    if not isinstance(owner, str):
        raise ProtocolError("'tenant' must be a string", param="tenant")
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
        raise ProtocolError(f"'wait_s' must be between 0 and {MAX_WAIT_S:.0f} seconds", param="wait_s")
    target = steward.fleet.find(_text(body, "to"))
    session_id = storage_id(owner, request.path_params["id"])
    session = await _session(steward, session_id, request)
    if not await steward.fleet.idle(session_id, wait_s):
        raise ConflictError(f"a turn of the session '{request.path_params['id']}' is running")
    _check_takes(target, session)
    before = steward.fleet.station_of(session_id, session.engine)
    # From here on no turn goes to the old one, whatever the row still says.
    steward.fleet.bind(session_id, target, session.engine)
    if before is not None and before is not target:
        steward.let_go(before, session)
    session = await steward.desk.bound(session_id, target.name)
    moved = {"id": public_id(session), "object": "session.moved", "moved": before is not target}
    return json({**moved, "from": before.name if before else None, "to": target.name})


async def _session(steward: Steward, session_id: str, request: Request) -> Session:
    session = await steward.desk.call(steward.desk.store.get, session_id)
    if session is None:
        raise NotFoundError(f"there is no session '{request.path_params['id']}'")
    return session


def _check_takes(target: Station, session: Session) -> None:
    if target.draining:
        raise ConflictError(f"the engine {target.name} is being drained", hint="'kvsteward engines undrain' ends that.")
    if not target.up:
        raise EngineUnavailableError(f"the engine {target.name} is down: {target.problem}")
    if session.model and not target.serves(session.model):
        raise ConflictError(
            f"the engine {target.name} does not serve {session.model}", hint="Move it to one that does."
        )


async def _set_draining(steward: Steward, request: Request, tenant: Tenant, on: bool) -> Response:
    _check(steward, tenant)
    station = steward.fleet.find(_text(await body_of(request), "engine"))
    steward.fleet.drain(station, on)
    return json(_engine(steward, station))


def _engine(steward: Steward, station: Station) -> dict[str, Any]:
    info, pool = station.info, station.gate.pool
    return {
        "engine": station.name,
        "object": "engine",
        "state": "draining" if station.draining else "up" if station.up else "down",
        "problem": station.problem,
        "dialect": info.dialect,
        "version": info.version,
        "models": list(info.models),
        "turns": station.turns,
        "running": pool.running,
        "waiting": pool.waiting,
        "sessions": steward.fleet.bound_to(station),
        "kv_capacity_tokens": info.kv_capacity_tokens,
        "resident_tokens": station.residency.total_tokens,
        "free_tokens": station.place("").free_tokens,
        "takes_hints": station.engine.takes_hints,
        "held_blocks": station.held.blocks if station.held else None,
        "load": asdict(station.load),
    }


def _check(steward: Steward, tenant: Tenant) -> None:
    if not operates(tenant, steward.settings):
        raise ForbiddenError("only an admin may see and steer the engines")


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise ProtocolError(f"'{name}' must name an engine", param=name)
    return value

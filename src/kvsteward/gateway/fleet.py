"""The engines behind one gateway: each with its queue, its ledger and its health; and which session is bound to which.

The decision is `policy.routing`; this is the part that remembers. The binding is kept in the session's row too, which
whoever routes a turn writes with it; here it is the newest word. Mutable, for one event loop.

Invariant: a session is moved only while none of its turns is on the way.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from kvsteward.engines.base import Engine, EngineInfo, EngineLoad, Held
from kvsteward.errors import ConfigError, EngineUnavailableError, NotFoundError, OverloadedError
from kvsteward.gateway.gate import Gate
from kvsteward.policy.admission import Limits
from kvsteward.policy.misses import Misses
from kvsteward.policy.residency import Residency
from kvsteward.policy.routing import Nowhere, Place, route

ROW_IS_LATE_S = 10.0
"""How long a turn may hold a row that it read before the session was bound anew."""
MAX_BOUND = 100_000
"""Sessions whose binding is kept here; of the others the stored row knows it."""
FAILURES = 3
"""Readings that must fail in a row before an engine counts as down; a refused connection counts at once."""


class Station:
    """One engine and what the gateway keeps of it."""

    def __init__(self, engine: Engine, limits: Limits, now: Callable[[], float]) -> None:
        self.engine = engine
        self.name = engine.name
        self.gate = Gate(None, None, limits, now)
        self.residency = Residency()
        self.misses = Misses()
        self.load = EngineLoad()
        self.held: Held | None = None
        """What sessions have in it by its own account, where it gives one."""
        self.problem: str | None = None
        """Why it is down; None while it is up."""
        self.draining = False
        self.turns = 0
        self._failures = 0

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def up(self) -> bool:
        return self.problem is None

    def learn(self, info: EngineInfo) -> None:
        """What the engine is, at the start and again after it came back: then with an empty pool."""
        if not self.up:
            self.residency = Residency()
        self.gate.resize(info.kv_capacity_tokens, info.max_running)
        self.residency.capacity_tokens = info.kv_capacity_tokens
        self.problem, self._failures = None, 0

    def read(self, load: EngineLoad) -> None:
        self.load, self._failures = load, 0

    def failed(self, problem: str, *, surely: bool) -> None:
        """A question went unanswered. `surely`: nobody listens there."""
        self.load, self.held = EngineLoad(), None
        self._failures += 1
        if surely or self._failures >= FAILURES:
            self.problem = problem

    def serves(self, model: str) -> bool:
        return not model or not self.info.models or model in self.info.models

    def place(self, model: str) -> Place:
        held = self.residency.total_tokens + self.gate.pool.reserved_tokens
        return Place(
            self.name, self.info.kv_capacity_tokens, held, self.turns, self.up, self.draining, self.serves(model)
        )


@dataclass(frozen=True, slots=True)
class _Binding:
    """To an engine, by this gateway. `stored` is what the session's row said before, "" where that is not known."""

    name: str
    stored: str | None
    since_s: float


class Fleet:
    """All engines of a gateway, and the sessions bound to them. There is at least one, and no two have one name."""

    def __init__(self, engines: Sequence[Engine], limits: Limits, now: Callable[[], float]) -> None:
        self.stations = tuple(Station(engine, limits, now) for engine in engines)
        self._named = {station.name: station for station in self.stations}
        if not self.stations or len(self._named) < len(self.stations):
            raise ConfigError("give one or more engines, each once", param="engine")
        self._now = now
        self._bound: OrderedDict[str, _Binding] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._open: dict[str, int] = {}
        self._idle: dict[str, list[asyncio.Event]] = {}

    @property
    def first(self) -> Station:
        return self.stations[0]

    @property
    def several(self) -> bool:
        return len(self.stations) > 1

    def find(self, name: str) -> Station:
        """The station of a name or URL. Raises NotFoundError."""
        station = self._named.get(name) or self._named.get(name.rstrip("/").removesuffix("/v1"))
        if station is None:
            raise NotFoundError(f"no engine '{name}'", hint=f"The engines are {', '.join(self._named)}.", param="to")
        return station

    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(model for station in self.stations for model in station.info.models))

    def binding(self, session_id: str, stored: str | None) -> str | None:
        """Where a session is bound to; `stored` is what its row says. The word of this gateway is the newest while the
        row may not have it yet; what another gateway has written into the row since then is newer."""
        bound = self._bound.get(session_id)
        if bound is None or stored is None:
            return stored if bound is None else bound.name
        late = self._now() - bound.since_s < ROW_IS_LATE_S and bound.stored in {"", stored}
        return bound.name if late else stored

    def station_of(self, session_id: str, stored: str | None) -> Station | None:
        """The engine that holds a session's KV, if it is bound to one that is still here."""
        name = self.binding(session_id, stored)
        return self._named.get(name or "") or (None if self.several else self.first)

    def route(
        self, session_id: str | None, stored: str | None, model: str, avoid: Collection[str] = ()
    ) -> tuple[Station, str]:
        """Binds a session to the engine of its next turn and says why. Raises OverloadedError where none can
        take it."""
        if not self.several and not self.first.draining:
            chosen, reason = self.first, "the only engine"
        else:
            bound = self.binding(session_id, stored) if session_id else None
            choice = route(bound, [station.place(model) for station in self.stations], avoid)
            if isinstance(choice, Nowhere):
                raise OverloadedError(choice.reason, retry_after_s=5.0, hint="'kvsteward engines list' shows them.")
            chosen, reason = self._named[choice.name], choice.reason
        if session_id is not None:
            self.bind(session_id, chosen, stored)
        return chosen, reason

    def bind(self, session_id: str, station: Station, stored: str | None = "") -> None:
        """`stored` is what the session's row says now, "" where that is not known."""
        bound = self._bound.get(session_id)
        if bound is None or bound.name != station.name:
            bound = _Binding(station.name, stored, self._now())
        self.forget(session_id)
        self._bound[session_id] = bound
        self._counts[station.name] += 1
        if len(self._bound) > MAX_BOUND:
            self.forget(next(iter(self._bound)))

    def bound_to(self, station: Station) -> int:
        """Sessions that are bound to an engine, of those that had a turn since the start."""
        return self._counts[station.name]

    def forget(self, session_id: str) -> None:
        """The session is over, or only its row knows where it is bound to."""
        bound = self._bound.pop(session_id, None)
        if bound is not None:
            self._counts[bound.name] -= 1

    def another(self, avoid: Collection[str], model: str) -> bool:
        """Whether a turn that failed on `avoid` may be tried elsewhere."""
        return any(s.name not in avoid and s.up and not s.draining and s.serves(model) for s in self.stations)

    # -- turns on the way ---------------------------------------------------------------------------------------

    @contextmanager
    def visit(self, station: Station, session_id: str | None) -> Iterator[None]:
        """A turn is on the way to an engine, from its routing to its end."""
        station.turns += 1
        if session_id is not None:
            self._open[session_id] = self._open.get(session_id, 0) + 1
        try:
            yield
        finally:
            station.turns -= 1
            if session_id is not None:
                self._left(session_id)

    def _left(self, session_id: str) -> None:
        left = self._open.pop(session_id) - 1
        if left:
            self._open[session_id] = left
            return
        for event in self._idle.pop(session_id, []):
            event.set()

    def busy(self, session_id: str) -> int:
        """Turns of a session that are on the way."""
        return self._open.get(session_id, 0)

    async def idle(self, session_id: str, within_s: float) -> bool:
        """Waits until no turn of a session is on the way. Whether it came to that; it holds until the next await."""
        if self.busy(session_id) and within_s > 0:
            event = asyncio.Event()
            waiting = self._idle.setdefault(session_id, [])
            waiting.append(event)
            try:
                async with asyncio.timeout(within_s):
                    await event.wait()
            except TimeoutError:
                waiting.remove(event)
        return not self.busy(session_id)

    # -- health and draining ------------------------------------------------------------------------------------

    def lost(self, station: Station, problem: str) -> None:
        """Nobody listens at an engine's address: those who wait for it go elsewhere."""
        station.failed(problem, surely=True)
        self.send_away(station)

    def drain(self, station: Station, on: bool) -> None:
        """No new turns for an engine, or turns again. Running ones end there; those who wait go elsewhere."""
        station.draining = on
        if on:
            station.gate.turn_away(EngineUnavailableError(f"the engine {station.name} is being drained"))

    def send_away(self, station: Station) -> None:
        if self.another({station.name}, ""):
            station.gate.turn_away(EngineUnavailableError(f"the engine {station.name} does not answer"))

    # -- the account of all -------------------------------------------------------------------------------------

    def resident_tokens(self) -> int:
        return sum(station.residency.total_tokens for station in self.stations)

    def capacity_tokens(self) -> int | None:
        """All pools together; None if no engine says."""
        known = [s.info.kv_capacity_tokens for s in self.stations if s.info.kv_capacity_tokens is not None]
        return sum(known) if known else None

    def running(self) -> int:
        return sum(station.gate.pool.running for station in self.stations)

    def waiting(self) -> int:
        return sum(station.gate.pool.waiting for station in self.stations)

    def sessions(self) -> dict[str, int]:
        """Tokens resident by session."""
        return {id_: tokens for station in self.stations for id_, tokens in station.residency.sessions().items()}

    def load(self) -> EngineLoad:
        """The sum of all readings; of ratios the fullest."""
        return summed([station.load for station in self.stations])


def summed(loads: Sequence[EngineLoad]) -> EngineLoad:
    if len(loads) == 1:
        return loads[0]
    merged: dict[str, Any] = {}
    for name in (field.name for field in fields(EngineLoad)):
        known = [value for load in loads if (value := getattr(load, name)) is not None]
        merged[name] = (max(known) if name == "kv_usage_ratio" else sum(known)) if known else None
    return EngineLoad(**merged)

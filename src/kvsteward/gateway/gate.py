"""The gate before the engine: turns wait here until the KV budget has room for them.

The decisions are `policy.admission` and `policy.queueing`; this is the part that remembers and wakes. Mutable, for one
event loop. Invariant: what was reserved is released, whatever happens to the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kvsteward.errors import ContextOverflowError, EngineError, OverloadedError
from kvsteward.policy.admission import Admit, Demand, Limits, Pool, Refuse, decide
from kvsteward.policy.queueing import order


@dataclass(eq=False, slots=True)
class _Waiter:
    demand: Demand
    since: float
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def returning(self) -> bool:
        return self.demand.returning


class Gate:
    """Admits turns to one engine."""

    def __init__(
        self, capacity_tokens: int | None, max_running: int | None, limits: Limits, now: Callable[[], float]
    ) -> None:
        self._pool = Pool(capacity_tokens, max_running=max_running)
        self._limits = limits
        self._now = now
        self._queue: list[_Waiter] = []
        self._spare: set[asyncio.Task[Any]] = set()

    @property
    def pool(self) -> Pool:
        return replace(self._pool, waiting=len(self._queue))

    def resize(self, capacity_tokens: int | None, max_running: int | None) -> None:
        """The engine was restarted with another pool."""
        self._pool = replace(self._pool, capacity_tokens=capacity_tokens, max_running=max_running)
        self._wake()

    def turn_away(self, error: EngineError) -> None:
        """All that wait get this error: their engine takes no more turns."""
        for waiter in self._queue:
            if not waiter.turn.done():
                waiter.turn.set_exception(error)

    @asynccontextmanager
    async def admitted(self, demand: Demand) -> AsyncIterator[float]:
        """Waits for room, holds it, gives it back. Yields the seconds waited. Raises ContextOverflowError for a turn
        that no pool of this size can run, OverloadedError when the queue is full or the wait too long, what `turn_away`
        was given when the engine takes no more."""
        waited_s = await self._enter(demand)
        try:
            yield waited_s
        finally:
            self._release(demand)

    @asynccontextmanager
    async def spare(self, demand: Demand) -> AsyncIterator[bool]:
        """Room for work of the lowest rank, held while the block lasts; False at once where a turn waits or there is
        none. The task that asks is cancelled when a turn would have to wait."""
        task = asyncio.current_task()
        if task is None or self._queue or not isinstance(decide(demand, self.pool, self._limits), Admit):
            yield False
            return
        self._reserve(demand)
        self._spare.add(task)
        try:
            yield True
        finally:
            self._spare.discard(task)
            self._release(demand)

    async def _enter(self, demand: Demand) -> float:
        start = self._now()
        behind_others = bool(self._queue)
        decision = decide(demand, self.pool, self._limits)
        if isinstance(decision, Admit) and not behind_others:
            self._reserve(demand)
            return 0.0
        if isinstance(decision, Refuse):
            raise _refused(decision)
        waiter = _Waiter(demand, start)
        self._queue.append(waiter)
        for task in self._spare:
            task.cancel()
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                await waiter.turn
        except TimeoutError:
            waited = replace(demand, waited_s=self._limits.max_wait_s)
            decision = decide(waited, self.pool, self._limits)
            raise _refused(
                decision if isinstance(decision, Refuse) else Refuse("waited too long", False, 5.0)
            ) from None
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._release(demand)  # admitted in the same moment in which it was given up
            raise
        finally:
            if waiter in self._queue:
                self._queue.remove(waiter)
                self._wake()
        return self._now() - start

    def _reserve(self, demand: Demand) -> None:
        self._pool = replace(
            self._pool,
            running=self._pool.running + 1,
            reserved_tokens=self._pool.reserved_tokens + demand.reserved_tokens,
        )

    def _release(self, demand: Demand) -> None:
        self._pool = replace(
            self._pool,
            running=self._pool.running - 1,
            reserved_tokens=self._pool.reserved_tokens - demand.reserved_tokens,
        )
        self._wake()

    def _wake(self) -> None:
        for waiter in order(self._queue, self._now()):
            if not isinstance(decide(waiter.demand, replace(self._pool, waiting=0), self._limits), Admit):
                return  # strictly in order: a large turn is not overtaken for ever by small ones
            self._queue.remove(waiter)
            if not waiter.turn.done():
                self._reserve(waiter.demand)
                waiter.turn.set_result(None)


def _refused(decision: Refuse) -> ContextOverflowError | OverloadedError:
    if decision.never:
        return ContextOverflowError(decision.reason)
    return OverloadedError(decision.reason, retry_after_s=decision.retry_after_s)

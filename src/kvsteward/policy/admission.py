"""Admission by KV budget: may this turn start now?

A turn needs room for its prompt and its answer while it runs. What idle sessions left in the pool can be evicted, so
only running turns count against the capacity. `decide` asks; reserving and releasing are the caller's separate steps.

Pure: the clock comes in as `waited_s`. Invariant: a turn that fits an empty pool is never refused for its size.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """What a turn needs while it runs. `returning`: its session has KV in the pool that would be lost by waiting."""

    prompt_tokens: int
    output_tokens: int
    returning: bool = False
    waited_s: float = 0.0

    @property
    def reserved_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Pool:
    """What is promised now. None: the engine does not say, so nothing is limited by it."""

    capacity_tokens: int | None
    reserved_tokens: int = 0
    running: int = 0
    max_running: int | None = None
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the queue."""

    max_waiting: int = 256
    max_wait_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Admit:
    reason: str
    reserved_tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    reason: str
    short_tokens: int
    """How many tokens must be released first; 0 if it is a slot that is missing."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """`never`: it does not fit even an empty pool; else it may be tried again after `retry_after_s`."""

    reason: str
    never: bool
    retry_after_s: float = 0.0


Decision = Admit | Wait | Refuse


def decide(demand: Demand, pool: Pool, limits: Limits) -> Decision:
    """Admit, Wait or Refuse, with the numbers that led to it."""
    need = demand.reserved_tokens
    capacity = pool.capacity_tokens
    if capacity is not None and need > capacity:
        return Refuse(f"needs {need} tokens of KV cache, the engine has {capacity}", never=True)
    if pool.max_running is not None and pool.running >= pool.max_running:
        return _queue(f"{pool.running} of {pool.max_running} slots are running", 0, demand, pool, limits)
    if capacity is not None and pool.reserved_tokens + need > capacity:
        short = pool.reserved_tokens + need - capacity
        return _queue(
            f"needs {need} tokens, {capacity - pool.reserved_tokens} of {capacity} are free",
            short,
            demand,
            pool,
            limits,
        )
    return Admit("fits", need)


def _queue(reason: str, short_tokens: int, demand: Demand, pool: Pool, limits: Limits) -> Decision:
    if demand.waited_s >= limits.max_wait_s:
        return Refuse(f"waited {demand.waited_s:.0f} s: {reason}", never=False, retry_after_s=5.0)
    if pool.waiting >= limits.max_waiting:
        return Refuse(f"{pool.waiting} turns are waiting already: {reason}", never=False, retry_after_s=10.0)
    return Wait(reason, short_tokens)

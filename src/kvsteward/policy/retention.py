"""Which idle KV to give up first when the pool needs room: one function, `order`, for simulator, gateway and plug-ins.

State is a run of tokens that one turn left behind. It is given up in this order:

1. what is over (the caller said `final`), superseded (its session went on from an earlier point) or past the
   caller's TTL;
2. the rest, the least worth keeping first: expected returns per second (`returns`) x seconds that a lost token costs
   x the weight of its class; equal worth falls back to the least recently used;
3. what the caller asked to keep, while its TTL runs, again by worth: a caller that asks it for all of its sessions
   changes nothing among them;
4. what a waiting turn is about to use.

Soft: everything idle can be given up, so running work never starves, and nothing happens while there is room.

Pure: the clock comes in as `now_s`. Invariant: every state is ordered exactly once, and whatever is asked for is
given as long as there is any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

WEIGHTS = {"interactive": 2.0, "default": 1.0, "batch": 0.5}
"""How much a class's lost second counts."""
MAX_TTL_S = 24 * 3600.0


class Tier(IntEnum):
    """The lower one goes first."""

    OVER = 0
    IDLE = 1
    ASKED = 2
    AWAITED = 3


@dataclass(frozen=True, slots=True)
class Hint:
    """What the caller knows; it wins over what was learned. `ttl_s` 0 means "do not keep", None "not said"."""

    ttl_s: float | None = None
    final: bool = False
    priority: str = "default"


NO_HINT = Hint()


@dataclass(frozen=True, slots=True)
class State:
    """Idle KV of one turn. `tokens` can be given up; `loss_s_per_token` is what one of them costs to have again: the
    cheaper of computing it and loading it from a lower tier that holds a copy."""

    name: str
    session: str
    tokens: int
    since_s: float
    superseded: bool = False
    awaited: bool = False
    """A turn of its session is queued."""
    hint: Hint = NO_HINT
    loss_s_per_token: float = 1.0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """`worth` is seconds of work saved per second and token kept; `tokens` of the state's end go."""

    name: str
    tokens: int
    tier: Tier
    worth: float
    reason: str


class Rates(Protocol):
    def rate(self, session: str, now_s: float) -> float: ...


class _Even:
    def rate(self, session: str, now_s: float) -> float:
        return 1.0


EVEN: Rates = _Even()
"""All sessions alike: `order` is LRU but for what callers said."""


def loss_s_per_token(recompute_s: float, load_s: float | None = None) -> float:
    """Seconds per token to have lost KV again. `load_s` None: no lower tier has it."""
    return recompute_s if load_s is None else min(recompute_s, load_s)


def tier(state: State, now_s: float) -> tuple[Tier, str]:
    hint = state.hint
    if hint.final:
        return Tier.OVER, "final"
    if state.superseded:
        return Tier.OVER, "superseded"
    if state.awaited:
        return Tier.AWAITED, "its turn waits"
    if hint.ttl_s is None:
        return Tier.IDLE, "learned"
    if now_s - state.since_s < min(hint.ttl_s, MAX_TTL_S):
        return Tier.ASKED, "within ttl"
    return Tier.OVER, "ttl passed"


def worth(state: State, rates: Rates, now_s: float) -> float:
    rate = rates.rate(state.session, now_s)
    return rate * state.loss_s_per_token * WEIGHTS.get(state.hint.priority, 1.0)


def order(states: Iterable[State], rates: Rates, now_s: float) -> list[GiveUp]:
    """All of the states, the first to be given up first."""
    ranked: list[tuple[Tier, float, float, GiveUp]] = []
    for state in states:
        at, reason = tier(state, now_s)
        value = worth(state, rates, now_s) if at is not Tier.OVER else 0.0
        ranked.append((at, value, state.since_s, GiveUp(state.name, state.tokens, at, value, reason)))
    ranked.sort(key=lambda r: r[:3])
    return [r[3] for r in ranked]


def take(ordered: Sequence[GiveUp], needed_tokens: float = math.inf) -> list[GiveUp]:
    """The head of the order that frees `needed_tokens`; the last one is cut to what is needed."""
    taken: list[GiveUp] = []
    for give in ordered:
        if needed_tokens <= 0:
            break
        tokens = int(min(give.tokens, needed_tokens))
        taken.append(GiveUp(give.name, tokens, give.tier, give.worth, give.reason))
        needed_tokens -= tokens
    return taken

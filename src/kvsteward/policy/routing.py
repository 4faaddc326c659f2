"""Which engine a turn goes to: its session's own while that can take it, else the one with the most free KV budget.

A session's KV lies in one engine, so a turn elsewhere is a prefill of the whole view. A session is therefore bound, and
changes its engine only when its own is gone, down, drained, or has not the model; where to is decided as for a new one.

Pure. Invariant: a turn never goes to an engine that drains, nor to one that this turn has found dead already.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

EVEN_RATIO = 1 / 64
"""Free budgets that differ by less than this share of the larger pool count as equal: then the one with fewer turns is
taken, so that sessions which start in the same moment do not all go to one engine."""


@dataclass(frozen=True, slots=True)
class Place:
    """One engine as routing sees it. `capacity_tokens` None: the engine does not say."""

    name: str
    capacity_tokens: int | None = None
    held_tokens: int = 0
    """What sessions have in its pool, and what running turns reserved."""
    turns: int = 0
    """Turns that were routed to it and are not over."""
    up: bool = True
    draining: bool = False
    serves: bool = True
    """It has the model that is asked for."""

    @property
    def free_tokens(self) -> int | None:
        return None if self.capacity_tokens is None else max(0, self.capacity_tokens - self.held_tokens)


@dataclass(frozen=True, slots=True)
class Stay:
    """The turn goes where its session's KV is."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Go:
    """The session is bound anew, with the figures that decided."""

    name: str
    reason: str
    free_tokens: int | None
    turns: int


@dataclass(frozen=True, slots=True)
class Nowhere:
    reason: str


Choice = Stay | Go | Nowhere


def route(bound: str | None, places: Sequence[Place], avoid: Collection[str] = ()) -> Choice:
    """The engine of a turn whose session is bound to `bound` (None: a new one). `avoid`: tried in vain for this turn.

    An engine that is down is still asked where there is no other: it may have come back, and its error says most."""
    own = next((place for place in places if place.name == bound), None)
    problem = _problem(own, bound, avoid)
    if own is not None and problem is None:
        return Stay(own.name, "its session is here")
    usable = [place for place in places if place.serves and not place.draining and place.name not in avoid]
    up = [place for place in usable if place.up]
    if not up:
        return _last_resort(own, usable, places)
    best = _freest(up)
    figures = "free tokens not known" if best.free_tokens is None else f"{best.free_tokens} tokens free"
    return Go(best.name, f"{problem or 'a new session'}: {figures}, {best.turns} turns", best.free_tokens, best.turns)


def _problem(own: Place | None, bound: str | None, avoid: Collection[str]) -> str | None:
    if bound is None:
        return None
    if own is None:
        return f"{bound} is no engine of this gateway any more"
    if own.draining:
        return f"{bound} is being drained"
    if not own.serves:
        return f"{bound} has not the model"
    return f"{bound} does not answer" if not own.up or bound in avoid else None


def _last_resort(own: Place | None, usable: Sequence[Place], places: Sequence[Place]) -> Choice:
    if own is not None and own in usable:
        return Stay(own.name, "no engine is up")
    if usable:
        return Go(usable[0].name, "no engine is up", usable[0].free_tokens, usable[0].turns)
    down = sum(not place.up for place in places)
    drained = sum(place.draining for place in places)
    lacking = sum(not place.serves for place in places)
    return Nowhere(
        f"none of {len(places)} engines can take the turn: {drained} drained, {down} down, {lacking} without the model"
    )


def _freest(places: Sequence[Place]) -> Place:
    """The most free budget; among equals the fewest turns. Without the figures of all, turns alone count."""
    free = [place.free_tokens for place in places]
    known = [tokens for tokens in free if tokens is not None]
    if len(known) < len(places):
        return min(places, key=lambda place: (place.turns, place.held_tokens))
    near = max(known) - EVEN_RATIO * max(place.capacity_tokens or 0 for place in places)
    even = [place for place, tokens in zip(places, known, strict=True) if tokens >= near]
    return min(even, key=lambda place: (place.turns, -(place.free_tokens or 0)))

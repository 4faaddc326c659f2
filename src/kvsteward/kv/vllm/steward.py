"""Keeps a pool's free list in the order of `policy.retention`: who left which blocks, when, and what is known of them.

A turn is told by `began` (queued), and `ended` with the ids of its blocks just before they become free. Turns without a
session are owners of their own; blocks that several sessions used are an owner of their own too, whose returns are
learned like a session's. The order is asked for anew in each step in which blocks are taken, as long as that takes
at most 1 / `RANK_PAUSE` of the time; an order is at most `reorder_s` old. While
`policy.guard` finds that LRU does better, what was learned is not used; the caller's word still is.

No vLLM import, no clock (`now` comes in), no I/O. Invariant: sessions, hints and queued turns held are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvsteward.kv.vllm.free_list import FreeList, Run
from kvsteward.kv.vllm.hints import Told
from kvsteward.policy.guard import Guard
from kvsteward.policy.retention import EVEN, NO_HINT, Hint, State, order
from kvsteward.policy.returns import UNKNOWN_SIZE, Returns, Size

SHARED = "shared:"
ALONE = "request:"
LOOSE = "freed:"
MAX_OWNERS = 8192
MAX_RANKED = 2048
"""Runs that one ranking looks at, the oldest ones; the others go after them."""

RANK_PAUSE = 20.0
"""After a ranking the next one waits for this many times as long as it took."""
RANK_S_PER_RUN = 6e-6
"""What a ranking takes. Not measured as it goes: a process that has to wait for its core would rank less and less."""


@dataclass(slots=True)
class _Owner:
    """`turns` ended so far; `since_s` is the end of the newest, or of the last note."""

    hint: Hint = NO_HINT
    since_s: float = 0.0
    queued: set[str] = field(default_factory=set)
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Blocks and tokens that idle sessions hold; the rest of the free ones is blank or belongs to no session."""

    free_blocks: int
    sessions: Mapping[str, int]
    block_tokens: int
    turns: int
    refused_hints: int
    idle_s: Mapping[str, float] = field(default_factory=dict)
    """Since each session's last turn, or the last word of it."""
    released: int = 0
    """Hints that said `final`."""
    kept: int = 0
    """Hints that asked to keep."""
    lru: bool = False
    """What was learned is not used now: LRU was better."""

    def tokens(self, session: str) -> int:
        return self.sessions.get(session, 0) * self.block_tokens


class Steward:
    def __init__(
        self,
        blocks: Sequence[object],
        clock: Callable[[], float],
        *,
        block_tokens: int,
        reorder_s: float = 0.25,
        max_owners: int = MAX_OWNERS,
        returns: Returns | None = None,
    ) -> None:
        self.free = FreeList(blocks, on_use=self._used)  # type: ignore[arg-type]  # vLLM's blocks, seen as Block
        self.free.ranked_by(self._rank)
        self.refused_hints = 0
        self.released = 0
        self.kept = 0
        self._clock, self._block_tokens, self._reorder_s = clock, block_tokens, reorder_s
        self.returns = returns or Returns(max_sessions=max_owners)
        self._guard = Guard(len(blocks))
        self._owners: OrderedDict[str, _Owner] = OrderedDict()
        self._max_owners = max_owners
        self._born: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._ordered_at = -float("inf")
        self._rank_s = 0.0
        self._turns = 0
        self._over: list[str] = []

    def began(self, request: str, session: str | None) -> None:
        """A turn is queued: what its session left is awaited."""
        name = session or ALONE + request
        owner = self._owner(name)
        owner.queued.add(request)
        if owner.hint.final:  # it was said to be over, and goes on
            owner.hint = NO_HINT
            self.free.release(name, over=False)
            self._over = [other for other in self._over if other != name]
        self.returns.started(name, self._clock())

    def follows(self, number: int) -> bool:
        """Does the guard follow the block of that number (of its content)?"""
        return number % self._guard.every == 0

    def matched(self, followed: Sequence[Hashable], hits: int) -> None:
        """A turn has its blocks: those of them that the guard follows, head first, and how many were in the pool."""
        self._guard.turn(followed, hits)

    def ended(
        self,
        request: str,
        session: str | None,
        told: Told,
        stop: str,
        block_ids: Iterable[int],
        size: Size = UNKNOWN_SIZE,
    ) -> None:
        """The turn is over; its blocks are about to be freed."""
        name, now = session or ALONE + request, self._clock()
        owner = self._owner(name)
        owner.queued.discard(request)
        owner.hint, owner.since_s = told.hint, now
        owner.turns += 1
        self._turns += 1
        self.returns.paused(name, now, told.stop or (stop if session else "alone"), told.tools, size)
        self.free.own(block_ids, name, lambda owner_name: SHARED + owner_name)
        self._count(told)
        if told.hint.final:
            self._over.append(name)  # its blocks become free only after this call

    def note(self, session: str, told: Told) -> None:
        """News of a paused session: its hint, and what it waits for. `final` releases what it left, unless a turn of it
        is queued: then the news is old."""
        owner = self._owner(session)
        owner.hint, owner.since_s = told.hint, self._clock()
        if (told.stop or told.tools) and not owner.queued:
            self.returns.paused(session, self._clock(), told.stop or "tool_calls", told.tools)
        self._count(told)
        if told.hint.final and not owner.queued:
            self.free.release(session)
        self.free.outdate()

    def step(self) -> None:
        """Once per engine step: an order that is old is asked for anew when blocks are next taken from it."""
        for name in self._over:
            self.free.release(name)
        self._over.clear()
        now = self._clock()
        if now - self._ordered_at >= min(self._reorder_s, RANK_PAUSE * self._rank_s):
            self._ordered_at = now
            self.free.outdate()

    def figures(self) -> Figures:
        """Without what was released."""
        held: dict[str, int] = {}
        for run in self.free.runs.values():
            if run.owner and not run.over and not run.owner.startswith((SHARED, ALONE, LOOSE)):
                held[run.owner] = held.get(run.owner, 0) + len(run.blocks)
        now = self._clock()
        return Figures(
            self.free.num_free_blocks,
            held,
            self._block_tokens,
            self._turns,
            self.refused_hints,
            {name: now - owner.since_s for name in held if (owner := self._owners.get(name)) is not None},
            self.released,
            self.kept,
            self._guard.lru,
        )

    def clear(self) -> None:
        """The cache was reset."""
        self.free.clear()
        self._guard.clear()

    def _count(self, told: Told) -> None:
        self.released += told.hint.final
        self.kept += not told.hint.final and bool(told.hint.ttl_s)

    def _owner(self, name: str) -> _Owner:
        owner = self._owners.pop(name, None) or _Owner()
        self._owners[name] = owner
        while len(self._owners) > self._max_owners:
            self._owners.popitem(last=False)
        return owner

    def _used(self, run: Run) -> None:
        if run.owner.startswith((SHARED, ALONE, LOOSE)):
            self.returns.started(run.owner, self._clock())

    def _rank(self, runs: Mapping[int, Run]) -> list[int]:
        now = self._clock()
        states = [self._state(run, now) for run in islice(runs.values(), MAX_RANKED)]
        for number in [n for n in self._born if n not in runs]:
            del self._born[number]
        rates = EVEN if self._guard.lru else self.returns
        self._rank_s = RANK_S_PER_RUN * len(states)
        return [int(give.name) for give in order(states, rates, now)]

    def _state(self, run: Run, now: float) -> State:
        name = run.owner or f"{LOOSE}{run.number}"
        owner = self._owners.get(name)
        if run.number not in self._born:
            self._born[run.number] = (now, owner.turns if owner else 0)
            if owner is None:
                self.returns.paused(name, now, "shared" if name.startswith(SHARED) else "alone")
        since, turns = self._born[run.number]
        if owner is None:
            return State(str(run.number), name, len(run.blocks), since)
        return State(
            str(run.number),
            name,
            len(run.blocks),
            min(since, owner.since_s) if owner.since_s else since,
            superseded=not self._guard.lru and self._superseded(run, owner, turns),
            awaited=bool(owner.queued),
            hint=owner.hint,
        )

    def _superseded(self, run: Run, owner: _Owner, turns: int) -> bool:
        """A later turn ended that went on from an earlier point of it, or two that used nothing of it."""
        later = owner.turns - turns
        return later >= 1 and (run.used or later >= 2)

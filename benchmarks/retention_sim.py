"""A block pool with prefix caching, as vLLM's, under recorded sessions; which idle blocks go first is a policy.

Sessions are trees of requests: each shares a prefix with an earlier one of its session. Blocks of a request that
nobody used later form one run of its path, and every policy here takes a run from its end (vLLM frees the tail of a
prefix first), so runs stand for blocks exactly; `tests/policy/test_retention_sim.py` compares them with a pool that
moves single blocks.

Two models. `held=False`: a request's blocks are idle as soon as they are in (as in other published replays), but
policies do not know how it will end before it has. `held=True`: its blocks cannot be taken while it runs (vLLM). In
both, answers' own tokens are not reused (the traces have no ids for them) and prefill takes no time.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import random
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvsteward.policy.guard import Guard
from kvsteward.policy.retention import EVEN, NO_HINT, Hint, State, order
from kvsteward.policy.returns import Returns, Size

BLOCK_TOKENS = 64


class Request(NamedTuple):
    """`shared` blocks are those of request `parent` of the same session (-1: none)."""

    t: float
    session: str
    number: int
    parent: int
    shared: int
    blocks: int
    ends: float
    stop: str
    last: bool
    output: int = 0


@dataclass(eq=False, slots=True)
class Run:
    """Blocks `start` to `end` of a request's path: those that no later request used."""

    request: Request
    start: int
    end: int
    superseded: bool = False


class Policy(Protocol):
    def began(self, run: Run, now: float, hits: int) -> None:
        """The newest run's request was asked for; its first `hits` blocks were there."""

    def victims(self, runs: Sequence[Run], now: float) -> Iterator[tuple[Run, int]]:
        """Runs in the order in which they go, and how many blocks of each at most before the next is asked."""
        ...


def trace(path: Path, seed: int, alive: float, only: int | None = None, *, skipped: int = 0) -> list[Request]:
    """Sessions in random order with Poisson starts, `alive` of them at once on average, merged by time. `only` the
    first of that order, or all but those `skipped`."""
    with gzip.open(path, "rt") as lines:
        sessions = [json.loads(line) for line in lines]
    rng = random.Random(seed)
    rng.shuffle(sessions)
    sessions = sessions[skipped:only]
    flat = [_flat(s["requests"], s["id"], 0.0) for s in sessions]
    mean = sum(max(r.ends for r in rs) - min(r.t for r in rs) for rs in flat) / len(flat)
    merged, start = [], 0.0
    for requests in flat:
        start += rng.expovariate(alive / mean)
        merged += [r._replace(t=r.t + start, ends=r.ends + start) for r in requests]
    return sorted(merged)


def _flat(rows: list[Any], session: str, start: float) -> list[Request]:
    found: list[Request] = []
    number, agents = 0, 0
    for row in rows:
        if isinstance(row, dict):
            agents += 1
            found += _flat(row["sub"], f"{session}/{agents}", start + row["t"])
            continue
        t, _, _, output, api, _, back, shared, blocks, _, stop, _ = row
        parent = number - back if back else -1
        at = start + t
        found.append(
            Request(
                at, session, number, parent, shared if back else 0, blocks, at + (api or 0), stop, False, output or 0
            )
        )
        number += 1
    if found:
        mine = max(i for i, r in enumerate(found) if r.session == session)
        found[mine] = found[mine]._replace(last=True)
    return found


@dataclass(slots=True)
class _Session:
    requests: list[Request] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def common(self, a: int, b: int) -> int:
        """Blocks that two requests' paths share."""
        least = math.inf
        while a != b:
            a, b = max(a, b), min(a, b)
            least = min(least, self.requests[a].shared)
            a = self.requests[a].parent
            if a < 0:
                return 0
        return int(min(least, self.requests[a].blocks))


@dataclass(slots=True)
class Outcome:
    """`over` counts requests for which running ones alone had filled the pool."""

    reused: int = 0
    asked: int = 0
    over: int = 0
    first_half: tuple[int, int] = (0, 0)
    """(reused, asked) of the first half of the requests."""

    @property
    def share(self) -> float:
        return self.reused / self.asked

    @property
    def halves(self) -> tuple[float, float]:
        """Shares of the first and of the second half of the requests."""
        reused, asked = self.first_half
        return reused / asked, (self.reused - reused) / (self.asked - asked)


def replay(requests: Sequence[Request], pool_blocks: int, policy: Policy, *, held: bool = False) -> Outcome:
    sessions: dict[str, _Session] = {}
    runs: dict[Run, None] = {}
    outcome = Outcome()
    used = 0
    for number, request in enumerate(requests):
        if number == len(requests) // 2:
            outcome.first_half = (outcome.reused, outcome.asked)
        session = sessions.setdefault(request.session, _Session())
        session.requests.append(request)
        hits, taken = _enter(session, request, runs)
        outcome.reused += hits
        outcome.asked += request.blocks
        run = Run(request, 0, request.blocks)
        session.runs.append(run)
        runs[run] = None
        used += request.blocks - taken
        policy.began(run, request.t, hits)
        if used > pool_blocks:
            used -= _evict(sessions, runs, used - pool_blocks, policy, request.t, held)
            outcome.over += used > pool_blocks
    return outcome


def _enter(session: _Session, request: Request, runs: dict[Run, None]) -> tuple[int, int]:
    """The request takes over the blocks of its path: (blocks reused, resident blocks that changed hands)."""
    shares = [(run, session.common(request.number, run.request.number)) for run in session.runs]
    touched = sorted(((r, c) for r, c in shares if c > r.start), key=lambda rc: rc[0].start)
    hits, taken = 0, 0
    for run, common in touched:
        if run.start == hits:
            hits = min(run.end, common)
        taken += min(run.end, common) - run.start
        run.start = min(common, run.end)
    for run in list(session.runs):
        run.superseded = True
        if run.start >= run.end:
            session.runs.remove(run)
            del runs[run]
    return hits, taken


def _evict(
    sessions: dict[str, _Session], runs: dict[Run, None], need: int, policy: Policy, now: float, held: bool
) -> int:
    """Takes `need` blocks, or all there are; returns how many."""
    freed = 0
    while freed < need:
        candidates = [run for run in runs if run.request.ends <= now] if held else list(runs)
        if not candidates:
            break
        for run, most in policy.victims(candidates, now):
            cut = min(need - freed, run.end - run.start, most)
            run.end -= cut
            freed += cut
            if run.start >= run.end:
                sessions[run.request.session].runs.remove(run)
                del runs[run]
            if freed >= need:
                break
    return freed


class LRU:
    """By last use: when the request came (idle at once), or when it ended (`held`)."""

    def __init__(self, held: bool = False) -> None:
        self._held = held

    def began(self, run: Run, now: float, hits: int) -> None:
        pass

    def victims(self, runs: Sequence[Run], now: float) -> Iterator[tuple[Run, int]]:
        if self._held:
            runs = heapq.nsmallest(8, runs, key=lambda run: run.request.ends)
        return ((run, run.end) for run in runs[:8])


class Oracle:
    """Belady: the block whose next use is farthest goes first. Knows the future."""

    def __init__(self, requests: Sequence[Request], look: int = 8) -> None:
        self._look = look
        self._newest: dict[str, int] = {}
        self._of: dict[str, _Session] = {}
        for request in requests:
            self._of.setdefault(request.session, _Session()).requests.append(request)

    def began(self, run: Run, now: float, hits: int) -> None:
        self._newest[run.request.session] = run.request.number

    def victims(self, runs: Sequence[Run], now: float) -> Iterator[tuple[Run, int]]:
        ranked = [(*self._next(run), run) for run in runs]
        return ((run, blocks) for _, blocks, run in heapq.nlargest(8, ranked, key=lambda r: r[0]))

    def _next(self, run: Run) -> tuple[float, int]:
        """When the run's last block is used next, and how many blocks at its end share that."""
        session, mine = self._of[run.request.session], run.request.number
        unused_from = run.start
        first = self._newest[run.request.session] + 1
        for later in session.requests[first : first + self._look]:
            common = session.common(later.number, mine)
            if common >= run.end:
                return later.t, run.end - unused_from
            unused_from = max(unused_from, common)
        return math.inf, run.end - unused_from


class Learned:
    """kvsteward's policy; with its guard if `pool_blocks` is given. `finals`: clients say when a session is over."""

    def __init__(self, pool_blocks: int | None = None, *, finals: bool = False, returns: Returns | None = None) -> None:
        self.returns = returns or Returns()
        self._guard = Guard(pool_blocks) if pool_blocks else None
        self._finals = finals
        self._newest: dict[str, int] = {}
        self._ending: list[tuple[float, Request]] = []
        self._over: set[str] = set()
        self._followed: dict[str, OrderedDict[int, list[tuple[int, int]]]] = {}

    def began(self, run: Run, now: float, hits: int) -> None:
        self.settle(now)
        request = run.request
        self.returns.started(request.session, now)
        self._newest[request.session] = request.number
        heapq.heappush(self._ending, (request.ends, request))
        if self._guard:
            followed = self._follow(request, self._guard.every)
            names = [(request.session, *name) for name in followed]
            self._guard.turn(names, sum(1 for _, at in followed if at < hits))

    def _follow(self, request: Request, every: int, kept: int = 16) -> list[tuple[int, int]]:
        """Those blocks of a request's path that the guard follows: (request that made it, place)."""
        paths = self._followed.setdefault(request.session, OrderedDict())
        path = [name for name in paths.get(request.parent, ()) if name[1] < request.shared]
        shift = zlib.crc32(request.session.encode()) % every
        first = request.shared + (shift - request.shared) % every
        paths[request.number] = path + [(request.number, at) for at in range(first, request.blocks, every)]
        while len(paths) > kept:
            paths.popitem(last=False)
        return paths[request.number]

    def settle(self, now: float) -> None:
        """Hears of the turns that have ended by now."""
        while self._ending and self._ending[0][0] <= now:
            ended, request = heapq.heappop(self._ending)
            if self._newest[request.session] != request.number:
                continue
            size = Size(request.blocks * BLOCK_TOKENS, request.output)
            self.returns.paused(request.session, ended, request.stop, size=size)
            if request.last and self._finals:
                self._over.add(request.session)

    def victims(self, runs: Sequence[Run], now: float) -> Iterator[tuple[Run, int]]:
        self.settle(now)
        lru = self._guard is not None and self._guard.lru
        named = {f"{r.request.session} {r.request.number}": r for r in runs}
        states = (self._state(name, run, lru) for name, run in named.items())
        return ((named[give.name], give.tokens) for give in order(states, EVEN if lru else self.returns, now))

    def _state(self, name: str, run: Run, lru: bool) -> State:
        hint = Hint(final=True) if run.request.session in self._over else NO_HINT
        return State(
            name,
            run.request.session,
            run.end - run.start,
            run.request.ends,
            superseded=run.superseded and not lru,
            hint=hint,
        )

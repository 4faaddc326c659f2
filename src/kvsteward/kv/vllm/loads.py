"""The scheduler's half: which blocks of a prompt come from the store, which go into it, and when each is certain.

Only what lies in the host pool is ever given to vLLM. For blocks that may lie below, `matched` starts a ticket and
answers "ask again" until it has ended, then says exactly what is pinned; the worker copies it before the step's
forward. So a load is a copy in memory and cannot fail by a disk or a network. A block is saved once, in the step that
fills it: its copy is made before the step's result is given back, all that is slow comes later in the store's threads.

Everything that a step holds (pins of what it loads, slots that it fills) is let go when every worker has said that it
did the step. No vLLM import, no clock but the one given. Invariant: vLLM is never told of a token whose block is not
loaded by the next step or reported as bad with it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvsteward.kv.blocks import BlockStore, Filling, Ticket, key
from kvsteward.kv.blocks.cost import LoadOrRecompute

MAX_KNOWN = 1 << 16
LOWER = "lower"
PREFILL_TOKENS = 128
"""A step of as many tokens tells how fast prefill is."""
HOLD_S = 1.0
"""How long a waiting request may keep blocks pinned that it does not ask for."""
TRY_AGAIN_S = 60.0
"""A tier that was slower than computing is tried again after that long: it may be fast by now."""
KNOWN_S = 600.0
"""How long the lower tiers are trusted to have what was given to them."""


class Request(Protocol):
    """The part of vLLM's request that is used here."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool


@dataclass(slots=True)
class Moves:
    """What the workers do in one step: `loads` before the forward, `saves` after it, `late` (blocks that were freed
    since the last step) before anything is written. `bad` blocks were promised and cannot be loaded. Pairs are
    (slot, block). `seen` is the newest failed step that the scheduler has heard of: until then a worker saves nothing,
    since it may rest on what was not loaded."""

    number: int = 0
    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    late: list[tuple[int, int]] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    seen: int = 0

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves or self.late or self.bad)


@dataclass(slots=True)
class _Turn:
    """`saved` blocks at the front need no saving. `ticket` is for the blocks from `first` on, of which `here` were in
    host memory at `asked_s`; `start` is where the newest answer to vLLM began; `answered`: it was told the ticket."""

    request: Request
    session: str
    ttl_s: float | None
    keys: list[bytes] = field(default_factory=list)
    saved: int = 0
    ticket: Ticket | None = None
    first: int = 0
    start: int = 0
    staged: bool = False
    answered: bool = False
    asked_s: float = 0.0
    here: int = 0


@dataclass(slots=True)
class _Step:
    """What one step holds until `ranks` workers have done it."""

    left: int
    tickets: list[Ticket] = field(default_factory=list)
    fills: list[tuple[bytes, Filling]] = field(default_factory=list)
    failed: bool = False


@dataclass(slots=True)
class Counts:
    """Tokens. `waits`: answers "ask again"; `lost`: steps that a worker could not do; `no_slot`: blocks that found
    every slot in use. `longest_wait_s`: of a request, from its first question to the answer."""

    loaded_tokens: int = 0
    loads: int = 0
    saved_tokens: int = 0
    waits: int = 0
    lost: int = 0
    no_slot: int = 0
    longest_wait_s: float = 0.0


class Loads:
    """`digest` of the fingerprint, `ranks` workers. `lower`: the store has tiers below host memory."""

    def __init__(
        self,
        store: BlockStore,
        digest: bytes,
        *,
        block_tokens: int,
        ranks: int,
        stage_within_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._digest = store, digest
        self._block_tokens, self._ranks, self._within_s = block_tokens, ranks, stage_within_s
        self._clock = clock
        self._lower = bool(store.tiers)
        self._turns: dict[str, _Turn] = {}
        self._steps: dict[int, _Step] = {}
        self._number = self._failed = 0
        self._next = Moves()
        self._holding: list[Ticket] = []
        self._fills: list[tuple[bytes, Filling]] = []
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._tried_s = clock()
        self._after: list[Callable[[], object]] = []
        self.cost = LoadOrRecompute(store.host.block_bytes, block_tokens, tokens_per_s=1000.0)
        self._timed: deque[tuple[float, int]] = deque(maxlen=4)
        self.counts = Counts()

    # one request

    def began(self, request: Request, session: str, ttl_s: float | None) -> None:
        self._turns[request.request_id] = _Turn(request, session, ttl_s)

    def matched(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens from `computed_tokens` on that are in host memory and pinned, never the last one; None: ask again."""
        turn = self._turns.get(request.request_id)
        if turn is None or request.skip_reading_prefix_cache:
            return 0
        start, end = computed_tokens // self._block_tokens, (request.num_tokens - 1) // self._block_tokens
        turn.start = start
        if turn.ticket is not None and turn.first > start:  # blocks before it have left vLLM's cache meanwhile
            self._let_go(turn)
        if turn.ticket is None:
            keys = self._keys(turn)[start:end]
            if not keys:
                return 0
            self._stage(turn, keys, start)
        assert turn.ticket is not None
        there = turn.ticket.poll()
        if there is None:
            self.counts.waits += 1
            return None
        if not turn.answered:
            self._heard(turn, there)
        return max(0, min(turn.first + there, end) - start) * self._block_tokens

    def allocated(self, request: Request, block_ids: Sequence[int], tokens: int) -> None:
        """vLLM has taken the answer of `matched`: `tokens` of it, into the request's blocks."""
        turn = self._turns.get(request.request_id)
        blocks = tokens // self._block_tokens
        promised = list(block_ids[turn.start : turn.start + blocks]) if turn else list(block_ids)
        if turn is None or turn.ticket is None or not blocks:
            if turn is not None:
                self._let_go(turn)
                turn.staged = False
            if blocks:
                self._next.bad += promised
            return
        slots = turn.ticket.indices()[turn.start - turn.first :][:blocks]
        if len(slots) < len(promised):
            self._next.bad += promised[len(slots) :]
        self._next.loads += list(zip(slots, promised, strict=False))
        self._holding.append(turn.ticket)
        turn.ticket, turn.staged, turn.answered = None, False, False
        self.counts.loads += 1
        self.counts.loaded_tokens += tokens

    def ended(self, request: Request, block_ids: Sequence[int], *, final: bool) -> None:
        """The turn is over; its blocks are about to be freed."""
        turn = self._turns.pop(request.request_id, None)
        if turn is None:
            return
        self._let_go(turn)
        if final:
            self._later(lambda: self._store.forget_session(turn.session) if turn.session else None)
            return
        full = min(request.num_computed_tokens // self._block_tokens, len(block_ids))
        self._next.late += self._save(turn, full, block_ids)
        keys = self._keys(turn)[:full]
        touch = self._store.host.touch if turn.ttl_s == 0 else self._store.touch  # of what is not kept nobody is told
        self._later(lambda: touch(keys, turn.session))

    def forget(self, session: str) -> None:
        """The session is over, no turn of it runs."""
        self._later(lambda: self._store.forget_session(session))

    # one step

    def plan(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]) -> Moves:
        """What the workers do in this step. `scheduled`: tokens of each request in it."""
        if not self._steps:
            self._catch_up()
        for request_id, tokens in scheduled.items():
            turn = self._turns.get(request_id)
            if turn is None:
                continue
            full = (turn.request.num_computed_tokens + tokens) // self._block_tokens
            if full > turn.saved:
                full = min(full, len(turn.request.block_hashes))
                self._next.saves += self._save(turn, full, blocks_of(request_id))
        now, tokens_now = self._clock(), sum(scheduled.values())
        if tokens_now:
            self._timed.append((now, tokens_now))
        for turn in self._turns.values():  # what vLLM had no room for, or asks no more about
            if turn.ticket is not None and (turn.answered or now > turn.asked_s + self._within_s + HOLD_S):
                self._let_go(turn)
        return self._send()

    def _send(self) -> Moves:
        moves, self._next = self._next, Moves()
        moves.seen = self._failed
        if not moves:
            return moves
        self._number += 1
        moves.number = self._number
        self._steps[moves.number] = _Step(self._ranks, self._holding, self._fills)
        self._holding, self._fills = [], []
        return moves

    @property
    def unsent(self) -> bool:
        """There is something to do for which no request runs: a step is needed soon."""
        return bool(self._next)

    def stepped(self) -> None:
        """A step with tokens is over: how long its tokens took."""
        if self._timed:
            began_s, tokens = self._timed.popleft()
            if tokens >= PREFILL_TOKENS:
                self.cost.computed(tokens, self._clock() - began_s)

    def rescue(self) -> Moves:
        """After a fault of ours: what was promised and not yet sent is bad."""
        moves = Moves(bad=[*self._next.bad, *(block for _, block in self._next.loads)], seen=self._failed)
        self._next = Moves()
        return moves

    def done(self, number: int, ranks: int, failed: bool) -> None:
        """`ranks` more workers have done the step."""
        step = self._steps.get(number)
        if step is None:
            return
        step.left -= ranks
        step.failed |= failed
        if step.left > 0:
            return
        del self._steps[number]
        for ticket in step.tickets:
            ticket.release()
        now = self._clock()
        for name, filling in reversed(step.fills):  # the front of a chain last, so that it is kept longest
            if step.failed:
                filling.abandon()
            elif filling.commit() and self._lower:
                self._remember(name, now)
        if step.failed:
            self.counts.lost += 1
            self._failed = max(self._failed, number)
            for turn in self._turns.values():
                turn.saved = 0
        else:
            self.counts.saved_tokens += len(step.fills) * self._block_tokens
        if not self._steps:
            self._catch_up()

    @property
    def running(self) -> list[str]:
        """Requests that have begun and not ended."""
        return list(self._turns)

    def reset(self, digest: bytes) -> None:
        """Nothing that was stored so far is valid any more; from now on keys have this digest."""
        self._digest = digest
        for _, filling in self._fills:
            filling.abandon()
        self._fills.clear()
        self._next.saves.clear()
        self._next.late.clear()
        self._known.clear()
        for turn in self._turns.values():
            self._let_go(turn)
            turn.keys.clear()
            turn.saved = 0
        self._store.host.clear()

    def close(self) -> None:
        for turn in self._turns.values():
            self._let_go(turn)
        self._turns.clear()
        self._store.close()

    # inside

    def _stage(self, turn: _Turn, keys: Sequence[bytes], start: int) -> None:
        """Once for each admission blocks may be fetched from below, if that is expected to be faster than computing."""
        turn.first, turn.asked_s, turn.here = start, self._clock(), self._store.lookup(keys)
        missing, context = len(keys) - turn.here, (start + turn.here) * self._block_tokens
        decision = self.cost.decide(LOWER, missing, context)
        fetch = self._lower and not turn.staged and missing > 0
        if fetch and not decision.load_blocks:
            fetch = turn.asked_s >= self._tried_s + TRY_AGAIN_S
            if fetch:
                self.cost.forget(LOWER)
        if fetch:
            self._tried_s = turn.asked_s
        within_s = min(self._within_s, decision.recompute_s) if fetch else 0.0
        turn.ticket = self._store.stage(keys, within_s, turn.session, lower=fetch)
        if self._lower and turn.ttl_s != 0:
            chain = list(self._keys(turn))
            self._later(lambda: self._store.use(chain, turn.session))
        turn.staged = True

    def _heard(self, turn: _Turn, there: int) -> None:
        turn.answered = True
        waited_s = self._clock() - turn.asked_s
        self.counts.longest_wait_s = max(self.counts.longest_wait_s, waited_s)
        if there > turn.here:
            self.cost.loaded(LOWER, there - turn.here, waited_s)
        elif turn.ticket is not None and turn.ticket.late:  # not one of them came in that time
            self.cost.loaded(LOWER, 1, waited_s)
        for name in self._keys(turn)[turn.first + there :]:  # it did not come, whatever was believed
            self._known.pop(name, None)

    def _keys(self, turn: _Turn) -> list[bytes]:
        hashes, known = turn.request.block_hashes, len(turn.keys)
        if known and (known > len(hashes) or turn.keys[-1] != key(self._digest, bytes(hashes[known - 1]))):
            turn.keys.clear()  # a streamed input changed the request's tokens
            turn.saved = 0
        if len(turn.keys) < len(hashes):
            turn.keys += [key(self._digest, bytes(h)) for h in hashes[len(turn.keys) :]]
        return turn.keys

    def _let_go(self, turn: _Turn) -> None:
        if turn.ticket is not None:
            turn.ticket.release()
            turn.ticket, turn.answered = None, False

    def _save(self, turn: _Turn, full: int, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Slots for those of the first `full` blocks that the store does not have."""
        if turn.ttl_s == 0:  # the caller said: do not keep
            turn.saved = max(turn.saved, full)
            return []
        keys, pairs, now = self._keys(turn), [], self._clock()
        full = min(full, len(keys))
        while turn.saved < full:
            name = keys[turn.saved]
            if not self._has(name, now):
                filling = self._store.open_put(name, turn.session, turn.ttl_s)
                if filling is None:
                    self.counts.no_slot += 1
                    break
                pairs.append((filling.index, block_ids[turn.saved]))
                self._fills.append((name, filling))
            turn.saved += 1
        return pairs

    def _has(self, name: bytes, now: float) -> bool:
        return self._store.host.holds(name) or now < self._known.get(name, now)

    def _remember(self, name: bytes, now: float) -> None:
        self._known[name] = now + KNOWN_S
        self._known.move_to_end(name)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _later(self, act: Callable[[], object]) -> None:
        """After the fills that are under way."""
        self._after.append(act)
        if not self._steps:
            self._catch_up()

    def _catch_up(self) -> None:
        acts, self._after = self._after, []
        for act in acts:
            act()

"""When will a paused session be back? Learned online from the gaps that a deployment sees.

Each class of pauses (why the turn stopped, for which tool, how fast this session usually is) has a table of hazards
over logarithmic bins of idle time: returns seen in the bin / idle seconds spent in it. Pauses that have not ended yet
count too (the seconds, without the return), so sessions that never come back need no special case. A class borrows
from the class above it until it has data of its own; the top one starts from a heavy-tailed prior.

`rate` is the Gittins index of keeping a unit of state: the best, over all times to stop waiting, of
P(return before then) / E[seconds kept until then]. For independent reuse it is the order that maximises hits per
byte-second (Gittins 1979; used on caches as hit density: Beckmann, Chen, Cidon, "LHD", NSDI 2018).

Mutable, no clock, no I/O: times come in. Invariant: at most `max_classes` tables and `max_sessions` sessions are held.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Key = tuple[str, ...]

BINS = 32
FIRST_BIN_S = 1.0
BINS_PER_OCTAVE = 2
EDGES_S = (0.0, *(FIRST_BIN_S * 2 ** (i / BINS_PER_OCTAVE) for i in range(BINS)))
"""Bin b is [EDGES_S[b], EDGES_S[b + 1]); the last one has no end."""
BORROWED_RETURNS = 2.0
"""How many returns per bin the class above is worth."""
PRIOR_SHAPE, PRIOR_SCALE_S = 0.75, 10.0
"""The prior hazard is shape / (age + scale): a Lomax (Pareto II) law, half are back after 15 s, 5 % away for 9 min."""
OWN_GAP_WEIGHT = 0.3
RUNNING: Key = ("running",)


def bin_of(age_s: float) -> int:
    if age_s < FIRST_BIN_S:
        return 0
    return min(BINS - 1, 1 + int(math.log2(age_s / FIRST_BIN_S) * BINS_PER_OCTAVE))


@dataclass(slots=True)
class Table:
    """Hazards of one class: `returns[b]` events in `idle_s[b]` seconds."""

    above: Table | None
    returns: list[float] = field(default_factory=lambda: [0.0] * BINS)
    idle_s: list[float] = field(default_factory=lambda: [0.0] * BINS)
    seen: int = 0
    computed_at: tuple[int, int] = (-1, -1)
    index: tuple[float, ...] = ()

    def idle(self, from_s: float, to_s: float) -> None:
        """Adds the seconds from age `from_s` to age `to_s`."""
        while from_s < to_s:
            b = bin_of(from_s)
            end_s = EDGES_S[b + 1] if b < BINS - 1 else math.inf
            until_s = min(to_s, max(end_s, math.nextafter(from_s, math.inf)))
            self.idle_s[b] += until_s - from_s
            from_s = until_s

    def came_back(self, age_s: float) -> None:
        self.returns[bin_of(age_s)] += 1
        self.seen += 1

    def hazards(self) -> list[float]:
        """Returns per idle second, by bin."""
        above = self.above.hazards() if self.above else [_prior(b) for b in range(BINS)]
        return [
            (n + BORROWED_RETURNS) / (s + BORROWED_RETURNS / h)
            for n, s, h in zip(self.returns, self.idle_s, above, strict=True)
        ]

    def rate(self, age_s: float) -> float:
        seen = (self.seen, self.above.seen_above() if self.above else 0)
        if any(n >= at + 8 + at // 16 for n, at in zip(seen, self.computed_at, strict=True)) or not self.index:
            self.index = gittins(self.hazards())
            self.computed_at = seen
        return self.index[bin_of(age_s)]

    def seen_above(self) -> int:
        """Returns in this class and all above it."""
        return self.seen + (self.above.seen_above() if self.above else 0)


def _prior(b: int) -> float:
    return PRIOR_SHAPE / ((EDGES_S[b] + EDGES_S[b + 1]) / 2 + PRIOR_SCALE_S)


def gittins(hazards: Sequence[float]) -> tuple[float, ...]:
    """Per bin: the best P(return by then) / E[seconds until then], over the bin ends `then` from this bin on."""
    return tuple(_best_rate(hazards, start) for start in range(len(hazards)))


def _best_rate(hazards: Sequence[float], start: int) -> float:
    still_away, kept_s, best = 1.0, 0.0, 0.0
    for b in range(start, len(hazards)):
        left = still_away * math.exp(-hazards[b] * (EDGES_S[b + 1] - EDGES_S[b]))
        kept_s += (still_away - left) / hazards[b]
        still_away = left
        best = max(best, (1.0 - still_away) / kept_s)
    return best


@dataclass(slots=True)
class _Pause:
    since_s: float
    counted_s: float
    """Up to this age its idle seconds are in the tables."""
    key: Key


@dataclass(slots=True)
class _Habit:
    running: _Pause | None = None
    pause: _Pause | None = None
    log2_gap: float | None = None


class Returns:
    """Learns from `started` and `paused`; answers `rate`. Unknown sessions are answered from the prior."""

    def __init__(self, *, max_sessions: int = 8192, max_classes: int = 1024) -> None:
        self._max_sessions, self._max_classes = max_sessions, max_classes
        self._top = Table(None)
        self._tables: OrderedDict[Key, Table] = OrderedDict()
        self._habits: OrderedDict[str, _Habit] = OrderedDict()

    def started(self, session: str, now_s: float) -> None:
        """A turn of the session begins: its pause, if there was one, is over."""
        habit = self._habits.pop(session, None) or _Habit()
        self._habits[session] = habit
        while len(self._habits) > self._max_sessions:
            self._forget(next(iter(self._habits)), now_s)
        if habit.running:
            self._over(habit.running, now_s)
        if habit.pause:
            gap_s = self._over(habit.pause, now_s)
            self._remember(habit, gap_s)
        habit.pause = None
        habit.running = _Pause(now_s, 0.0, (*RUNNING, _speed(habit)))
        self._count_oldest(now_s)

    def paused(self, session: str, now_s: float, stop: str = "", tools: Sequence[str] = ()) -> None:
        """The turn ended; `stop` and `tools` say why. Of several pending tools the slowest one decides."""
        habit = self._habits.get(session)
        if habit is None:
            self.started(session, now_s)
            habit = self._habits[session]
        speed = _speed(habit)
        keys = [(stop, tool, speed) for tool in tools[:16]] or [(stop, "", speed)]
        habit.pause = _Pause(now_s, 0.0, min(keys, key=lambda key: self._table(key).rate(0.0)))

    def ended(self, session: str) -> None:
        """The session is known to be over; what was learned from it stays."""
        self._habits.pop(session, None)

    def rate(self, session: str, now_s: float) -> float:
        """Expected returns per second of keeping this session's state, from now on (1/s)."""
        habit = self._habits.get(session)
        if habit is None:
            return self._top.rate(0.0)
        pause = habit.pause or habit.running
        if pause is None:
            return self._top.rate(0.0)
        return self._table(pause.key).rate(max(0.0, now_s - pause.since_s))

    def _over(self, pause: _Pause, now_s: float) -> float:
        age_s = max(0.0, now_s - pause.since_s)
        for table in self._chain(pause.key):
            table.idle(pause.counted_s, age_s)
            table.came_back(age_s)
        return age_s

    def _remember(self, habit: _Habit, gap_s: float) -> None:
        log2_gap = math.log2(max(gap_s, 1.0))
        before = habit.log2_gap
        habit.log2_gap = log2_gap if before is None else before + OWN_GAP_WEIGHT * (log2_gap - before)

    def _count_oldest(self, now_s: float, sessions: int = 4) -> None:
        """Moves a few of the longest unused sessions' idle seconds into the tables; each call does a bounded part."""
        for _ in range(min(sessions, len(self._habits))):
            session, habit = self._habits.popitem(last=False)
            self._count(habit, now_s)
            self._habits[session] = habit

    def _count(self, habit: _Habit, now_s: float) -> None:
        for pause in (habit.pause, habit.running):
            age_s = now_s - pause.since_s if pause else 0.0
            if pause and age_s > pause.counted_s:
                for table in self._chain(pause.key):
                    table.idle(pause.counted_s, age_s)
                pause.counted_s = age_s

    def _forget(self, session: str, now_s: float) -> None:
        self._count(self._habits.pop(session), now_s)

    def _chain(self, key: Key) -> Iterator[Table]:
        table: Table | None = self._table(key)
        while table:
            yield table
            table = table.above

    def _table(self, key: Key) -> Table:
        """The class's table; where there is no room for another one, the class above it."""
        table = self._tables.get(key)
        if table:
            return table
        above = self._table(key[:-1]) if len(key) > 1 else self._top
        if len(self._tables) >= self._max_classes:
            return above
        table = self._tables[key] = Table(above)
        return table


def _speed(habit: _Habit) -> str:
    """The session's own usual gap, as an octave of seconds: "0" is 1 to 2 s; "" unknown."""
    return "" if habit.log2_gap is None else str(min(7, int(habit.log2_gap)))

"""When will a paused session be back? Learned online from the gaps that a deployment sees.

Each class of pauses (why the turn stopped, for which tool, how fast this session usually is) has a table of hazards
over logarithmic bins of idle time: returns seen in the bin / idle seconds spent in it. Pauses that have not ended yet
count too (the seconds, without the return), so sessions that never come back need no special case. A class borrows
from the class above it until it has data of its own; the top one starts from a heavy-tailed prior.

`rate` is the Gittins index of keeping a unit of state: the best, over all times to stop waiting, of
P(return before then) / E[seconds kept until then]. For independent reuse it is the order that maximises hits per
byte-second (Gittins 1979; used on caches as hit density: Beckmann, Chen, Cidon, "LHD", NSDI 2018).

What was learned can be taken out as rows of plain values and given to the next process (`rows`, `take`): sessions are
not part of it.

Mutable, no clock, no I/O: times come in. Invariant: at most `max_classes` tables and `max_sessions` sessions are held.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsteward.policy.tilts import Tilts, Trait, names_of, numbers_of

Key = tuple[str, ...]

BINS = 40
FIRST_BIN_S = 0.125
BINS_PER_OCTAVE = 2
EDGES_S = (0.0, *(FIRST_BIN_S * 2 ** (i / BINS_PER_OCTAVE) for i in range(BINS)))
"""Bin b is [EDGES_S[b], EDGES_S[b + 1]); the last one has no end."""
WIDTHS_S = tuple(EDGES_S[b + 1] - EDGES_S[b] for b in range(BINS))
BORROWED_RETURNS = 2.0
"""How many returns per bin the class above is worth."""
PRIOR_SHAPE, PRIOR_SCALE_S = 0.75, 10.0
"""The prior hazard is shape / (age + scale): a Lomax (Pareto II) law, half are back after 15 s, 5 % away for 9 min."""
OWN_GAP_WEIGHT = 0.3
COUNT_AGAIN = 1.5
"""A pause that goes on is counted again when it is this much longer."""
MOST_TAKEN_RETURNS = 1000.0
"""A class that comes from an earlier process weighs no more than this many returns: traffic may have changed."""
RUNNING: Key = ("running",)
ENDS = ("stop", "end_turn", "stopped")
"""Stops after which it is the user's turn."""


def bin_of(age_s: float) -> int:
    if age_s < FIRST_BIN_S:
        return 0
    return min(BINS - 1, 1 + int(math.log2(age_s / FIRST_BIN_S) * BINS_PER_OCTAVE))


def spent_s(from_s: float, to_s: float) -> list[float]:
    """Seconds in each bin, from bin 0 to that of `to_s`, between the ages `from_s` and `to_s`."""
    last = bin_of(to_s)
    spent = [0.0] * (last + 1)
    for b in range(bin_of(from_s), last + 1):
        until_s = to_s if b == last else EDGES_S[b + 1]
        spent[b] = max(0.0, until_s - max(from_s, EDGES_S[b]))
    return spent


@dataclass(slots=True)
class Table:
    """Hazards of one class: `returns[b]` events in `idle_s[b]` seconds."""

    above: Table | None
    returns: list[float] = field(default_factory=lambda: [0.0] * BINS)
    idle_s: list[float] = field(default_factory=lambda: [0.0] * BINS)
    seen: int = 0
    computed_at: tuple[int, int] = (-1, -1)
    _hazards: tuple[float, ...] = ()
    _index: tuple[float, ...] = ()

    def idle(self, spent_s: Sequence[float]) -> None:
        """Adds idle seconds, by bin from bin 0 on."""
        for b, seconds in enumerate(spent_s):
            if seconds > 0.0:
                self.idle_s[b] += seconds

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

    def lately(self) -> tuple[float, ...]:
        """`hazards`, as of a few returns ago: computed anew when there is enough news."""
        seen = (self.seen, self.above.seen_above() if self.above else 0)
        if any(n >= at + 8 + at // 16 for n, at in zip(seen, self.computed_at, strict=True)) or not self._hazards:
            self._hazards, self._index = tuple(self.hazards()), ()
            self.computed_at = seen
        return self._hazards

    def rate(self, age_s: float) -> float:
        hazards = self.lately()
        if not self._index:
            self._index = gittins(hazards)
        return self._index[bin_of(age_s)]

    def seen_above(self) -> int:
        """Returns in this class and all above it."""
        return self.seen + (self.above.seen_above() if self.above else 0)


def _prior(b: int) -> float:
    return PRIOR_SHAPE / ((EDGES_S[b] + EDGES_S[b + 1]) / 2 + PRIOR_SCALE_S)


def gittins(hazards: Sequence[float]) -> tuple[float, ...]:
    """Per bin: the best P(return by then) / E[seconds until then], over the bin ends `then` from this bin on.

    From the last bin to the first, O(bins): it pays to wait through the stretch after a bin as long as that stretch has
    the better index."""
    stretches: list[tuple[float, float, float]] = []
    found: list[float] = []
    for hazard, width_s in zip(reversed(hazards), reversed(WIDTHS_S), strict=True):
        stay = math.exp(-hazard * width_s)
        back, kept_s = 1.0 - stay, (1.0 - stay) / hazard
        while stretches and stretches[-1][0] * kept_s > back * stretches[-1][1]:
            next_back, next_kept_s, next_stay = stretches.pop()
            back += stay * next_back
            kept_s += stay * next_kept_s
            stay *= next_stay
        stretches.append((back, kept_s, stay))
        found.append(back / kept_s)
    return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Size:
    """What is known of a turn that ended; 0: not known."""

    prompt_tokens: int = 0
    output_tokens: int = 0


UNKNOWN_SIZE = Size()


@dataclass(slots=True)
class _Pause:
    since_s: float
    key: Key
    base: tuple[float, ...]
    """The class's hazards when the pause began."""
    traits: tuple[Trait, ...] = ()
    counted_s: float = 0.0
    """Up to this age its idle seconds are in the tables."""
    index: tuple[float, ...] = ()
    """By bin, made when the pause begins so that a ranking only looks up. Empty: the class's own."""


@dataclass(slots=True)
class _Habit:
    """How a session has been so far. `slow`: share of gaps far above its usual one, lately; `after_end`: octave of its
    gap when a task had last ended."""

    running: _Pause | None = None
    pause: _Pause | None = None
    log2_gap: float | None = None
    gaps: tuple[int, int] = (-1, -1)
    longest: float = 0.0
    slow: float = 0.0
    turns: int = 0
    since_end: int = 0
    after_end: int = -1
    stop: str = ""
    size: Size = UNKNOWN_SIZE
    grown_tokens: int = 0
    took_s: float = 0.0


class Returns:
    """Learns from `started` and `paused`; answers `rate`. Unknown sessions are answered from the prior."""

    def __init__(self, *, max_sessions: int = 8192, max_classes: int = 1024) -> None:
        self._max_sessions, self._max_classes = max_sessions, max_classes
        self._top = Table(None)
        self._tables: OrderedDict[Key, Table] = OrderedDict()
        self._habits: OrderedDict[str, _Habit] = OrderedDict()
        self._tilts = Tilts(BINS)

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
            _remember(habit, gap_s)
        habit.pause = None
        key = (*RUNNING, _speed(habit))
        habit.running = _Pause(now_s, key, self._table(key).lately())
        self._count_oldest(now_s)

    def paused(
        self, session: str, now_s: float, stop: str = "", tools: Sequence[str] = (), size: Size = UNKNOWN_SIZE
    ) -> None:
        """The turn ended; `stop` and `tools` say why. Of several pending tools the slowest one decides."""
        habit = self._habits.get(session)
        if habit is None:
            self.started(session, now_s)
            habit = self._habits[session]
        speed = _speed(habit)
        keys = [(stop, tool, speed) for tool in tools[:16]] or [(stop, "", speed)]
        key = min(keys, key=lambda key: self._table(key).rate(0.0))
        if habit.pause is None:  # else it is news of a pause that is known: the turn was what it was
            _ended(habit, stop, size, now_s)
        habit.stop = stop
        traits = _traits(habit, key)
        base = self._table(key).lately()
        habit.pause = _Pause(now_s, key, base, traits, index=gittins(self._tilts.hazards(base, traits)))

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
        age_s = max(0.0, now_s - pause.since_s)
        if not pause.index:
            return self._table(pause.key).rate(age_s)
        return pause.index[bin_of(age_s)]

    def rows(self) -> list[dict[str, Any]]:
        """What was learned, as copies that JSON can hold: one row for each class, those above first, then the tilts."""
        tables = [((), self._top), *self._tables.items()]
        classes = [{"class": list(k), "returns": list(t.returns), "idle_s": list(t.idle_s)} for k, t in tables]
        return [*classes, *self._tilts.rows()]

    def take(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Begins with what `rows` of an earlier process say. Raises ValueError at a row that is none; then what came
        before it is there, and this object is to be thrown away."""
        for row in rows:
            if "class" not in row:
                self._tilts.take(row)
                continue
            key = names_of(row["class"])
            returns, idle_s = numbers_of(row.get("returns"), BINS), numbers_of(row.get("idle_s"), BINS)
            if min(*returns, *idle_s) < 0.0:
                raise ValueError("returns and seconds are 0 or more")
            if key and len(self._tables) >= self._max_classes:
                continue
            table = self._table(key) if key else self._top
            part = min(1.0, MOST_TAKEN_RETURNS / max(1.0, sum(returns)))
            table.returns = [part * n for n in returns]
            table.idle_s = [part * seconds for seconds in idle_s]
            table.seen = int(sum(table.returns))

    def _over(self, pause: _Pause, now_s: float) -> float:
        age_s = max(0.0, now_s - pause.since_s)
        self._learn(pause, age_s, back=True)
        return age_s

    def _learn(self, pause: _Pause, age_s: float, *, back: bool) -> None:
        spent = spent_s(pause.counted_s, age_s)
        for table in self._chain(pause.key):
            table.idle(spent)
            if back:
                table.came_back(age_s)
        if pause.traits:
            self._tilts.learn(pause.base, pause.traits, spent, bin_of(age_s) if back else None)
        pause.counted_s = age_s

    def _count_oldest(self, now_s: float, sessions: int = 4) -> None:
        """Moves a few of the longest unused sessions' idle seconds into the tables; each call does a bounded part."""
        for _ in range(min(sessions, len(self._habits))):
            session, habit = self._habits.popitem(last=False)
            self._count(habit, now_s)
            self._habits[session] = habit

    def _count(self, habit: _Habit, now_s: float) -> None:
        for pause in (habit.pause, habit.running):
            age_s = now_s - pause.since_s if pause else 0.0
            if pause and age_s > pause.counted_s * COUNT_AGAIN + FIRST_BIN_S:
                self._learn(pause, age_s, back=False)

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


def _ended(habit: _Habit, stop: str, size: Size, now_s: float) -> None:
    habit.turns += 1
    habit.since_end = 0 if habit.stop in ENDS else habit.since_end + 1
    habit.took_s = now_s - habit.running.since_s if habit.running else 0.0
    habit.grown_tokens = max(0, size.prompt_tokens - habit.size.prompt_tokens)
    habit.size = size


def _remember(habit: _Habit, gap_s: float) -> None:
    log2_gap = math.log2(max(gap_s, 1.0))
    before = habit.log2_gap
    habit.log2_gap = log2_gap if before is None else before + OWN_GAP_WEIGHT * (log2_gap - before)
    habit.gaps = (_octave(gap_s), habit.gaps[0])
    habit.longest = max(gap_s, habit.longest * 0.85)
    habit.slow += 0.1 * ((log2_gap > habit.log2_gap + 1.5) - habit.slow)
    if habit.stop in ENDS:
        habit.after_end = _octave(gap_s)


def _speed(habit: _Habit) -> str:
    """The session's own usual gap, as an octave of seconds: "0" is 1 to 2 s; "" unknown."""
    return "" if habit.log2_gap is None else str(min(7, int(habit.log2_gap)))


def _octave(value: float) -> int:
    return int(math.log2(value)) if value >= 1.0 else 0


def _traits(habit: _Habit, key: Key) -> tuple[Trait, ...]:
    stop, speed = key[0] + "/" + key[1], key[2]
    out, took = str(_octave(habit.size.output_tokens)), str(_octave(2 * habit.took_s))
    grown = str(_octave(habit.grown_tokens))
    last, before = str(habit.gaps[0]), str(habit.gaps[1])
    longest = str(_octave(habit.longest))
    return (
        ("out", out),
        ("took", took),
        ("prompt", str(_octave(habit.size.prompt_tokens))),
        ("grown", grown),
        ("last", last),
        ("before", before),
        ("longest", longest),
        ("speed", speed),
        ("stop", stop),
        ("turns", str(_octave(habit.turns))),
        ("slow", str(int(8 * habit.slow))),
        ("since end", str(_octave(habit.since_end))),
        ("after end", str(habit.after_end)),
        ("out took", out, took),
        ("gaps", last, before),
        ("out stop", out, stop),
        ("last stop", last, stop),
        ("speed longest", speed, longest),
    )

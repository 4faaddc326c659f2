"""The packer: from units in document order to a text of at most a limit, best value per token first, gaps marked.

It does not know what a unit is (a line, a row, a sentence). Invariants: kept units stay in order and whole; the
result's estimate is within the limit; what was left out is marked where it was.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvsteward.context.distill.meter import Meter
from kvsteward.context.distill.salience import Focus, Seen, error_weight, is_value, rareness, values_of, whole_values

GAP_TOKENS = 4
_VALUES_SHARE = 0.3
_END_SHARE = 0.15
_MAX_UNITS = 40_000
_MAX_VALUES = 4_000


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of the text that is kept or left as a whole; `prior`: what its distiller thinks of it (0: nothing)."""

    text: str
    prior: float = 0.0
    values: tuple[str, ...] | None = None
    """Its values, if its distiller knows them better than the words of the text do."""

    def words(self) -> Sequence[str]:
        """The values that keeping this unit keeps."""
        return values_of(self.text) if self.values is None else self.values


@dataclass(frozen=True, slots=True)
class Packed:
    """`kept` of `total` units stand in `text`."""

    text: str
    kept: int
    total: int


def pack(
    units: Sequence[Unit],
    limit_tokens: float,
    focus: Focus,
    meter: Meter,
    noun: str = "lines",
    joiner: str = "\n",
    known: Iterable[str] = (),
) -> Packed:
    """Fill the limit; the last share of it is a line of values from what was left out. `known` values add nothing."""
    costs = [meter.tokens(unit.text) + 1 for unit in units]
    if sum(costs) <= limit_tokens:
        return Packed(joiner.join(unit.text for unit in units), len(units), len(units))
    if uniform(units):
        chosen = head_first(units, costs, limit_tokens - 2 * GAP_TOKENS, focus)
        return Packed(_render(units, chosen, noun, joiner), len(chosen), len(units))
    body_limit = limit_tokens * (1 - _VALUES_SHARE)
    chosen, seen = choose(units, costs, body_limit, focus, known=known)
    body = _render(units, chosen, noun, joiner)
    tail = values_line(
        (unit.text for i, unit in enumerate(units) if i not in chosen),
        seen,
        limit_tokens - meter.tokens(body) - 3,
        focus,
        meter,
    )
    return Packed(f"{body}\n{tail}" if tail else body, len(chosen), len(units))


def choose(
    units: Sequence[Unit],
    costs: Sequence[float],
    limit: float,
    focus: Focus,
    gap_tokens: float = GAP_TOKENS,
    known: Iterable[str] = (),
) -> tuple[set[int], Seen]:
    """The units worth most per token within the limit, and their values; each gap between them costs `gap_tokens`."""
    values = [unit.words() for unit in units]
    seen = Seen(Counter(value for each in values for value in each), set(known))
    near = nearness([unit.text for unit in units], focus)
    static = [_static(unit, i, len(units), near[i]) for i, unit in enumerate(units)]

    def density(i: int) -> float:
        return (static[i] + seen.gain(values[i])) / (costs[i] + gap_tokens * 0.6)

    heap = [(-density(i), i) for i in range(len(units)) if units[i].text.strip()]
    heapq.heapify(heap)
    chosen = _ends(units, costs, limit)
    spent = gap_tokens + sum(costs[i] for i in chosen)
    for i in sorted(chosen):
        seen.keep(values[i])
    while heap and spent < limit:
        promised, i = heapq.heappop(heap)
        if i in chosen:
            continue
        now = -density(i)
        if heap and now > heap[0][0] + 1e-12 and now > promised:
            heapq.heappush(heap, (now, i))
            continue
        price = costs[i] + gap_tokens * (1 - (i - 1 in chosen) - (i + 1 in chosen))
        if spent + price > limit:
            continue
        chosen.add(i)
        spent += price
        seen.keep(values[i])
    return chosen, seen


def nearness(texts: Sequence[str], focus: Focus) -> list[float]:
    """For each text its relation to what is looked for; words that many of the texts hold count little. At most 6."""
    hits = [focus.hits(text) for text in texts]
    frequency = Counter(word for found in hits for word in found)
    weight = {word: rareness(times, len(texts)) for word, times in frequency.items()}
    return [min(6.0, sum(w * weight[word] for word, w in found.items())) for found in hits]


def _static(unit: Unit, i: int, total: int, near: float) -> float:
    edge = min(i, (total - 1 - i) * 1.5)
    position = 3.0 / (1.0 + edge)
    return unit.prior + position + 1.5 * near + 1.2 * error_weight(unit.text)


def _ends(units: Sequence[Unit], costs: Sequence[float], limit: float) -> set[int]:
    """The first and the last unit that hold something, if they are cheap: a text is known by its ends."""
    filled = [i for i in range(len(units)) if units[i].text.strip()]
    ends = {*filled[:1], *filled[-1:]}
    return {i for i in ends if costs[i] <= _END_SHARE * limit}


def head_first(units: Sequence[Unit], costs: Sequence[float], limit: float, focus: Focus) -> set[int]:
    """For units that are all alike: what was named, then the head, with a last part for the tail.

    A sample from the middle of a uniform list helps nobody; its start in one piece can be worked with.
    """
    chosen: set[int] = set()
    spent = 0.0
    named = [i for i, unit in enumerate(units) if focus.names(unit.text)]
    tail = range(len(units) - 1, -1, -1)
    for order, share in ((named, 0.4), (range(len(units)), 0.88), (tail, 1.0)):
        for i in order:
            if i in chosen:
                continue
            if spent + costs[i] > limit * share:
                break
            chosen.add(i)
            spent += costs[i]
    return chosen


def uniform(units: Sequence[Unit]) -> bool:
    """True if the units are one short word each, of like length: a list of values."""
    words = [unit.text.strip() for unit in units if unit.text.strip()]
    if len(words) < 12:
        return False
    alike = sum(1 for word in words if len(word) <= 64 and not any(map(str.isspace, word)))
    return alike > 0.95 * len(words)


def _render(units: Sequence[Unit], chosen: set[int], noun: str, joiner: str) -> str:
    parts: list[str] = []
    gap = 0
    named = False
    for i, unit in enumerate([*units, None]):
        if unit is None or i in chosen:
            if gap:
                parts.append(f"… {gap}" if named else f"… {gap} {noun}")
                named = True
            gap = 0
            if unit is not None:
                parts.append(unit.text)
        elif unit.text.strip():
            gap += 1
    return joiner.join(parts)


def values_line(left: Iterable[str], seen: Seen, limit_tokens: float, focus: Focus, meter: Meter) -> str:
    """One line with the rarest and nearest values of the left-out texts, in document order; empty if none fit."""
    if limit_tokens < 8:
        return ""
    order: dict[str, float] = {}
    for text in left:
        if len(order) >= _MAX_VALUES:
            break
        near = focus.weight(text)
        for value in whole_values(text):
            if value not in seen.kept and value not in order:
                order[value] = _worth(value, near, seen, focus)
    ranked = sorted(order, key=lambda v: -order[v] / (meter.tokens(v) + 1.0))
    kept: set[str] = set()
    spent = 3.0
    for value in ranked:
        price = meter.tokens(value) + 1
        if spent + price > limit_tokens:
            continue
        spent += price
        kept.add(value)
    return listed([value for value in order if value in kept])


def listed(values: Sequence[str]) -> str:
    """The line that stands for parts that were left out."""
    return f"values: {' '.join(values)}" if values else ""


def _worth(value: str, near: float, seen: Seen, focus: Focus) -> float:
    words = values_of(value) or [value]
    fresh = seen.gain(words)
    if not fresh and is_value(value):
        return 0.05
    kind = 1.0 + 0.5 * ("@" in value) + 0.3 * ("/" in value)
    return kind * (fresh + 0.1) * (1 + 0.3 * near)

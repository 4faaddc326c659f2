"""What the columns of a table are worth, what they cost, and what they say in one line.

It does not know how a table is laid out. Invariant: work is bounded by a sample of rows, but for counts and ranges.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvsteward.context.distill.meter import Meter
from kvsteward.context.distill.salience import Focus

EMPTY = frozenset({"", "None", "null", "NULL", "nan", "NaN"})
_MAX_CELL_CHARS = 400
_SAMPLE_ROWS = 300
_MAX_DISTINCT_SHOWN = 200
_NUMERIC = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d{1,3})?%?")
_ID_NAME = re.compile(
    r"(?:^|[._ ])(?:id|uuid|key|name|code|number|no|sku|email|path|file|title|url|slug|symbol)$|_id$|Id$|ID$|_?name$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Table:
    """`columns` may be empty strings (no header); each row has len(columns) cells; `total` rows stood in the source."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    total: int

    @property
    def headed(self) -> bool:
        """True if the source named its columns."""
        return any(self.columns)

    def label(self, column: int) -> str:
        """The name of a column, or its place (from 1) if it has none."""
        return self.columns[column] or f"c{column + 1}"

    def cells(self, column: int) -> list[str]:
        """All cells of a column."""
        return [row[column] for row in self.rows]


def clip(cell: str) -> str:
    """One line, bounded: head and tail of a cell that is very long."""
    if len(cell) > 4 * _MAX_CELL_CHARS:
        cell = f"{cell[: 2 * _MAX_CELL_CHARS]} {cell[-_MAX_CELL_CHARS:]}"
    cell = " ".join(cell.split())
    if len(cell) <= _MAX_CELL_CHARS:
        return cell
    return f"{cell[: _MAX_CELL_CHARS // 2]}…{cell[-_MAX_CELL_CHARS // 4 :]}"


def sample_of(cells: Sequence[str]) -> list[str]:
    """An even sample of bounded size."""
    return list(cells[:: max(1, len(cells) // _SAMPLE_ROWS)])


def runs_of(cells: Sequence[str]) -> int:
    """In how many stretches of equal neighbours the cells come."""
    return sum(1 for i, cell in enumerate(cells) if not i or cell != cells[i - 1])


def cost(cells: Sequence[str], meter: Meter) -> float:
    """About the tokens of all cells of a column with their separators."""
    sample = [clip(cell) for cell in sample_of(cells)]
    if not sample:
        return 0.0
    return meter.tokens("|".join(sample)) * len(cells) / len(sample) + 0.3 * len(cells)


@dataclass(frozen=True, slots=True)
class Profile:
    """Shares of a column's cells: `filled` are not empty, `distinct` of the filled differ, `numeric` are numbers."""

    filled: float
    distinct: float
    numeric: float
    mean_chars: float


def profile(cells: Sequence[str]) -> Profile:
    """The profile of a column, from a sample."""
    sample = sample_of(cells)
    filled = [cell for cell in sample if cell not in EMPTY]
    if not filled:
        return Profile(0.0, 0.0, 0.0, 0.0)
    return Profile(
        len(filled) / len(sample),
        len(set(filled)) / len(filled),
        sum(1 for cell in filled if _NUMERIC.fullmatch(cell[:40])) / len(filled),
        sum(map(len, filled)) / len(filled),
    )


def worth(label: str, seen: Profile, focus: Focus) -> float:
    """How much a column identifies its rows or is asked for; about 0 (empty) to 6."""
    value = 0.2 + 2.0 * seen.distinct * (1.0 - 0.6 * seen.numeric)
    if label:
        value += 1.5 * bool(_ID_NAME.search(label)) + 1.5 * min(2.0, focus.weight(label))
    if seen.mean_chars > 60:
        value *= 0.5
    return value * seen.filled


def summary(label: str, cells: Sequence[str], room_tokens: float, meter: Meter) -> str:
    """One line: the range of a column of numbers, else its distinct values, the most frequent first, as many as fit."""
    seen = profile(cells)
    counts = Counter(clip(cell)[:80] for cell in cells)
    if seen.numeric > 0.9 and len(counts) > 6:
        return f"{label}: {_range(cells)}"
    line = f"{label}: {len(counts)} values: "
    room = room_tokens - meter.tokens(line) - 3
    shown: list[str] = []
    for value, times in counts.most_common(_MAX_DISTINCT_SHOWN):
        told = f"{value or '(empty)'}×{times}" if times > 1 else value
        room -= meter.tokens(told) + 1
        if room < 0:
            break
        shown.append(told)
    if not shown:
        return ""
    return line + ", ".join(shown) + (", …" if len(shown) < len(counts) else "")


def _range(cells: Sequence[str]) -> str:
    numbers = [(number(cell), cell) for cell in cells if is_number(cell)]
    mean = sum(value for value, _ in numbers) / len(numbers)
    return f"min {min(numbers)[1]}, max {max(numbers)[1]}, mean {mean:.4g}"


def is_number(cell: str) -> bool:
    """True for a plain number, with grouping commas, an exponent or a per cent sign allowed."""
    return len(cell) <= 40 and _NUMERIC.fullmatch(cell) is not None


def number(cell: str) -> float:
    """The number that a cell `is_number` holds."""
    return float(cell.replace(",", "").rstrip("%"))

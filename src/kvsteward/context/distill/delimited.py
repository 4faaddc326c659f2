"""CSV, TSV, Markdown and aligned text tables: as tables.

It does not guess types beyond numbers. Invariant: a text is a table only if nearly all of its lines have
the same cells.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Sequence

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.columns import Table, is_number
from kvsteward.context.distill.meter import calibrated
from kvsteward.context.distill.rows import MAX_COLUMNS, MAX_ROWS, lay
from kvsteward.context.distill.salience import focus_of

_SAMPLE_LINES = 60
_MIN_LINES = 4
_WIDE_GAP = re.compile(r"\s{2,}|\t")
_RULE = re.compile(r"[\s|+:=_-]*")
_MAX_LINE_CHARS = 20_000
Split = Callable[[str], list[str]]


def _comma(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _tab(line: str) -> list[str]:
    return line.split("\t")


def _semicolon(line: str) -> list[str]:
    return next(csv.reader([line], delimiter=";"), [])


def _pipe(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _wide(line: str) -> list[str]:
    return _WIDE_GAP.split(line.strip())


_SPLITS: tuple[tuple[str, Split], ...] = (("\t", _tab), (",", _comma), ("|", _pipe), (";", _semicolon), ("  ", _wide))


def split_for(lines: Sequence[str]) -> tuple[Split, int] | None:
    """How to cut these lines into cells, and into how many; None if they are not a table."""
    rows = [line for line in lines if line.strip() and not _RULE.fullmatch(line[:300]) and len(line) < _MAX_LINE_CHARS]
    if len(rows) < _MIN_LINES:
        return None
    for sign, split in _SPLITS:
        if sum(1 for row in rows if sign in row) < 0.85 * len(rows):
            continue
        try:
            widths = Counter(len(split(row)) for row in rows)
        except csv.Error:
            continue
        width, times = widths.most_common(1)[0]
        needed = 3 if split in (_wide, _comma) else 2
        if needed <= width <= MAX_COLUMNS and times >= 0.85 * len(rows):
            return split, width
    return None


class Delimited(Distiller):
    """One table, with or without a header."""

    kind = "table"

    def matches(self, text: str) -> bool:
        lines = text[:40_000].split("\n")[: _SAMPLE_LINES + 1]
        return split_for(lines[:-1] if len(lines) > _SAMPLE_LINES else lines) is not None

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        lines = [line for line in text.split("\n") if line.strip()]
        found = split_for(lines[:_SAMPLE_LINES])
        if found is None:
            return None
        table, odd = _table(lines, *found)
        if len(odd) > 0.15 * len(lines) or not table.rows:
            return None
        laid = lay(table, limit_tokens - 2, focus_of(hints), calibrated(text, count))
        left = f"{len(odd)} lines that are not rows" if odd else ""
        return Distillate(self.kind, laid.text, "; ".join(part for part in (laid.note, left) if part) or "nothing")


def _table(lines: Sequence[str], split: Split, width: int) -> tuple[Table, list[str]]:
    rows: list[tuple[str, ...]] = []
    odd: list[str] = []
    taken = lines if len(lines) <= MAX_ROWS else [*lines[: MAX_ROWS * 2 // 3], *lines[-MAX_ROWS // 3 :]]
    for line in taken:
        if _RULE.fullmatch(line[:300]):
            continue
        try:
            cells = split(line)
        except csv.Error:
            cells = []
        if len(cells) == width:
            rows.append(tuple(cell.strip() for cell in cells))
        else:
            odd.append(line)
    total = len(lines) - len(odd) - (len(taken) - len(rows) - len(odd))
    if len(rows) > 1 and _is_header(rows[0], rows[1:40]):
        return Table(rows[0], rows[1:], total - 1), odd
    return Table(("",) * width, rows, total), odd


def _is_header(first: Sequence[str], rest: Sequence[Sequence[str]]) -> bool:
    """True if the first row is all words and names no value of the columns below it."""
    if not all(cell and not is_number(cell) and len(cell) <= 60 for cell in first) or len(set(first)) != len(first):
        return False
    below = [{row[c] for row in rest} for c in range(len(first))]
    numeric = any(all(is_number(cell) for cell in cells if cell) for cells in below)
    upper = sum(cell.isupper() or cell.istitle() or "_" in cell for cell in first) * 2 > len(first)
    return not any(cell in below[c] for c, cell in enumerate(first)) and (numeric or upper or len(rest) > 3)

"""Tables: a header once, then rows; constant columns said once; when rows must go, all ids stay if they fit.

It does not know where the rows came from. Invariants: cells stay whole; the order of rows and columns is that of the
source; work is bounded by MAX_ROWS and MAX_COLUMNS.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvsteward.context.distill.meter import Meter
from kvsteward.context.distill.pack import Unit, choose, head_first, pack, uniform
from kvsteward.context.distill.salience import Focus, values_of

MAX_ROWS = 6_000
MAX_COLUMNS = 60
_IDS_SHARE = 0.62
_CELLS_SHARE = 0.66
_SUMMARY_SHARE = 0.14
_ID_NAME = re.compile(
    r"(?:^|[._ ])(?:id|uuid|key|name|code|number|no|sku|email|path|file|title|url|slug|symbol)$|_id$|Id$|ID$", re.I
)
_NUMERIC = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?%?")
_MAX_CELL_CHARS = 400
_DISTINCT_SHOWN = 14


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


@dataclass(frozen=True, slots=True)
class Laid:
    """A table as text, and what was left out ("" if nothing)."""

    text: str
    note: str


def clip(cell: str) -> str:
    """One line, bounded: head and tail of a cell that is very long."""
    cell = " ".join(cell.split())
    if len(cell) <= _MAX_CELL_CHARS:
        return cell
    return f"{cell[: _MAX_CELL_CHARS // 2]}…{cell[-_MAX_CELL_CHARS // 4 :]}"


def lay(table: Table, limit_tokens: float, focus: Focus, meter: Meter) -> Laid:
    """The table within the limit, by the first of: whole, ids of all rows with some rows in full, some rows."""
    if not table.rows:
        return Laid("(no rows)", "")
    constant, varying = _split_constant(table)
    head = _constant_line(table, constant, focus)
    costs = {c: _column_cost(table, c, meter) for c in varying}
    fixed = meter.tokens(head) + 12
    whole = fixed + sum(costs.values()) + sum(meter.tokens(table.label(c)) + 1 for c in varying)
    cut = table.total - len(table.rows)
    if whole <= limit_tokens:
        body = _grid(table, varying, range(len(table.rows)))
        return Laid(_join(_size(table, cut), head, body), f"{cut} of {table.total} rows" if cut else "")
    if fixed > limit_tokens * 0.3:
        head, fixed = "", 12.0
    return _reduced(table, varying, costs, head, limit_tokens - fixed, focus, meter)


def _size(table: Table, cut: int) -> str:
    return f"{table.total} rows" + (f" ({cut} not read)" if cut else "") + ":"


def _join(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _split_constant(table: Table) -> tuple[list[int], list[int]]:
    columns = range(len(table.columns))
    if len(table.rows) < 3:
        return [], list(columns)
    first = table.rows[0]
    constant = [c for c in columns if all(row[c] == first[c] for row in table.rows)]
    if len(constant) == len(table.columns):
        return constant[1:], constant[:1]
    held = set(constant)
    return constant, [c for c in columns if c not in held]


def _constant_line(table: Table, constant: Sequence[int], focus: Focus) -> str:
    row = table.rows[0]
    said = [c for c in constant if row[c] not in ("", "None", "null")]
    return "every row: " + ", ".join(f"{table.label(c)}={clip(row[c])}" for c in said) if said else ""


def _column_cost(table: Table, column: int, meter: Meter) -> float:
    rows = table.rows
    step = max(1, len(rows) // 300)
    sample = [clip(rows[i][column]) for i in range(0, len(rows), step)]
    return meter.tokens("|".join(sample)) * len(rows) / len(sample) + 0.3 * len(rows)


def _grid(table: Table, columns: Sequence[int], chosen: Sequence[int] | range) -> str:
    """Rows of these columns; a leading column of few runs becomes a group label; a single column one line."""
    if len(columns) == 1 and not table.headed:
        return _listing([clip(table.rows[r][columns[0]]) for r in chosen])
    if len(columns) == 1:
        return f"{table.label(columns[0])}: " + _listing([clip(table.rows[r][columns[0]]) for r in chosen])
    group = _group_column(table, columns, chosen)
    if group is None:
        lines = ["|".join(clip(table.rows[r][c]) for c in columns) for r in chosen]
        header = ["|".join(table.label(c) for c in columns)] if table.headed else []
        return "\n".join(header + lines)
    return _grouped(table, columns, chosen, group)


def _listing(cells: Sequence[str]) -> str:
    return ("; " if any("," in cell for cell in cells) else ", ").join(cells)


def _group_column(table: Table, columns: Sequence[int], chosen: Sequence[int] | range) -> int | None:
    best: tuple[int, int] | None = None
    for c in columns:
        runs, last = 0, None
        for r in chosen:
            if table.rows[r][c] != last:
                runs, last = runs + 1, table.rows[r][c]
        if runs * 3 <= len(chosen) and (best is None or runs < best[0]):
            best = (runs, c)
    return None if best is None else best[1]


def _grouped(table: Table, columns: Sequence[int], chosen: Sequence[int] | range, group: int) -> str:
    rest = [c for c in columns if c != group]
    lines = ["|".join([f"[{table.label(group)}]", *(table.label(c) for c in rest)])] if table.headed else []
    last: str | None = None
    run: list[str] = []
    for r in [*chosen, -1]:
        value = table.rows[r][group] if r >= 0 else None
        if value != last or r < 0:
            if last is not None:
                lines.append(f"[{clip(last)}] " + (_listing(run) if len(rest) == 1 else "\n" + "\n".join(run)))
            last, run = value, []
        run.append("|".join(clip(table.rows[r][c]) for c in rest))
    return "\n".join(lines)


def _reduced(
    table: Table, varying: list[int], costs: dict[int, float], head: str, limit: float, focus: Focus, meter: Meter
) -> Laid:
    ids = _id_columns(table, varying, costs, limit * _IDS_SHARE, focus)
    size = _size(table, table.total - len(table.rows))
    if not ids:
        return _some_rows(table, varying, costs, head, limit, focus, meter)
    body = _grid(table, ids, range(len(table.rows)))
    left = [c for c in varying if c not in ids]
    room = limit - meter.tokens(body)
    summary = _summary(table, left, min(room * 0.4, limit * _SUMMARY_SHARE), focus, meter)
    room -= meter.tokens(summary) + 6
    full = _full_rows(table, varying, ids, room, focus, meter)
    note = f"{len(left)} of {len(table.columns)} columns for most of {table.total} rows"
    return Laid(_join(size, head, body, summary, full), note)


def _id_columns(table: Table, varying: list[int], costs: dict[int, float], room: float, focus: Focus) -> list[int]:
    ranked = sorted(varying, key=lambda c: (-_column_worth(table, c, focus) / costs[c], c))
    kept: list[int] = []
    for c in ranked:
        price = costs[c]
        if price <= room and _column_worth(table, c, focus) > 0.2:
            kept.append(c)
            room -= price
    return sorted(kept)


def _column_worth(table: Table, column: int, focus: Focus) -> float:
    rows = table.rows
    step = max(1, len(rows) // 300)
    cells = [rows[i][column] for i in range(0, len(rows), step)]
    filled = [cell for cell in cells if cell not in ("", "None", "null", "0")]
    if not filled:
        return 0.05
    distinct = len(set(cells)) / len(cells)
    numeric = sum(1 for cell in filled if _NUMERIC.fullmatch(cell)) / len(filled)
    worth = 0.3 + 2.0 * distinct * (1.0 - 0.6 * numeric)
    label = table.columns[column]
    if label and _ID_NAME.search(label):
        worth += 2.0
    if label:
        worth += 1.5 * min(2.0, focus.weight(label))
    return worth


def _summary(table: Table, columns: Sequence[int], room: float, focus: Focus, meter: Meter) -> str:
    """One short line for each left-out column: its range, or its distinct values with counts."""
    lines: list[str] = []
    for c in sorted(columns, key=lambda c: -focus.weight(table.columns[c])):
        line = f"{table.label(c)}: {_summarised([row[c] for row in table.rows])}"
        price = meter.tokens(line) + 1
        if price > room:
            continue
        room -= price
        lines.append(line)
    return "\n".join(lines)


def _summarised(cells: Sequence[str]) -> str:
    counts = Counter(clip(cell)[:60] for cell in cells)
    if len(counts) > _DISTINCT_SHOWN or len(counts) * 2 > len(cells):
        numbers = [(_as_number(cell), cell) for cell in cells if _NUMERIC.fullmatch(cell)]
        if len(numbers) * 2 > len(cells):
            return f"min {min(numbers)[1]}, max {max(numbers)[1]}, mean {sum(n for n, _ in numbers) / len(numbers):.4g}"
    shown = ", ".join(f"{value}×{n}" if n > 1 else value for value, n in counts.most_common(_DISTINCT_SHOWN))
    more = len(counts) - _DISTINCT_SHOWN
    return f"{len(counts)} values: {shown}" + (f", … {more}" if more > 0 else "")


def _as_number(cell: str) -> float:
    return float(cell.replace(",", "").rstrip("%"))


def _outliers(table: Table, columns: Sequence[int]) -> dict[int, float]:
    """Rows that hold the least or the greatest number of a column."""
    found: dict[int, float] = {}
    for c in columns:
        numbers = [(_as_number(row[c]), r) for r, row in enumerate(table.rows) if _NUMERIC.fullmatch(row[c])]
        if len(numbers) * 2 > len(table.rows) and numbers:
            for r in (min(numbers)[1], max(numbers, key=lambda pair: pair[0])[1]):
                found[r] = found.get(r, 0.0) + 0.6
    return found


def _row_units(table: Table, columns: Sequence[int]) -> list[Unit]:
    extra = _outliers(table, columns)
    units = []
    for r, row in enumerate(table.rows):
        cells = [clip(row[c]) for c in columns]
        known = (*(cell for cell in cells if len(cell) >= 3), *(word for cell in cells for word in values_of(cell)))
        units.append(Unit("|".join(cells), min(2.0, extra.get(r, 0.0)), known))
    return units


def _full_rows(
    table: Table, varying: Sequence[int], ids: Sequence[int], room: float, focus: Focus, meter: Meter
) -> str:
    header = "|".join(table.label(c) for c in varying) if table.headed else ""
    room -= meter.tokens(header) + 6
    if room < 15:
        return ""
    packed = pack(_row_units(table, varying), room, focus, meter, "rows")
    if not packed.kept:
        return packed.text if packed.text.startswith("values:") else ""
    return _join("in full:", header, packed.text)


def _some_rows(
    table: Table, varying: list[int], costs: dict[int, float], head: str, limit: float, focus: Focus, meter: Meter
) -> Laid:
    """Not even one column fits for all rows: its cells that are worth most, the summary, and some rows in full."""
    best = max(varying, key=lambda c: (_column_worth(table, c, focus), -costs[c]))
    listed, shown = _some_cells(table, varying, best, limit * _CELLS_SHARE, focus, meter)
    left = [c for c in varying if c != best]
    room = limit - meter.tokens(listed)
    summary = _summary(table, left, min(room * 0.4, limit * _SUMMARY_SHARE), focus, meter)
    full = _full_rows(table, varying, [best], room - meter.tokens(summary) - 6, focus, meter) if left else ""
    return Laid(_join(head, listed, summary, full), f"{table.total - shown} of {table.total} rows")


def _some_cells(
    table: Table, varying: Sequence[int], column: int, limit: float, focus: Focus, meter: Meter
) -> tuple[str, int]:
    cells = [clip(row[column]) for row in table.rows]
    units = [Unit(cell, 0.3, (cell,)) for cell in cells]
    costs = [meter.tokens(cell) + 1.2 for cell in cells]
    group = _group_column(table, [c for c in varying if c != column], range(len(cells)))
    if uniform(units) and group is None:
        chosen = head_first(units, costs, limit, focus)
    else:
        if group is not None:
            costs = [cost + 0.6 for cost in costs]
        chosen, _ = choose(units, costs, limit, focus, 0.6)
    kept = sorted(chosen)
    if group is not None:
        return _grouped(table, [group, column], kept, group), len(kept)
    parts: list[str] = []
    for at, r in enumerate(kept):
        if r and (not at or kept[at - 1] != r - 1):
            parts.append("…")
        parts.append(cells[r])
    if kept and kept[-1] != len(cells) - 1:
        parts.append("…")
    label = f"{table.label(column)}: " if table.headed else ""
    return f"{table.total} rows, {len(kept)} named: {label}{_listing(parts)}", len(kept)

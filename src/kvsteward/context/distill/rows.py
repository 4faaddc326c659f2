"""Tables: a header once, then rows; constant columns said once; when rows must go, all ids stay if they fit.

It does not know where the rows came from. Invariants: cells stay whole (but for very long ones); the order of rows and
columns is that of the source; work is bounded by MAX_ROWS and MAX_COLUMNS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsteward.context.distill.columns import (
    EMPTY,
    Table,
    clip,
    cost,
    is_number,
    number,
    profile,
    runs_of,
    summary,
    worth,
)
from kvsteward.context.distill.meter import Meter
from kvsteward.context.distill.pack import Unit, choose, head_first, pack, uniform
from kvsteward.context.distill.salience import Focus, values_of

MAX_ROWS = 4_000
MAX_COLUMNS = 60
_IDS_SHARE = 0.7
_CELLS_SHARE = 0.75
_SUMMARY_SHARE = 0.2
_GROUP_ROWS = 3


@dataclass(frozen=True, slots=True)
class Laid:
    """A table as text, and what was left out ("" if nothing)."""

    text: str
    note: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """A table with what is known of its columns: which vary, what each costs for all rows, what it is worth."""

    table: Table
    varying: list[int]
    costs: dict[int, float]
    worths: dict[int, float]
    focus: Focus
    meter: Meter

    @property
    def every(self) -> range:
        return range(len(self.table.rows))


def lay(table: Table, limit_tokens: float, focus: Focus, meter: Meter) -> Laid:
    """The table within the limit, by the first of: whole, ids of all rows with some rows in full, some rows."""
    if not table.rows:
        return Laid("(no rows)", "")
    constant, varying = _split_constant(table)
    plan = _plan(table, varying, focus, meter)
    head = _constant_line(table, constant)
    cut = table.total - len(table.rows)
    size = f"{table.total} rows" + (f" ({cut} not read)" if cut else "") + ":"
    fixed = meter.tokens(head) + 8
    if fixed + sum(plan.costs.values()) + _header_cost(plan, varying) <= limit_tokens:
        body = _grid(plan, varying, plan.every)
        return Laid(_join(size, head, body), f"{cut} of {table.total} rows" if cut else "")
    if fixed > limit_tokens * 0.25:
        head, fixed = "", 8.0
    ids = _id_columns(plan, (limit_tokens - fixed) * _IDS_SHARE)
    if ids:
        return _ids_of_all(plan, ids, _join(size, head), limit_tokens - fixed)
    return _some_rows(plan, head, limit_tokens - fixed)


def _plan(table: Table, varying: list[int], focus: Focus, meter: Meter) -> _Plan:
    costs: dict[int, float] = {}
    worths: dict[int, float] = {}
    for c in varying:
        cells = table.cells(c)
        costs[c] = max(0.5, cost(cells, meter))
        runs = runs_of(cells)
        if runs * _GROUP_ROWS <= len(cells) and len(varying) > 1:
            costs[c] = max(0.5, costs[c] * runs / len(cells)) + runs
        worths[c] = worth(table.columns[c], profile(cells), focus)
    return _Plan(table, varying, costs, worths, focus, meter)


def _header_cost(plan: _Plan, columns: Sequence[int]) -> float:
    return plan.meter.tokens("|".join(plan.table.label(c) for c in columns)) if plan.table.headed else 0.0


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


def _constant_line(table: Table, constant: Sequence[int]) -> str:
    row = table.rows[0]
    said = [c for c in constant if row[c] not in EMPTY]
    return "every row: " + ", ".join(f"{table.label(c)}={clip(row[c])}" for c in said) if said else ""


def _grid(plan: _Plan, columns: Sequence[int], chosen: Sequence[int] | range) -> str:
    """Rows of these columns; a column of few runs becomes a group label; a single column is one line."""
    table = plan.table
    if len(columns) == 1:
        label = f"{table.label(columns[0])}: " if table.headed else ""
        return label + listing([clip(table.rows[r][columns[0]]) for r in chosen])
    group = _group_column(table, columns, chosen)
    if group is not None:
        return _grouped(table, columns, chosen, group)
    lines = ["|".join(clip(table.rows[r][c]) for c in columns) for r in chosen]
    return "\n".join(([_header(table, columns)] if table.headed else []) + lines)


def _header(table: Table, columns: Sequence[int]) -> str:
    return "|".join(table.label(c) for c in columns)


def listing(cells: Sequence[str]) -> str:
    """Cells in one line; a run of equal neighbours is said once with its count."""
    told: list[str] = []
    i = 0
    while i < len(cells):
        end = i + 1
        while end < len(cells) and cells[end] == cells[i]:
            end += 1
        told.append(cells[i] if end - i == 1 else f"{cells[i]}×{end - i}")
        i = end
    return ("; " if any("," in cell for cell in told) else ", ").join(told)


def _group_column(table: Table, columns: Sequence[int], chosen: Sequence[int] | range) -> int | None:
    found = [(runs_of([table.rows[r][c] for r in chosen]), c) for c in columns]
    best = min(found, default=(1, 0))
    return best[1] if len(found) > 1 and best[0] * _GROUP_ROWS <= len(chosen) else None


def _grouped(table: Table, columns: Sequence[int], chosen: Sequence[int] | range, group: int) -> str:
    rest = [c for c in columns if c != group]
    lines = [f"[{table.label(group)}] {_header(table, rest)}"] if table.headed else []
    last: str | None = None
    run: list[str] = []
    for r in [*chosen, -1]:
        value = table.rows[r][group] if r >= 0 else None
        if value != last or r < 0:
            if last is not None:
                lines.append(f"[{clip(last)}] " + (listing(run) if len(rest) == 1 else "\n" + "\n".join(run)))
            last, run = value, []
        run.append("|".join(clip(table.rows[r][c]) for c in rest))
    return "\n".join(lines)


def _id_columns(plan: _Plan, room: float) -> list[int]:
    """Columns to keep for all rows: the one that identifies best if it fits, then the best worth per token.

    A second column that tells all rows apart says little more than the first.
    """
    first = max(plan.varying, key=lambda c: (plan.worths[c], -plan.costs[c]))
    if plan.costs[first] > room:
        return []
    kept = [first]
    room -= plan.costs[first]
    ranked = sorted(plan.varying, key=lambda c: (-plan.worths[c] / plan.costs[c], c))
    for c in ranked:
        if c != first and plan.costs[c] <= room and plan.worths[c] > 0.25:
            kept.append(c)
            room -= plan.costs[c]
    return sorted(kept)


def _ids_of_all(plan: _Plan, ids: list[int], head: str, limit: float) -> Laid:
    body = _grid(plan, ids, plan.every)
    left = [c for c in plan.varying if c not in ids]
    room = limit - plan.meter.tokens(body)
    told = _summaries(plan, left, room * 0.5)
    known = {cell for c in ids for cell in plan.table.cells(c)}
    full = _full_rows(plan, known, room - plan.meter.tokens(told) - 6)
    note = f"{len(left)} of {len(plan.table.columns)} columns for most of {plan.table.total} rows"
    return Laid(_join(head, body, told, full), note)


def _summaries(plan: _Plan, columns: Sequence[int], room: float) -> str:
    """A line for each left-out column, those asked for and those worth most first; what one leaves the next may use."""
    lines: list[str] = []
    ranked = sorted(columns, key=lambda c: (-plan.worths[c], c))
    for at, c in enumerate(ranked):
        share = room / min(3, len(ranked) - at)
        line = summary(plan.table.label(c), plan.table.cells(c), share, plan.meter)
        price = plan.meter.tokens(line) + 1
        if line and price <= room:
            room -= price
            lines.append(line)
        if room < 12:
            break
    return "\n".join(lines)


def _outliers(plan: _Plan) -> dict[int, float]:
    """Rows that hold the least or the greatest number of a column."""
    found: dict[int, float] = {}
    for c in plan.varying:
        numbers = [(number(cell), r) for r, cell in enumerate(plan.table.cells(c)) if is_number(cell)]
        if len(numbers) * 2 > len(plan.table.rows):
            for r in (min(numbers)[1], max(numbers, key=lambda pair: pair[0])[1]):
                found[r] = min(1.5, found.get(r, 0.0) + 0.6)
    return found


def _full_rows(plan: _Plan, known: set[str], room: float) -> str:
    header = _header(plan.table, plan.varying) if plan.table.headed else ""
    room -= plan.meter.tokens(header) + 4
    if room < 15:
        return ""
    extra = _outliers(plan)
    units = []
    for r, row in enumerate(plan.table.rows):
        cells = [clip(row[c]) for c in plan.varying]
        words = (*(cell for cell in cells if len(cell) >= 3), *(word for cell in cells for word in values_of(cell)))
        units.append(Unit("|".join(cells), extra.get(r, 0.0), words))
    packed = pack(units, room, plan.focus, plan.meter, "rows", known=known)
    if not packed.kept:
        return packed.text[packed.text.index("values:") :] if "values:" in packed.text else ""
    return _join("in full:", header, packed.text)


def _some_rows(plan: _Plan, head: str, limit: float) -> Laid:
    """Not even one column fits for all rows: its cells that are worth most, the summary, and some rows in full."""
    best = max(plan.varying, key=lambda c: (plan.worths[c], -plan.costs[c]))
    alone = len(plan.varying) == 1
    listed, kept = _some_cells(plan, best, limit * (0.97 if alone else _CELLS_SHARE))
    note = f"{plan.table.total - len(kept)} of {plan.table.total} rows"
    if alone:
        return Laid(_join(head, listed), note)
    room = limit - plan.meter.tokens(listed)
    told = _summaries(plan, [c for c in plan.varying if c != best], min(room * 0.5, limit * _SUMMARY_SHARE))
    full = _full_rows(plan, kept, room - plan.meter.tokens(told) - 6)
    return Laid(_join(head, listed, told, full), note)


def _some_cells(plan: _Plan, column: int, limit: float) -> tuple[str, set[str]]:
    table = plan.table
    cells = [clip(cell) for cell in table.cells(column)]
    units = [Unit(cell, 0.3, (cell,)) for cell in cells]
    costs = [plan.meter.tokens(cell) + 1.2 for cell in cells]
    textual = [c for c in plan.varying if c != column and profile(table.cells(c)).numeric < 0.5]
    group = _group_column(table, [*textual, column], range(len(cells)))
    if group in (None, column) and uniform(units):
        chosen = head_first(units, costs, limit, plan.focus)
    else:
        chosen, _ = choose(units, costs, limit * 0.95, plan.focus, 0.6)
    kept = sorted(chosen)
    size = f"{table.total} rows, {len(kept)} named: "
    found = {cells[r] for r in kept}
    if group not in (None, column):
        group = _group_column(table, [int(group or 0), column], kept)
    if group not in (None, column):
        return size + "\n" + _grouped(table, [int(group or 0), column], kept, int(group or 0)), found
    label = f"{table.label(column)}: " if table.headed else ""
    return size + label + listing(_with_gaps(cells, kept)), found


def _with_gaps(cells: Sequence[str], kept: Sequence[int]) -> list[str]:
    parts: list[str] = []
    for at, r in enumerate(kept):
        if r and (not at or kept[at - 1] != r - 1):
            parts.append("…")
        parts.append(cells[r])
    if kept and kept[-1] != len(cells) - 1:
        parts.append("…")
    return parts

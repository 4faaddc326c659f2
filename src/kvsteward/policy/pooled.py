"""What several processes learned of return times, as one: rows of `Returns` in, rows of `Returns` out.

Each of them began with what all of them knew before, so their sums would count that again at every start. The mean does
not: of a class it has the same hazards as the sum (returns per idle second), with the weight of one process; and where
nobody has learned anything new it is what it was. A tilt is the mean by its squares, which say how much it was moved.

Pure. Invariant: one list comes out as it went in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def pooled(processes: Sequence[Sequence[Row]]) -> list[Row]:
    """`processes`: each one's `Returns.rows()`. A class that one of them does not know has no returns there; a trait
    that one does not know is left to the others."""
    if len(processes) < 2:
        return [row for rows in processes for row in rows]
    found: dict[tuple[str, ...], list[Row]] = {}
    for rows in processes:
        for row in rows:
            kind = "class" if "class" in row else "trait"
            found.setdefault((kind, *row[kind]), []).append(row)
    return [_class(alike, len(processes)) if name[0] == "class" else _trait(alike) for name, alike in found.items()]


def _class(alike: Sequence[Row], processes: int) -> Row:
    means = {name: [sum(column) / processes for column in _columns(alike, name)] for name in ("returns", "idle_s")}
    return {"class": alike[0]["class"], **means}


def _trait(alike: Sequence[Row]) -> Row:
    squares = [sum(column) for column in _columns(alike, "squares")]
    moved = [
        sum(tilt * square for tilt, square in zip(tilts, weights, strict=True)) / total
        for tilts, weights, total in zip(_columns(alike, "tilt"), _columns(alike, "squares"), squares, strict=True)
    ]
    return {"trait": alike[0]["trait"], "tilt": moved, "squares": [total / len(alike) for total in squares]}


def _columns(alike: Sequence[Row], name: str) -> list[tuple[float, ...]]:
    return list(zip(*(row[name] for row in alike), strict=True))

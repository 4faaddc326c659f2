"""One line of an account: a value, its unit, the formula with the numbers in it, and where the rule is from.

Knows nothing else. Invariant: no figure without a formula and a source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that can be checked by hand."""

    name: str
    value: float
    unit: str
    formula: str
    source: str

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "formula": self.formula,
            "source": self.source,
        }


def table(figures: Iterable[Figure]) -> list[tuple[str, str, str, str]]:
    """Rows of text for a table: name, value with unit, formula, source."""
    return [(f.name, f"{shown(f.value, f.unit)}", f.formula, f.source) for f in figures]


def shown(value: float, unit: str) -> str:
    """A value as people read it: bytes in GiB or MiB where they are many, the rest with separators."""
    if unit == "B" and abs(value) >= 2**30:
        return f"{value / 2**30:,.3f} GiB"
    if unit == "B" and abs(value) >= 2**20:
        return f"{value / 2**20:,.2f} MiB"
    number = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"
    return f"{number} {unit}"

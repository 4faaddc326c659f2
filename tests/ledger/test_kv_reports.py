"""The ledger against what engines printed: every row, by class, and the table of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import reports

NOT_REPRODUCED = frozenset({"vllm-54458-a"})
"""Rows that their source calls exact and whose model is not described well enough to compute them."""


@pytest.mark.parametrize("row", reports.rows(), ids=lambda row: str(row["id"]))
def test_row(row: reports.Row) -> None:
    outcome = reports.CHECKS[row["check"]](row)
    assert outcome.ok, f"{row['id']}: ours {outcome.ours}, printed {outcome.printed}"


@pytest.mark.parametrize("row", reports.rows(), ids=lambda row: str(row["id"]))
def test_rows_called_exact_are_exact_here(row: reports.Row) -> None:
    if row["verdict"].startswith("exact") and row["id"] not in NOT_REPRODUCED:
        assert reports.CHECKS[row["check"]](row).grade == "exact"


def test_table_by_class(capsys: pytest.CaptureFixture[str]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    others: list[str] = []
    for row, outcome in reports.outcomes():
        counts[row["arch_class"], outcome.grade if outcome.ok else "WRONG"] += 1
        if outcome.grade != "exact" or not outcome.ok:
            others.append(
                f"{row['id']:28} {outcome.grade:11} ours {outcome.ours:22} {outcome.printed:26} {outcome.why}"
            )
    grades = ("exact", "explained", "consistent", "listed", "WRONG")
    with capsys.disabled():
        print("\n" + f"{'class':34}" + "".join(f"{grade:>12}" for grade in grades))
        for name in sorted({name for name, _ in counts}):
            print(f"{name:34}" + "".join(f"{counts[name, grade]:12}" for grade in grades))
        print(f"{'all':34}" + "".join(f"{sum(n for (_, g), n in counts.items() if g == grade):12}" for grade in grades))
        print("\n".join(others))
    assert not any(grade == "WRONG" for _, grade in counts)
    assert sum(n for (_, grade), n in counts.items() if grade == "exact") >= 166

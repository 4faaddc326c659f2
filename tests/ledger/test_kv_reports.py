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
        grade = outcome.grade if outcome.ok else "WRONG"
        if grade == "exact" and row["model_inferred"]:
            grade = "inferred"
        counts[row["arch_class"] or "not recorded", grade] += 1
        if grade not in {"exact", "inferred"}:
            others.append(f"{row['id']:28} {grade:11} ours {outcome.ours:22} {outcome.printed:26} {outcome.why}")
    grades = ("exact", "inferred", "explained", "consistent", "listed", "WRONG")
    totals = {grade: sum(n for (_, found), n in counts.items() if found == grade) for grade in grades}
    with capsys.disabled():
        print("\n" + f"{'class':34}" + "".join(f"{grade:>12}" for grade in grades))
        for name in sorted({name for name, _ in counts}):
            print(f"{name:34}" + "".join(f"{counts[name, grade]:12}" for grade in grades))
        print(f"{'all':34}" + "".join(f"{totals[grade]:12}" for grade in grades))
        print("inferred: exact, but the source does not name the model; the fit found it")
        print("\n".join(others))
    assert totals["WRONG"] == 0
    assert totals["exact"] + totals["inferred"] >= 166


def test_a_wrong_cache_type_is_noticed() -> None:
    """The control: with the other KV dtype no row fits any more."""
    for row in reports.rows():
        if row["check"] != "vllm_pool" or row["verdict"].startswith("explained"):
            continue
        stated = str(row["settings"].get("kv_cache_dtype", "auto"))
        other = row | {"settings": row["settings"] | {"kv_cache_dtype": "bf16" if stated.startswith("fp8") else "fp8"}}
        assert not reports.vllm_pool(other).ok, row["id"]

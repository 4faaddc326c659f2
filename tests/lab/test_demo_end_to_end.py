"""The demonstration against the real embedded engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

TURNS, BUDGET_TOKENS = 14, 2_048


@pytest.mark.embedded
@pytest.mark.timeout(600)
def test_passed_through_it_breaks_and_managed_it_does_not(tmp_path: Path) -> None:
    chart = tmp_path / "chart.html"
    words = ["demo", "--turns", str(TURNS), "--ctx", str(BUDGET_TOKENS), "--json", "--html", str(chart)]
    done = subprocess.run(
        [sys.executable, "-m", "kvsteward", *words], capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    found = orjson.loads(lines[0])
    assert found["budget_tokens"] == BUDGET_TOKENS
    assert found["passthrough"]["completed_turns"] == 4  # the long result comes with turn 5
    assert "context size" in found["passthrough"]["error"]
    managed = found["managed"]
    assert (managed["completed_turns"], managed["interruptions"]) == (TURNS, 0)
    assert managed["compactions"] >= 1
    assert 0 < managed["max_resident_tokens"] <= BUDGET_TOKENS
    assert 0 < managed["cached_tokens"] < managed["prompt_tokens"]
    facts = found["facts"]
    assert facts["lost"] == 0
    assert facts["probed"] == facts["in_view"] + facts["recallable"] > 0
    assert chart.stat().st_size > 1_000_000

"""Ten thousand hostile messages and a few of 50 MB, in children with limited memory: no crash, no change of role.

What the children do is `fuzzed.py`. The seed is fixed, so that a fault is found again; another one is an argument away.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)  # half a minute on an idle machine

SCRIPT = Path(__file__).parent / "fuzzed.py"
SEED = 20261129


def child(messages: int, giants: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), str(messages), str(SEED), str(giants)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def reports() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Of the many small messages and of the few huge ones: two children at the same time."""
    children = (child(10_000, 0), child(1, 4))
    try:
        found = []
        for one in children:
            out, error = one.communicate(timeout=540)
            assert one.returncode == 0, f"the child died ({one.returncode}): {error[-2000:]}"
            found.append(json.loads(out))
        yield found[0], found[1]
    finally:
        for one in children:
            one.kill()
            one.communicate()


def test_ten_thousand_messages_and_no_fault(reports):
    small, _ = reports
    assert small["messages"] >= 10_000
    assert small["faults"] == []
    assert small["outcomes"]["prepared"] > 2_000, "most conversations must get through, or little was tried"
    assert small["outcomes"]["ProtocolError"] > 100
    assert small["peak_bytes"] < 256 << 20, "conversations of a few kilobytes"


def test_messages_of_fifty_megabytes(reports):
    _, giant = reports
    assert giant["faults"] == []
    assert giant["outcomes"]["giant"] == 4
    assert giant["peak_bytes"] < 2 << 30, "twenty times the text, in whatever form it is held on the way"

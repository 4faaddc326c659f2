"""Installing kvsteward beside vLLM moves none of vLLM's pins (marked `vllm`), and the script that says so can tell."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_pins.py"
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


def test_a_moved_version_is_told_from_an_addition():
    spec = importlib.util.spec_from_file_location("check_pins", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    before = {"torch": "2.13.0", "numpy": "2.3.5", "kvsteward": "0.0.9"}
    plan = {"valkey": "6.2.0", "numpy": "2.4.0", "torch": "2.13.0", "kvsteward": "0.1.0"}
    assert script.compare(before, plan) == ({"valkey": "6.2.0"}, {"numpy": ("2.3.5", "2.4.0")})
    assert script.normal("Typing_Extensions") == script.normal("typing.extensions") == "typing-extensions"


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_no_pin_of_vllm_moves():
    if not PYTHON.exists():
        pytest.skip("no vLLM environment; 'make setup-vllm' makes one")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(PYTHON), "valkey", "vllm"], capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no installed version moves" in done.stdout

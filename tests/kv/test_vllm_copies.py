"""Blocks of real tensors on their way to a slot and back, bit for bit, layer by layer (marked `vllm`; no server)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL = ROOT / ".venv-vllm" / "smollm2"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def report() -> Any:
    if not PYTHON.exists():
        pytest.skip("no vLLM environment; 'make setup-vllm' makes one")
    command = [str(PYTHON), str(ROOT / "tests" / "kv" / "copies_check.py"), str(MODEL)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_each_layer_comes_back_bit_for_bit_in_every_layout(report):
    assert len(report["wrong"]) == 4 * (len(report["layouts"]) + 4)
    assert {case: wrong for case, wrong in report["wrong"].items() if wrong} == {}


def test_shapes_say_what_a_part_is(report):
    assert report["part_bytes"] == 5 * 3 * 32 * 128 * 2
    assert report["shared_is_counted_once"]
    assert report["digests_differ"]
    assert all(report["refused"])


def test_only_full_attention_is_moved(report):
    assert report["kinds"] == {"full": "full attention", "windowed": "FullAttentionSpec", "mla": "full attention"}


def test_a_model_in_a_folder_is_known_by_its_weights(report):
    here, hub = report["weights"]
    assert len(here) == 32
    assert hub == ""


def test_engines_whose_blocks_cannot_be_moved_whole_are_refused(report):
    said = report["engines"]
    assert said.pop("right") == said.pop("ngram") == ""
    assert "2 groups" in said["two groups"]
    assert "one machine" in said["nodes"]
    assert "eagle" in said["draft"]
    assert all(said.values()), said


def test_vllms_hashes_keep_tenants_apart_from_the_first_block_on(report):
    plain, a, b, again = report["hashes"]
    assert [len(hashes) for hashes in report["hashes"]] == [2, 2, 2, 2]
    assert a == again
    assert all(len({x, y, z}) == 3 for x, y, z in zip(plain, a, b, strict=True))


def test_a_failed_load_is_computed_and_fails_no_request(report):
    assert report["policy"] == "recompute"

"""Our tier and cache policy under vLLM's own offloading managers, which need a GPU only for the copies (marked `vllm`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "blocks"))
from support import Server

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not PYTHON.exists():
        pytest.skip("no vLLM environment; 'make setup-vllm' makes one")
    server = Server(tmp_path_factory.mktemp("valkey"))
    script = ROOT / "tests" / "kv" / "offload_check.py"
    command = [str(PYTHON), str(script), server.url, str(server.process.pid)]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200, check=False)
    finally:
        server.kill()
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_chunks_of_one_replica_are_loaded_by_another_bit_for_bit(report):
    tiers = report["tiers"]
    assert tiers["stored"] == 4
    assert tiers["loaded"] == [1, 2, 3, 4]  # of five asked for, one of which nobody had
    assert tiers["lossless"] == [7, 8]
    assert tiers["values"] == [*["set"] * 2, *["string"] * 4, *["zset"] * 4]


def test_another_salt_or_model_finds_nothing(report):
    assert report["tiers"]["other_salt"] == report["tiers"]["other_model"] == []


def test_a_flipped_bit_is_a_miss_and_the_record_is_dropped(report):
    assert report["tiers"]["flipped"] == [1, 3]
    assert report["tiers"]["misses"] == {"checksum": 1}
    assert report["tiers"]["dropped"] == [0]


def test_a_session_that_ends_leaves_nothing_but_what_another_one_used(report):
    assert report["tiers"]["after_final"] == [1, 3, 4]  # sessions of other replicas loaded them
    assert report["tiers"]["after_all_final"] == []
    assert report["tiers"]["shared_stays"] == [30]
    assert report["tiers"]["not_kept"] == []


def test_options_that_cannot_be_honoured_are_refused(report):
    assert report["tiers"]["refused"] == ["ConfigError", "ConfigError", "ValueError", "TypeError", ""]
    assert report["tiers"]["bounded"] == 0


def test_a_killed_server_costs_blocks_and_nothing_else(report):
    dead = report["dead"]
    assert dead["loaded"] == []
    assert dead["stored"] == 2
    assert dead["here"] == [20, 23]
    assert dead["refused"] == 2
    assert dead["jobs"] == 0


def test_hints_decide_which_chunks_go(report):
    policy = report["policy"]
    assert policy["final_first"] == [4]
    assert policy["then"] == [3]
    assert policy["ttl_stays"] == [4, 3]
    assert policy["soft"] == [6, 5, 2, 1]  # what was asked to be kept goes too when there is nothing else
    assert policy["tail_first"] == [[3], [2]]


def test_chunks_of_several_sessions_are_an_owner_of_their_own(report):
    assert report["policy"]["owners"] == ["b", report["policy"]["shared"]]


def test_a_wrong_hint_is_counted_and_a_request_without_one_is_served(report):
    assert report["policy"]["refused"] == [[], 1]
    assert report["policy"]["anonymous"] is not None


def test_thousands_of_random_steps_keep_the_contract(report):
    """The script checks each step; here only that both ways were gone."""
    assert report["policy"]["random"]["evicted"] > 1000
    assert report["policy"]["random"]["none"] > 1

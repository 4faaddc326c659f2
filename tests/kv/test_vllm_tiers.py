"""Two real vLLMs on the CPU with tiers, and one Valkey (marked `vllm`; needs `make setup-vllm`).

A has a pool of 96 blocks, host memory for 100 and Valkey; B the same. Sessions leave and come back, move, end, are
aborted. In every step of both engines the books are checked. What goes wrong around them: test_vllm_faults.
"""

from __future__ import annotations

import time

import pytest
from vllm_world import check_random_sessions, whole

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_a_session_that_left_pool_and_host_memory_comes_back_the_same(world):
    world.a.turn("s", 420)
    in_pool = world.a.turn("s", 420)
    assert in_pool.cached_tokens == whole(in_pool.prompt_tokens)
    for other in "tuvwx":  # five times 870 tokens push it out of 3,072 and of 3,200
        world.a.turn(other, 420, {"ttl_s": 60})
    world.valkey.settle()
    back = world.a.turn("s", 420)
    assert back == in_pool
    tiers = world.a.figures()["tiers"]
    assert tiers["store"]["staged"]["valkey"] > 0
    assert tiers["moves"]["lost"] == 0


def test_a_session_goes_on_on_another_replica(world):
    world.b.turn("first", 200)
    world.a.turn("m", 1230)
    on_a = world.a.turn("m", 1230)
    assert on_a.prompt_tokens > 2400
    world.valkey.settle()
    on_b = world.b.turn("m", 1230)
    assert on_b == on_a
    assert on_b.cached_tokens == whole(on_a.prompt_tokens)


def test_another_tenant_gets_nothing_of_it(world):
    mine = world.b.turn("m", 300, cache_salt="one")
    assert mine.cached_tokens == 0
    assert world.a.turn("m", 300, cache_salt="two").cached_tokens == 0
    world.valkey.settle()
    assert world.a.turn("m", 300, cache_salt="one").cached_tokens == whole(mine.prompt_tokens)


def test_a_final_turn_leaves_nothing_in_any_tier(world):
    world.a.turn("f", 200)
    world.a.turn("f", 200, hint={"final": True})
    figures = world.a.figures()
    assert "f" not in figures["tiers"]["sessions"]
    with world.valkey.client() as client:
        deadline = time.monotonic() + 10
        while (left := list(client.scan_iter("*session:f"))) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert not left
    assert world.b.turn("f", 200).cached_tokens == 0


def test_random_sessions_leave_the_pool_as_it_was(world):
    check_random_sessions(world.a, 32)

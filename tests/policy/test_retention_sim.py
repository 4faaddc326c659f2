"""The benchmark's pool of runs against a pool that moves single blocks, as vLLM does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "retention_sim.py"
_spec = importlib.util.spec_from_file_location("retention_sim", PATH)
assert _spec and _spec.loader
sim = importlib.util.module_from_spec(_spec)
sys.modules["retention_sim"] = sim
_spec.loader.exec_module(sim)


@st.composite
def requests(draw):
    """A few sessions, each a random tree of requests, one request a second."""
    made: dict[str, list] = {}
    out = []
    for t in range(draw(st.integers(1, 25))):
        session = draw(st.sampled_from("abc"))
        mine = made.setdefault(session, [])
        parent = draw(st.integers(-1, len(mine) - 1))
        shared = draw(st.integers(0, mine[parent].blocks)) if parent >= 0 else 0
        blocks = draw(st.integers(max(shared, 1), shared + 6))
        request = sim.Request(float(t), session, len(mine), parent, shared, blocks, float(t), "tool_use", False)
        mine.append(request)
        out.append(request)
    return out


def paths(trace):
    """Block names of each request, as expand.py makes them."""
    made: dict[tuple[str, int], list] = {}
    for r in trace:
        head = made[r.session, r.parent][: r.shared] if r.parent >= 0 else []
        own = [(r.session, r.number, i) for i in range(r.blocks - r.shared)]
        made[r.session, r.number] = head + own
        yield head + own


def block_lru(trace, pool_blocks):
    """An LRU list of blocks; the tail of a request counts as used before its head."""
    lru: dict = {}
    reused = 0
    for path in paths(trace):
        hits = 0
        while hits < len(path) and path[hits] in lru:
            hits += 1
        reused += hits
        for block in reversed(path):
            lru.pop(block, None)
            lru[block] = None
        while len(lru) > pool_blocks:
            del lru[next(iter(lru))]
    return reused


@given(requests(), st.integers(1, 40))
def test_lru_of_runs_is_lru_of_blocks(trace, pool_blocks):
    assert sim.replay(trace, pool_blocks, sim.LRU()).reused == block_lru(trace, pool_blocks)


@given(requests(), st.integers(1, 40))
def test_no_policy_beats_an_endless_pool_and_all_reach_it(trace, pool_blocks):
    endless = block_lru(trace, 10_000)
    for make in (sim.LRU, sim.Learned, lambda: sim.Oracle(trace)):
        assert sim.replay(trace, pool_blocks, make()).reused <= endless
        assert sim.replay(trace, 10_000, make()).reused == endless


def test_oracle_on_a_cycle_that_lru_always_misses():
    """Three sessions of 4 blocks, round robin, a pool of 8: LRU reuses nothing, Belady keeps what fits beside the newest."""
    trace = [
        sim.Request(float(t), "abc"[t % 3], t // 3, t // 3 - 1, 4 * (t >= 3), 4, float(t), "tool_use", False)
        for t in range(30)
    ]
    assert sim.replay(trace, 8, sim.LRU()).reused == 0
    assert sim.replay(trace, 8, sim.Oracle(trace)).reused > 0.5 * 27 * 4

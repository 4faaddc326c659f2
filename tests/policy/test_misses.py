"""How misses are learned from what engines report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsteward.policy.misses import Misses


def test_an_engine_that_never_reports_teaches_nothing():
    misses = Misses()
    for _ in range(100):
        misses.observe(4_000, 0)
    assert misses.ratio == 0.0


def test_a_cache_that_holds_is_no_miss_though_its_last_block_is_lost():
    misses = Misses()
    for _ in range(100):
        misses.observe(4_000, 3_968)
    assert misses.ratio == 0.0


def test_the_ratio_follows_what_is_seen():
    misses = Misses()
    for turn in range(600):
        misses.observe(10_000, 0 if turn % 4 == 0 else 10_000)
    assert 0.18 < misses.ratio < 0.32
    for _ in range(200):
        misses.observe(10_000, 10_000)
    assert misses.ratio < 0.001


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6))))
def test_it_is_a_ratio(turns):
    misses = Misses()
    for expected, cached in turns:
        misses.observe(expected, cached)
    assert 0.0 <= misses.ratio <= 1.0

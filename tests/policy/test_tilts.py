"""Traits tilt hazards: learned ratios against known ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.policy.returns import BINS, EDGES_S, bin_of, spent_s
from kvsteward.policy.tilts import MAX_TILT, Tilts

BASE = [0.1] * BINS


def learn(tilts: Tilts, trait: str, gap_s: float) -> None:
    tilts.learn(BASE, [(trait,)], spent_s(0.0, gap_s), bin_of(gap_s))


def test_what_was_never_seen_changes_nothing():
    assert Tilts(BINS).hazards(BASE, [("new",)]) == tuple(BASE)


def test_two_kinds_in_one_class_are_told_apart():
    """The class as a whole returns at 0.1 a second; `quick` at 0.4 and `slow` at 0.025 of it."""
    rng, tilts = random.Random(1), Tilts(BINS)
    for _ in range(4000):
        learn(tilts, "quick", rng.expovariate(0.4))
        learn(tilts, "slow", rng.expovariate(0.025))
    at = bin_of(2.0)
    assert tilts.hazards(BASE, [("quick",)])[at] == pytest.approx(0.4, rel=0.3)
    assert tilts.hazards(BASE, [("slow",)])[at] == pytest.approx(0.025, rel=0.4)


def test_a_pause_that_goes_on_counts_as_much_as_it_lasts():
    parts, whole = Tilts(BINS), Tilts(BINS)
    for _ in range(50):
        parts.learn(BASE, [("t",)], spent_s(0.0, 40.0), None)
        whole.learn(BASE, [("t",)], spent_s(0.0, 40.0), bin_of(40.0))
    assert parts.hazards(BASE, [("t",)])[bin_of(40.0)] < whole.hazards(BASE, [("t",)])[bin_of(40.0)]
    assert parts.hazards(BASE, [("t",)])[bin_of(10.0)] < BASE[0]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.floats(0, 1e6), st.floats(0, 1e6), st.booleans(), st.floats(1e-7, 10)),
        max_size=60,
    )
)
def test_tilts_and_traits_are_bounded_whatever_comes(pauses):
    tilts = Tilts(BINS, max_traits=4)
    for trait, a, b, back, base in pauses:
        age_s = max(a, b)
        spent = spent_s(min(a, b), age_s)
        tilts.learn([base] * BINS, [(str(trait),), ("all",)], spent, bin_of(age_s) if back else None)
        assert len(tilts) <= 4
        for hazard in tilts.hazards([base] * BINS, [(str(trait),), ("all",)]):
            assert base * 2.7 ** -(2 * MAX_TILT + 1) < hazard < base * 2.8 ** (2 * MAX_TILT + 1)


@given(st.floats(0, 1e5), st.floats(0, 1e5))
def test_seconds_by_bin_add_up(a, b):
    spent = spent_s(min(a, b), max(a, b))
    assert sum(spent) == pytest.approx(abs(a - b), abs=1e-6)
    assert all(0 <= s <= EDGES_S[i + 1] - EDGES_S[i] + 1e-6 for i, s in enumerate(spent) if i < BINS - 1)

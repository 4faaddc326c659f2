"""Reciprocal rank fusion: the paper's sum, and what must hold for any rankings."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.context.fusion import K, fused

RANKINGS = st.lists(st.lists(st.integers(0, 20), unique=True, max_size=12), max_size=4)


def test_the_papers_constant():
    assert K == 60


@pytest.mark.parametrize(
    ("rankings", "order"),
    [
        ([], []),
        ([[], []], []),
        ([["a", "b", "c"]], ["a", "b", "c"]),
        # a: 1/61 + 1/63 = 0.03227; b: 1/62 + 1/61 = 0.03252; c: 1/63 + 1/62 = 0.03200
        ([["a", "b", "c"], ["b", "c", "a"]], ["b", "a", "c"]),
        # In both and low beats in one and first: 1/80 + 1/80 = 0.025 > 1/61 = 0.0164
        ([["x", *range(18), "low"], ["y", *range(100, 118), "low"]], ["low", "x", "y"]),
        # Worth the same: the earlier ranking first, then the better place.
        ([["a", "b"], ["c", "d"]], ["a", "c", "b", "d"]),
        ([["a", "b"], ["b", "a"]], ["a", "b"]),
        # A thing that is named twice counts once, at its first place.
        ([["a", "b", "a"], ["b"]], ["b", "a"]),
    ],
)
def test_exact_orders(rankings, order):
    assert fused(rankings)[: len(order)] == order


def test_k_decides_between_one_first_place_and_two_low_ones():
    rankings = [["first", "m", "both"], ["n", "o", "both"]]
    assert fused(rankings, k=0)[0] == "first"  # 1/1 against 1/3 + 1/3
    assert fused(rankings, k=60)[0] == "both"  # 1/61 against 1/63 + 1/63


@given(RANKINGS)
def test_everything_once_in_the_order_of_the_exact_sums(rankings):
    found = fused(rankings)
    assert sorted(found) == sorted({thing for ranking in rankings for thing in ranking})
    worth = [sum(Fraction(1, K + r.index(x) + 1) for r in rankings if x in r) for x in found]
    assert all(one >= other for one, other in pairwise(worth))


@given(st.lists(st.integers(), unique=True, max_size=30), st.integers(1, 3))
def test_rankings_that_agree_change_nothing(ranking, times):
    assert fused([ranking] * times) == ranking


@given(RANKINGS, st.data())
def test_a_better_place_never_makes_it_worse(rankings, data):
    ranking = data.draw(st.sampled_from(rankings)) if rankings else []
    if len(ranking) < 2:
        return
    thing = data.draw(st.sampled_from(ranking[1:]))
    at = ranking.index(thing)
    raised = [*ranking]
    raised[at - 1], raised[at] = raised[at], raised[at - 1]
    before = fused(rankings).index(thing)
    assert fused([raised if r is ranking else r for r in rankings]).index(thing) <= before

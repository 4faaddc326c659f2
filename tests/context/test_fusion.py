"""Several rankings as one: exact orders, and what must hold for any rankings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.context.fusion import fused

RANKINGS = st.lists(st.lists(st.integers(0, 20), unique=True, max_size=12), max_size=4)


@pytest.mark.parametrize(
    ("rankings", "order"),
    [
        ([], []),
        ([[], []], []),
        ([["a", "b", "c"]], ["a", "b", "c"]),
        ([["a", "b", "c"], ["b", "c", "a"]], ["a", "b", "c"]),
        ([["a", "b"], ["c", "d"]], ["a", "c", "b", "d"]),
        ([[], ["c", "d"]], ["c", "d"]),
        ([["a", "b", "c"], ["x"]], ["a", "x", "b", "c"]),
        ([["a", "b", "a"], ["b"]], ["a", "b"]),
        ([[None, "a"], ["a"]], [None, "a"]),
    ],
)
def test_exact_orders(rankings, order):
    assert fused(rankings) == order


@given(RANKINGS)
def test_everything_once_and_no_lower_than_its_best_place_allows(rankings):
    found = fused(rankings)
    assert sorted(found) == sorted({thing for ranking in rankings for thing in ranking})
    for ranking in rankings:
        for place, thing in enumerate(ranking, 1):
            assert found.index(thing) < place * len(rankings)


@given(RANKINGS)
def test_the_first_ranking_keeps_its_order_and_its_first_place(rankings):
    first = rankings[0] if rankings else []
    assert fused(rankings)[:1] == first[:1] or not first


@given(st.lists(st.integers(), unique=True, max_size=30), st.integers(1, 3))
def test_rankings_that_agree_change_nothing(ranking, times):
    assert fused([ranking] * times) == ranking

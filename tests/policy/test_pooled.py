"""What several processes learned, as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.policy.pooled import pooled

COUNTS = st.lists(st.floats(0, 1e6), min_size=3, max_size=3)
CLASSES = st.builds(
    lambda name, returns, idle_s: {"class": [name], "returns": returns, "idle_s": idle_s}, st.just("a"), COUNTS, COUNTS
)
TRAITS = st.builds(
    lambda tilt, squares: {"trait": ["t"], "tilt": tilt, "squares": squares},
    st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    st.lists(st.floats(1, 1e4), min_size=3, max_size=3),
)


@given(st.tuples(CLASSES, TRAITS), st.integers(1, 5))
def test_what_all_know_is_what_it_was(rows, processes):
    found = pooled([list(rows)] * processes)
    assert [row.keys() for row in found] == [row.keys() for row in rows]
    for row, was in zip(found, rows, strict=True):
        for name in row.keys() - {"class", "trait"}:
            assert row[name] == pytest.approx(was[name])


@given(st.lists(CLASSES, min_size=1, max_size=5))
def test_a_class_has_the_hazards_of_all_and_the_weight_of_one(rows):
    (found,) = pooled([[row] for row in rows])
    for name in ("returns", "idle_s"):
        sums = [sum(column) for column in zip(*(row[name] for row in rows), strict=True)]
        assert [n * len(rows) for n in found[name]] == pytest.approx(sums)


def test_a_class_that_some_do_not_know_weighs_less_and_a_trait_does_not():
    known = [{"class": ["a"], "returns": [4.0], "idle_s": [8.0]}, {"trait": ["t"], "tilt": [1.0], "squares": [9.0]}]
    assert pooled([known, []]) == [
        {"class": ["a"], "returns": [2.0], "idle_s": [4.0]},
        {"trait": ["t"], "tilt": [1.0], "squares": [9.0]},
    ]


def test_a_tilt_that_was_moved_more_counts_more():
    rows = [{"trait": ["t"], "tilt": [2.0], "squares": [30.0]}, {"trait": ["t"], "tilt": [-2.0], "squares": [10.0]}]
    assert pooled([[row] for row in rows]) == [{"trait": ["t"], "tilt": [1.0], "squares": [20.0]}]


def test_nobody_and_one_alone():
    rows = [{"class": [], "returns": [1.0], "idle_s": [2.0]}]
    assert pooled([]) == []
    assert pooled([rows]) == rows

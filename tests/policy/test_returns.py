"""What is learned of return times, against laws that are known."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsteward.policy.returns import BINS, EDGES_S, Returns, Size, Table, bin_of, gittins, spent_s


@given(st.floats(0, 1e6))
def test_an_age_lies_in_its_bin(age_s):
    b = bin_of(age_s)
    assert 0 <= b < BINS
    assert EDGES_S[b] <= age_s * (1 + 1e-12)
    assert b == BINS - 1 or age_s <= EDGES_S[b + 1]


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)), max_size=20))
def test_idle_seconds_are_all_counted(spans):
    table = Table(None)
    for a, b in spans:
        table.idle(spent_s(min(a, b), max(a, b)))
    assert sum(table.idle_s) == pytest.approx(sum(abs(a - b) for a, b in spans), abs=1e-6)


def test_index_of_a_constant_hazard_is_the_hazard():
    """A memoryless pause: waiting tells nothing, the index is the rate at every age."""
    assert gittins([0.2] * BINS) == pytest.approx([0.2] * BINS)


def test_index_looks_ahead_to_a_better_hazard_and_never_back():
    rising = gittins([0.01] * 6 + [1.0] * (BINS - 6))
    falling = gittins([1.0] * 6 + [0.01] * (BINS - 6))
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(rising))
    assert 0.01 < rising[0] < 1.0
    assert falling[:6] == pytest.approx([1.0] * 6)
    assert falling[6:] == pytest.approx([0.01] * (BINS - 6))


@given(st.lists(st.floats(1e-6, 10), min_size=BINS, max_size=BINS))
def test_index_is_at_least_the_hazard_and_at_most_the_best_later_one(hazards):
    for b, index in enumerate(gittins(hazards)):
        assert hazards[b] * (1 - 1e-9) <= index <= max(hazards[b:]) * (1 + 1e-9)


def live(returns: Returns, tool: str, pauses: list[float], start_s: float = 0.0) -> float:
    """One session that calls a tool and comes back after each of the pauses."""
    now_s = start_s
    for pause_s in pauses:
        returns.started(tool, now_s)
        returns.paused(tool, now_s + 1, "tool_calls", [tool])
        now_s += 1 + pause_s
    returns.started(tool, now_s)
    return now_s


def test_a_slow_tool_is_told_from_a_fast_one_by_its_name():
    returns = Returns()
    now_s = live(returns, "read_file", [3.0] * 200)
    now_s = live(returns, "run_tests", [300.0] * 200, now_s)
    for session, tools in (("a", ["read_file"]), ("b", ["run_tests"]), ("c", ["read_file", "run_tests"])):
        returns.started(session, now_s)
        returns.paused(session, now_s, "tool_calls", tools)
    fast, slow, both = (returns.rate(session, now_s + 1) for session in "abc")
    assert fast > 10 * slow
    assert both == slow
    assert returns.rate("b", now_s + 299) > returns.rate("a", now_s + 299)


def test_the_length_of_an_answer_is_learned_where_the_stop_says_nothing_and_news_do_not_hide_it():
    """Long answers wait for a person (300 s), short ones for a tool (3 s); the engine calls both "stopped"."""
    returns, now_s = Returns(), 0.0
    for turn in range(400):
        long = turn % 2 == 0
        returns.started(f"s{turn % 7}", now_s)
        returns.paused(f"s{turn % 7}", now_s + 1, "stopped", size=Size(1000, 900 if long else 30))
        now_s += 1
        returns.started(f"s{turn % 7}", now_s + (300 if long else 3))
        now_s += 300 if long else 3
    for session, output in (("long", 900), ("short", 30)):
        returns.started(session, now_s)
        returns.paused(session, now_s, "stopped", size=Size(1000, output))
    assert returns.rate("short", now_s) > 2 * returns.rate("long", now_s)
    told = returns.rate("long", now_s)
    returns.paused("long", now_s, "stopped")
    assert returns.rate("long", now_s) == told


def test_sessions_that_never_come_back_lower_the_rate():
    returns, stays = Returns(), Returns()
    for i in range(100):
        for learner, gone in ((returns, i % 2), (stays, 0)):
            learner.started(f"s{i}", 1000.0 * i)
            learner.paused(f"s{i}", 1000.0 * i, "end_turn")
            if not gone:
                learner.started(f"s{i}", 1000.0 * i + 5)
    for learner in (returns, stays):
        learner.started("new", 200_000.0)
        learner.paused("new", 200_000.0, "end_turn")
    assert returns.rate("new", 200_060.0) < stays.rate("new", 200_060.0)


def test_learned_rate_of_a_memoryless_pause_is_near_the_truth():
    rng = random.Random(1)
    returns = Returns()
    now_s = live(returns, "poll", [rng.expovariate(0.05) for _ in range(2000)])
    returns.paused("poll", now_s, "tool_calls", ["poll"])
    assert returns.rate("poll", now_s + 5) == pytest.approx(0.05, rel=0.35)


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "pause", "end"]), st.integers(0, 30), st.integers(0, 30), st.floats(0, 99)),
        max_size=120,
    )
)
def test_any_order_of_calls_is_bounded_and_answered(calls):
    returns = Returns(max_sessions=8, max_classes=16)
    now_s = 0.0
    for what, session, tool, step_s in calls:
        now_s += step_s
        if what == "start":
            returns.started(str(session), now_s)
        elif what == "pause":
            returns.paused(str(session), now_s, "tool_calls", [str(tool)])
        else:
            returns.ended(str(session))
        rate = returns.rate(str(session), now_s)
        assert rate > 0
        assert math.isfinite(rate)
        assert len(returns._tables) <= 16
        assert len(returns._habits) <= 9


def taught(pauses: dict[str, list[float]]) -> Returns:
    returns = Returns()
    for tool, gaps in pauses.items():
        live(returns, tool, gaps)
    return returns


def handed_on(returns: Returns) -> Returns:
    fresh = Returns()
    fresh.take(json.loads(json.dumps(returns.rows())))
    return fresh


def asked(returns: Returns, tool: str) -> list[float]:
    """The rates of a new session that waits for a tool, at many ages."""
    returns.started("new", 0.0)
    returns.paused("new", 1.0, "tool_calls", [tool])
    return [returns.rate("new", 1.0 + age_s) for age_s in EDGES_S]


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from(["cat", "pytest", "ask"]), st.lists(st.floats(0.01, 1e4), max_size=30)))
def test_what_was_learned_can_be_handed_on(pauses):
    """The next process answers for an unknown session as this one does."""
    returns = taught(pauses)
    fresh = handed_on(returns)
    for table in returns._tables.values():  # hazards are renewed every few returns; here they must be of now
        table.computed_at, table._hazards = (-1, -1), ()
    for tool in ("cat", "pytest", "never seen"):
        assert asked(handed_on(fresh), tool) == pytest.approx(asked(handed_on(returns), tool))
    assert fresh.rows() == returns.rows()


def test_what_is_handed_on_weighs_no_more_than_a_thousand_returns():
    returns = taught({"cat": [1.0] * 3000})
    fresh = handed_on(returns)
    sums = [sum(row["returns"]) for row in fresh.rows() if "class" in row]
    assert max(sums) == pytest.approx(1000.0)
    before, after = (asked(r, "cat")[3] for r in (returns, fresh))
    assert after == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"class": "cat", "returns": [0.0] * BINS, "idle_s": [0.0] * BINS},
        {"class": ["x" * 2000], "returns": [0.0] * BINS, "idle_s": [0.0] * BINS},
        {"class": [], "returns": [0.0] * (BINS - 1), "idle_s": [0.0] * BINS},
        {"class": [], "returns": [math.nan] * BINS, "idle_s": [0.0] * BINS},
        {"class": [], "returns": [-1.0] * BINS, "idle_s": [0.0] * BINS},
        {"class": [], "returns": [True] * BINS, "idle_s": [0.0] * BINS},
        {"trait": ["out", "3"], "tilt": [9.0] * BINS, "squares": [1.0] * BINS},
        {"trait": ["out", "3"], "tilt": [0.0] * BINS, "squares": [0.0] * BINS},
        {"trait": [1], "tilt": [0.0] * BINS, "squares": [1.0] * BINS},
    ],
)
def test_a_row_that_is_none_is_refused(row):
    with pytest.raises(ValueError, match=r"needed|list|texts|finite|0 or more|within"):
        Returns().take([row])


def test_no_more_classes_are_taken_than_there_is_room_for():
    rows = taught({f"tool {n}": [1.0] for n in range(50)}).rows()
    fresh = Returns(max_classes=20)
    fresh.take(rows)
    assert len(fresh._tables) == 20

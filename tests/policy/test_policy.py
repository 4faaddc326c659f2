"""Decisions and their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvsteward.policy.admission import Admit, Demand, Limits, Pool, Refuse, Wait, decide
from kvsteward.policy.queueing import order
from kvsteward.policy.residency import Residency

LIMITS = Limits(max_waiting=4, max_wait_s=10)


def test_fits():
    assert decide(Demand(60, 30), Pool(100, 10), LIMITS) == Admit("fits", 90)


def test_waits_for_what_is_short():
    decision = decide(Demand(60, 40), Pool(120, 50), LIMITS)
    assert isinstance(decision, Wait)
    assert decision.short_tokens == 30
    assert "100" in decision.reason


def test_waits_for_a_slot():
    assert isinstance(decide(Demand(1, 1), Pool(None, running=4, max_running=4), LIMITS), Wait)


def test_never_fits():
    decision = decide(Demand(90, 20), Pool(100), LIMITS)
    assert isinstance(decision, Refuse)
    assert decision.never


def test_full_queue_and_long_wait_are_refused_with_a_time():
    for demand, waiting in ((Demand(60, 40), 4), (Demand(60, 40, waited_s=10), 0)):
        decision = decide(demand, Pool(100, 50, waiting=waiting), LIMITS)
        assert isinstance(decision, Refuse)
        assert not decision.never
        assert decision.retry_after_s > 0


@given(
    prompt=st.integers(0, 10_000),
    output=st.integers(0, 10_000),
    capacity=st.none() | st.integers(0, 30_000),
    reserved=st.integers(0, 30_000),
    running=st.integers(0, 9),
)
def test_an_admitted_turn_fits_and_a_fitting_one_is_not_refused(prompt, output, capacity, reserved, running):
    pool = Pool(capacity, reserved, running, max_running=8)
    decision = decide(Demand(prompt, output), pool, LIMITS)
    if isinstance(decision, Admit):
        assert capacity is None or reserved + prompt + output <= capacity
        assert running < 8
    if isinstance(decision, Refuse):
        assert capacity is not None
        assert prompt + output > capacity


@dataclass
class Waiter:
    name: str
    returning: bool
    since: float


def test_returning_sessions_go_first_until_somebody_has_waited_long():
    queue = [Waiter("new", False, 100.0), Waiter("back", True, 101.0), Waiter("old new", False, 80.0)]
    assert [w.name for w in order(queue, now=102.0)] == ["old new", "back", "new"]


@given(steps=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60)), max_size=60))
def test_residency_never_passes_the_pool(steps):
    ledger = Residency(100)
    for name, tokens in steps:
        evicted = ledger.touch(name, tokens)
        assert name not in evicted
        assert ledger.total_tokens == sum(ledger.sessions().values()) <= 100
        assert ledger.of(name) == tokens
    for name in list(ledger.sessions()):
        ledger.release(name)
    assert ledger.total_tokens == 0


def test_residency_forgets_the_longest_unused():
    ledger = Residency(100)
    ledger.touch("a", 40)
    ledger.touch("b", 40)
    ledger.touch("a", 41)
    assert ledger.touch("c", 50) == ["b"]

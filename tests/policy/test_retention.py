"""Which idle KV goes first."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvsteward.policy.retention import Hint, State, Tier, loss_s_per_token, order, take


@dataclass
class Rates:
    by: dict[str, float] = field(default_factory=dict)

    def rate(self, session: str, now_s: float) -> float:
        return self.by.get(session, 1.0)


def names(*states: State, now_s: float = 100.0, **rates: float) -> str:
    return "".join(give.name for give in order(states, Rates(rates), now_s))


def state(name: str, since_s: float = 0.0, **fields) -> State:
    return State(name, name, 10, since_s, **fields)


def test_the_least_likely_to_be_back_goes_first_and_equals_go_by_age():
    assert names(state("a", 3), state("b", 2), state("c", 1), b=0.1) == "bca"


def test_superseded_and_final_go_before_all_others():
    assert names(state("a", 1), state("b", 5, superseded=True), state("c", 9, hint=Hint(final=True)), a=0.001) == "bca"


def test_a_ttl_wins_over_what_was_learned_while_it_runs_and_loses_after():
    kept, other = state("k", 95, hint=Hint(ttl_s=10)), state("o")
    assert names(kept, other, k=0.001, o=9.0) == "ok"
    assert names(kept, other, k=9.0, o=0.001, now_s=105) == "ko"
    assert names(state("n", 100, hint=Hint(ttl_s=0)), other, n=9.0) == "no"


def test_final_wins_over_ttl():
    (give,) = order([state("a", 99, hint=Hint(ttl_s=100, final=True))], Rates(), 100)
    assert (give.tier, give.reason) == (Tier.OVER, "final")


def test_what_a_queued_turn_will_use_is_kept_unless_it_is_over():
    assert names(state("w", awaited=True), state("o", 50), w=0.001, o=9.0) == "ow"
    assert names(state("w", awaited=True, superseded=True), state("o", 50)) == "wo"
    asked = Hint(ttl_s=1000)
    assert names(state("w", awaited=True, hint=asked), state("o", 50, hint=asked), w=0.001, o=9.0) == "ow"


def test_class_and_cost_weigh():
    batch, interactive = state("b", hint=Hint(priority="batch")), state("i", hint=Hint(priority="interactive"))
    assert names(interactive, batch) == "bi"
    copied = state("c", loss_s_per_token=loss_s_per_token(1e-3, 1e-4))
    alone = state("a", loss_s_per_token=loss_s_per_token(1e-3))
    assert names(alone, copied) == "ca"
    assert loss_s_per_token(1e-4, 1e-3) == 1e-4


STATES = st.lists(
    st.builds(
        State,
        name=st.uuids().map(str),
        session=st.sampled_from("abcd"),
        tokens=st.integers(1, 100),
        since_s=st.floats(0, 100),
        superseded=st.booleans(),
        hint=st.builds(Hint, ttl_s=st.none() | st.floats(0, 200), final=st.booleans()),
    ),
    max_size=20,
)


@given(STATES, st.integers(0, 3000))
def test_each_state_once_and_exactly_what_is_needed(states, needed):
    ordered = order(states, Rates({"a": 0.5}), 100)
    assert sorted(g.name for g in ordered) == sorted(s.name for s in states)
    assert [g.tier for g in ordered] == sorted(g.tier for g in ordered)
    assert sum(g.tokens for g in take(ordered, needed)) == min(needed, sum(s.tokens for s in states))
    assert all(g.tokens > 0 for g in take(ordered, needed))


@given(STATES)
def test_without_differences_it_is_lru(states):
    plain = [State(s.name, s.session, s.tokens, s.since_s) for s in states]
    assert [g.name for g in order(plain, Rates(), 100)] == [s.name for s in sorted(plain, key=lambda s: s.since_s)]

"""Which engine a turn goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsteward.policy.routing import Go, Nowhere, Place, Stay, route

A, B = Place("a", 1000, 600, 2), Place("b", 1000, 100, 2)


def test_a_new_session_goes_where_most_is_free():
    assert route(None, [A, B]) == Go("b", "a new session: 900 tokens free, 2 turns", 900, 2)
    assert route(None, [Place("small", 500), A]).name == "small"


def test_nearly_equal_budgets_are_shared_out_by_turns():
    places = [Place("a", 64_000, 0, turns=3), Place("b", 64_000, 900, turns=1), Place("c", 64_000, 2000)]
    assert route(None, places).name == "b"


def test_a_session_stays_although_more_is_free_elsewhere():
    assert route("a", [A, B]) == Stay("a", "its session is here")


def test_a_session_goes_on_elsewhere_for_a_reason():
    down, drained, other = Place("a", up=False), Place("a", draining=True), Place("a", serves=False)
    for own, reason in ((down, "does not answer"), (drained, "is being drained"), (other, "has not the model")):
        choice = route("a", [own, B])
        assert isinstance(choice, Go)
        assert (choice.name, choice.free_tokens) == ("b", 900)
        assert reason in choice.reason
    assert "a is no engine of this gateway any more" in route("a", [B]).reason
    assert route("a", [A, B], avoid={"a"}).name == "b"


def test_without_the_figures_of_all_engines_turns_count():
    assert route(None, [Place("a", 9000, 0, turns=2), Place("b", None, 0, turns=1)]).name == "b"


def test_the_only_ones_left_are_asked_although_they_are_down():
    down = [Place("a", up=False), Place("b", up=False)]
    assert route("b", down) == Stay("b", "no engine is up")
    assert route("b", down, avoid={"b"}).name == "a"


def test_a_draining_engine_gets_no_turn_even_if_it_is_the_only_one():
    choice = route("a", [Place("a", draining=True), Place("b", up=False, serves=False)])
    assert choice == Nowhere("none of 2 engines can take the turn: 1 drained, 1 down, 1 without the model")


PLACES = st.lists(
    st.builds(
        Place,
        st.sampled_from("abcdef"),
        st.none() | st.integers(1, 10_000),
        st.integers(0, 20_000),
        st.integers(0, 9),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    unique_by=lambda place: place.name,
)


@given(st.none() | st.sampled_from("abcdefg"), PLACES, st.sets(st.sampled_from("abcdef")))
def test_no_turn_goes_to_an_engine_that_cannot_take_it_and_none_is_refused_without_need(bound, places, avoid):
    choice = route(bound, places, avoid)
    able = {place.name: place for place in places if place.serves and not place.draining and place.name not in avoid}
    if isinstance(choice, Nowhere):
        assert not able
        return
    assert choice.name in able
    up = [place for place in able.values() if place.up]
    if up:
        assert able[choice.name].up
    if bound in able and able[bound].up:
        assert choice.name == bound
    elif up and isinstance(choice, Go) and all(place.capacity_tokens is not None for place in up):
        most = max(place.free_tokens or 0 for place in up)
        assert (able[choice.name].free_tokens or 0) >= most - max(p.capacity_tokens or 0 for p in up) / 64

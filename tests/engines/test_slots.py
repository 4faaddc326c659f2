"""The slot table: who sits where, and who has to go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsteward.engines.slots import SlotTable


def test_a_session_comes_back_to_its_slot() -> None:
    table = SlotTable(3)
    slot = table.take("a")
    assert slot is not None
    table.give_back(slot)
    assert table.take("b") != slot
    assert table.take("a") == slot


def test_the_least_recently_used_session_loses_its_slot() -> None:
    table = SlotTable(2)
    for session in ("a", "b", "a"):
        slot = table.take(session)
        assert slot is not None
        table.give_back(slot)
    b = table.slot_of("b")
    assert table.take("c") == b
    assert table.slot_of("b") is None


def test_a_busy_slot_is_never_given_out() -> None:
    table = SlotTable(1)
    assert table.take("a") == 0
    assert table.take("a") is None
    assert table.take("b") is None
    table.give_back(0)
    assert table.take("b", avoid={0}) is None
    assert table.take("b") == 0


def test_a_forgotten_session_s_slot_is_taken_first() -> None:
    table = SlotTable(2)
    for session in ("a", "b"):
        slot = table.take(session)
        assert slot is not None
        table.give_back(slot)
    freed = table.slot_of("b")
    table.forget("b")
    assert table.take("c") == freed
    assert table.slot_of("a") is not None


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60))
def test_owners_and_slots_stay_one_to_one(count: int, steps: list[tuple[str, bool]]) -> None:
    table = SlotTable(count)
    held: list[int] = []
    for session, finish in steps:
        slot = table.take(session)
        if slot is not None:
            assert slot not in held
            assert table.slot_of(session) == slot
            held.append(slot)
        if finish and held:
            table.give_back(held.pop(0))
        assert table.busy == len(held)
        places = [place for name in "abcdef" if (place := table.slot_of(name)) is not None]
        assert len(places) == len(set(places)) <= count

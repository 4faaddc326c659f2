"""The life of a session: the table is whole, and nothing outside it can happen."""

from __future__ import annotations

from typing import get_args

import pytest

from kvsteward.errors import StateError
from kvsteward.sessions import Event, State, allows, step
from kvsteward.sessions.lifecycle import STEPS

LEGAL = {
    ("new", "turn_started"): "active",
    ("new", "close"): "closed",
    ("active", "turn_started"): "active",
    ("active", "turn_ended"): "idle",
    ("active", "crash"): "idle",
    ("idle", "turn_started"): "active",
    ("idle", "park"): "parked",
    ("idle", "expire"): "expired",
    ("idle", "close"): "closed",
    ("parked", "turn_started"): "active",
    ("parked", "revive"): "idle",
    ("parked", "expire"): "expired",
    ("parked", "close"): "closed",
    ("expired", "turn_started"): "active",
    ("expired", "revive"): "idle",
    ("expired", "close"): "closed",
}


@pytest.mark.parametrize("state", get_args(State))
@pytest.mark.parametrize("event", get_args(Event))
def test_each_step_is_legal_or_raises(state: State, event: Event) -> None:
    expected = LEGAL.get((state, event))
    assert allows(state, event) is (expected is not None)
    if expected is None:
        with pytest.raises(StateError, match=f"{state}.*{event}"):
            step(state, event)
    else:
        assert step(state, event) == expected


def test_every_state_has_a_row_and_can_be_reached() -> None:
    assert set(STEPS) == set(get_args(State))
    assert {to for row in STEPS.values() for to in row.values()} == set(get_args(State)) - {"new"}

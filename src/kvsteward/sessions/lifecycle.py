"""The life of a session, as a table.

Three things are told apart. *Turns*: while one or more run the session is `active`; the caller counts them and says
`turn_ended` for the last. *KV*: between turns the session's cache stays where it is (`idle`), is set aside over a
pause (`parked`), or was given back (`expired`). *The log*: it is there in every state. So expiry costs a prefill and
never a message: a later turn starts from `expired` as it does from `idle`. `closed` is the one end: nothing
continues a closed session, though another may branch from its log.

          turn_started                turn_ended              park
    new ---------------> active <-------------------> idle ----------> parked
     |                     ^       turn_started       |  ^               |
     | close               | turn_started      expire |  | revive        | expire
     v                     |                          v  |               v
    closed <------------- (any but active) <-------- expired <-----------+

Knows no store and no clock. Invariant: what is not in the table cannot happen; an illegal step raises and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from kvsteward.errors import StateError
from kvsteward.sessions.base import State

Event = Literal["turn_started", "turn_ended", "park", "revive", "expire", "crash", "close"]

STEPS: Mapping[State, Mapping[Event, State]] = {
    "new": {"turn_started": "active", "close": "closed"},
    # A second turn may start beside the first. Turns are ended before a session is closed.
    "active": {"turn_started": "active", "turn_ended": "idle", "crash": "idle"},
    "idle": {"turn_started": "active", "park": "parked", "expire": "expired", "close": "closed"},
    "parked": {"turn_started": "active", "revive": "idle", "expire": "expired", "close": "closed"},
    "expired": {"turn_started": "active", "revive": "idle", "close": "closed"},
    "closed": {},
}


def step(state: State, event: Event) -> State:
    """The state after `event`. Raises StateError when the table has no such step."""
    try:
        return STEPS[state][event]
    except KeyError:
        raise StateError(f"a session that is {state!r} cannot take the step {event!r}") from None


def allows(state: State, event: Event) -> bool:
    """Whether `step` would succeed."""
    return event in STEPS.get(state, {})

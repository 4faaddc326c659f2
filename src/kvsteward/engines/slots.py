"""Which session has which llama-server slot: a pure table, least recently used first.

It knows no HTTP. Invariants: a slot has at most one owner and a session at most one slot; `take` never gives out a
slot that is known to be busy, because llama-server makes a request for a busy slot wait even if others are idle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class SlotTable:
    """Slots `0 .. count-1`. Not thread-safe: it lives on one event loop."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # oldest use first
        self._owner: dict[int, str] = {}
        self._slot: dict[str, int] = {}

    @property
    def busy(self) -> int:
        """How many slots are taken now."""
        return self.count - len(self._idle)

    def slot_of(self, session_id: str) -> int | None:
        """The slot that holds this session's KV, if any."""
        return self._slot.get(session_id)

    def take(self, session_id: str, avoid: Collection[int] = ()) -> int | None:
        """An idle slot for a session: its own, else one that nobody owns, else the least recently used one.

        `avoid` are slots that others use at the moment. None if the session's own slot is busy (a second request of
        the same session must not drive a third session out) or if no slot is idle. Undo it with `give_back`.
        """
        own = self._slot.get(session_id)
        if own is not None:
            slot = own if own in self._idle and own not in avoid else None
        else:
            idle = [slot for slot in self._idle if slot not in avoid]
            slot = next((s for s in idle if s not in self._owner), idle[0] if idle else None)
        if slot is None:
            return None
        del self._idle[slot]
        self._assign(slot, session_id)
        return slot

    def give_back(self, slot: int) -> None:
        """The request on this slot is over. The session keeps the slot; it is now the most recently used one."""
        self._idle[slot] = None

    def forget(self, session_id: str) -> None:
        """The session's KV is gone: its slot is free for anybody, and first in line if it is idle."""
        slot = self._slot.pop(session_id, None)
        if slot is not None:
            del self._owner[slot]
            if slot in self._idle:
                self._idle.move_to_end(slot, last=False)

    def _assign(self, slot: int, session_id: str) -> None:
        previous = self._owner.get(slot)
        if previous is not None and previous != session_id:
            del self._slot[previous]
        self._owner[slot] = session_id
        self._slot[session_id] = slot

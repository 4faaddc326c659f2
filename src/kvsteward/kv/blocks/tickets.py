"""What the block store hands out: blocks that are being brought (`Ticket`), and a slot to fill (`Filling`).

Both only speak for their maker, which keeps the books. Invariant: each is given back once, however often one asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvsteward.kv.blocks.host import Slot


class Bringer(Protocol):
    """Who brings a ticket's blocks."""

    def poll(self, ticket: Ticket) -> int | None: ...

    def held(self, ticket: Ticket) -> list[Slot]: ...

    def release(self, ticket: Ticket) -> None: ...


class Ticket:
    """Blocks that are being brought into host memory, or are pinned there. Give it back with `release`."""

    def __init__(self, bringer: Bringer, keys: Sequence[bytes], session: str, deadline_s: float) -> None:
        self.keys = tuple(keys)
        self.session = session
        self.deadline_s = deadline_s
        self._bringer = bringer
        # the bringer's notes, under its lock
        self.limit = len(self.keys)
        """No more than these can come."""
        self.slots: dict[bytes, Slot] = {}
        """Held for this ticket."""
        self.settled = 0
        """Of the first keys, those that are held."""
        self.result: int | None = None
        self.released = False
        self.late = False
        """It was settled by its deadline."""

    def poll(self) -> int | None:
        """None while blocks may still come; then how many of the first keys are in host memory, pinned until `release`.

        Never waits. At the deadline what is there counts; what comes later stays in the pool, but not for this ticket.
        """
        return self._bringer.poll(self)

    def blocks(self) -> list[memoryview]:
        """The blocks in host memory, in the order of the keys. Read them, do not write; not after `release`."""
        return [slot.block for slot in self._bringer.held(self)]

    def indices(self) -> list[int]:
        """The numbers of their slots in the pool's buffer, for a process that has it mapped. Not after `release`."""
        return [slot.index for slot in self._bringer.held(self)]

    def release(self) -> None:
        """Lets the blocks go, whatever `poll` said. A second call does nothing."""
        self._bringer.release(self)


class Filler(Protocol):
    """Who takes a slot back, filled or not."""

    def commit(self, slot: Slot, session: str, ttl_s: float | None, crc: int | None) -> bool: ...

    def abandon(self, slot: Slot) -> None: ...


class Filling:
    """A slot that the caller fills itself, in parts if it likes: write to `block`, then `commit` or `abandon`."""

    def __init__(self, filler: Filler, slot: Slot, session: str, ttl_s: float | None) -> None:
        self.block = slot.block
        self.index = slot.index
        """The slot's number in the pool's buffer."""
        self._filler, self._slot, self._session, self._ttl_s = filler, slot, session, ttl_s
        self._open = True

    def commit(self, crc: int | None = None) -> bool:
        """True where it was also queued for every lower tier. `crc`: the block's checksum, where it is known."""
        if not self._open:
            return False
        self._open = False
        return self._filler.commit(self._slot, self._session, self._ttl_s, crc)

    def abandon(self) -> None:
        """Gives the slot back unused. After `commit` it does nothing."""
        if self._open:
            self._open = False
            self._filler.abandon(self._slot)

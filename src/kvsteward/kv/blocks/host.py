"""Blocks in host memory: slots of one size in one buffer that is made at the start, so that a load is one copy.

Each slot has room for the record's header before the block, so a block goes to disk or to a socket without being
copied. A slot is free, being filled (nobody sees it), or ready; a ready slot with pins stays where it is. When a
block needs room, the `order` names one without pins to give up.

No I/O, no threads of its own; every call holds the pool's lock for bookkeeping only, never while a block is copied.
Invariant (`check`): free + filling + ready slots = all slots, pins are never negative, the order knows exactly the
ready slots without pins.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvsteward.errors import ConfigError, InvariantError
from kvsteward.kv.blocks.order import LRU, Order
from kvsteward.kv.blocks.record import HEADER_BYTES

ALIGN_BYTES = 4096
MAX_OWNERS = 8
"""A block that more sessions used is nobody's: no session's end drops it."""
SHARED = "*"


@dataclass(slots=True, eq=False)
class Slot:
    """`block` is the payload, `record` header and payload in one. `sealed`: the header is written and right."""

    index: int
    record: memoryview
    block: memoryview
    key: bytes = b""
    ready: bool = False
    pins: int = 0
    doomed: bool = False
    sealed: bool = False
    expires_s: float = 0.0
    session: str = ""
    owners: set[str] = field(default_factory=set)
    depth: int = 0
    together: int = 0


@dataclass(frozen=True, slots=True)
class HostFigures:
    slots: int
    used: int
    filling: int
    pinned: int
    slot_bytes: int
    evicted: int
    expired: int


def anonymous(size_bytes: int) -> memoryview:
    """Memory of the process, in large pages where the system gives them."""
    area = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


class HostPool:
    """`capacity_bytes` bounds the buffer, headers and alignment included. `allocate` makes it: on a machine with a
    GPU give one that returns pinned memory. `clock` is Unix time (for what expires).

    Raises ConfigError where not one block fits, or `allocate` returns too little.
    """

    def __init__(
        self,
        block_bytes: int,
        capacity_bytes: int,
        *,
        order: Order | None = None,
        allocate: Callable[[int], memoryview] = anonymous,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if block_bytes < 1:
            raise ConfigError(f"a block of {block_bytes} bytes cannot be kept")
        self.block_bytes = block_bytes
        self.slot_bytes = -(-(HEADER_BYTES + block_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        count = capacity_bytes // self.slot_bytes
        if count < 1:
            raise ConfigError(
                f"host memory of {capacity_bytes} bytes holds no block of {block_bytes} bytes",
                hint=f"Give at least {self.slot_bytes} bytes, or leave the store out.",
            )
        buffer = memoryview(allocate(count * self.slot_bytes)).cast("B")
        if buffer.readonly or buffer.nbytes < count * self.slot_bytes:
            raise ConfigError(
                f"allocate({count * self.slot_bytes}) gave {buffer.nbytes} bytes (read-only: {buffer.readonly})"
            )
        self.slots = [self._slot(buffer, index) for index in range(count)]
        self._clock = clock
        self._lock = threading.Lock()
        self._order = order if order is not None else LRU()
        self._free = self.slots[::-1]
        self._slots: dict[bytes, Slot] = {}
        self._sessions: dict[str, set[bytes]] = {}
        self._together = 0
        self._evicted = self._expired = 0

    def _slot(self, buffer: memoryview, index: int) -> Slot:
        start = index * self.slot_bytes
        record = buffer[start : start + HEADER_BYTES + self.block_bytes]
        return Slot(index, record, record[HEADER_BYTES:])

    # what is there

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are ready."""
        with self._lock:
            return self._leading(keys)

    def _leading(self, keys: Sequence[bytes]) -> int:
        for n, key in enumerate(keys):
            if self._ready(key) is None:
                return n
        return len(keys)

    def _ready(self, key: bytes) -> Slot | None:
        slot = self._slots.get(key)
        if slot is None or not slot.ready or slot.doomed:
            return None
        if slot.expires_s and self._clock() >= slot.expires_s:
            self._expired += 1
            self._drop(slot)
            return None
        return slot

    def holds(self, key: bytes) -> bool:
        """Ready or being filled."""
        with self._lock:
            return key in self._slots and not self._slots[key].doomed

    def used_elsewhere(self, keys: Iterable[bytes], session: str) -> set[bytes]:
        """Those of the keys that other sessions than this one use, as far as the pool knows."""
        with self._lock:
            slots = ((key, self._slots.get(key)) for key in keys)
            return {key for key, slot in slots if slot is not None and slot.owners - {session}}

    # use

    def pin_leading(self, keys: Sequence[bytes], session: str = "") -> list[Slot]:
        """Pins the first keys that are ready and marks them as used together. Give the slots back with `unpin`."""
        with self._lock:
            return self._pin(keys[: self._leading(keys)], session)

    def pin(self, key: bytes) -> Slot | None:
        """Pins one block without marking it as used."""
        with self._lock:
            slot = self._ready(key)
            if slot is not None:
                self._hold(slot)
            return slot

    def unpin(self, slots: Iterable[Slot]) -> None:
        with self._lock:
            for slot in slots:
                self._let_go(slot)

    def touch(self, keys: Sequence[bytes], session: str = "") -> int:
        """Marks those of the keys that are ready as used together, in chain order. Returns how many."""
        with self._lock:
            slots = [slot for slot in map(self._ready, keys) if slot is not None]
            self._pin([slot.key for slot in slots], session)
            for slot in slots:
                self._let_go(slot)
            return len(slots)

    def own(self, key: bytes, session: str) -> None:
        """The session uses the block too."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None and slot.ready:
                self._own(slot, session)

    def _pin(self, keys: Sequence[bytes], session: str) -> list[Slot]:
        self._together += 1
        slots = [self._slots[key] for key in keys]
        for depth, slot in enumerate(slots):
            self._hold(slot)
            slot.depth, slot.together = depth, self._together
            self._own(slot, session)
        return slots

    def _hold(self, slot: Slot) -> None:
        slot.pins += 1
        self._order.discard(slot.key)

    def _let_go(self, slot: Slot) -> None:
        if slot.pins < 1:
            raise InvariantError(f"slot {slot.index} is let go more often than it was pinned")
        slot.pins -= 1
        if slot.pins:
            return
        if slot.doomed:
            self._drop(slot)
        else:
            self._order.add(slot.key, slot.session, slot.depth, slot.together)

    # filling

    def reserve(self, key: bytes) -> Slot | None:
        """A slot to fill, pinned once; None where the key is there already or no slot can be had."""
        with self._lock:
            if key in self._slots or (not self._free and not self._evict()):
                return None
            slot = self._free.pop()
            slot.key, slot.pins = key, 1
            self._slots[key] = slot
            return slot

    def commit(self, slot: Slot, *, session: str = "", expires_s: float = 0.0, sealed: bool = False) -> None:
        """The slot is filled and may be found. It stays pinned: give it back with `unpin`."""
        with self._lock:
            self._together += 1
            slot.ready, slot.sealed, slot.expires_s = True, sealed, expires_s
            slot.depth, slot.together = 0, self._together
            self._own(slot, session)

    def abandon(self, slot: Slot) -> None:
        """The slot could not be filled."""
        with self._lock:
            slot.pins -= 1
            self._drop(slot)

    def _evict(self) -> bool:
        key = self._order.pop()
        if key is None:
            return False
        self._evicted += 1
        self._drop(self._slots[key])
        return True

    # giving up

    def forget(self, keys: Iterable[bytes]) -> int:
        """Drops the blocks; those in use go when they are let go. Returns how many."""
        with self._lock:
            found = [slot for slot in map(self._slots.get, keys) if slot is not None and slot.ready and not slot.doomed]
            for slot in found:
                self._doom(slot)
            return len(found)

    def forget_session(self, session: str) -> int:
        """Drops the blocks that no other session used. Returns how many."""
        with self._lock:
            dropped = 0
            for key in self._sessions.pop(session, ()):
                slot = self._slots[key]
                slot.owners.discard(session)
                if not slot.owners:
                    dropped += 1
                    self._doom(slot)
                elif slot.session == session:
                    slot.session = ""
                    if slot.ready and not slot.pins:
                        self._order.discard(key)
                        self._order.add(key, slot.session, slot.depth, slot.together)
            return dropped

    def clear(self) -> int:
        """Drops all blocks. Returns how many."""
        with self._lock:
            found = [slot for slot in self._slots.values() if not slot.doomed]
            for slot in found:
                self._doom(slot)
            return len(found)

    def _doom(self, slot: Slot) -> None:
        if slot.pins:
            slot.doomed = True
        else:
            self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        if slot.pins:
            slot.doomed = True
            return
        self._order.discard(slot.key)
        del self._slots[slot.key]
        for owner in slot.owners:
            keys = self._sessions.get(owner)
            if keys is not None:
                keys.discard(slot.key)
                if not keys:
                    del self._sessions[owner]
        slot.key, slot.ready, slot.doomed, slot.sealed, slot.expires_s = b"", False, False, False, 0.0
        slot.session, slot.depth, slot.together = "", 0, 0
        slot.owners.clear()
        self._free.append(slot)

    def _own(self, slot: Slot, session: str) -> None:
        if not session:
            return
        slot.session = session
        if SHARED in slot.owners or session in slot.owners:
            return
        if len(slot.owners) == MAX_OWNERS:
            session = SHARED
        slot.owners.add(session)
        if session != SHARED:
            self._sessions.setdefault(session, set()).add(slot.key)

    # the account

    def sessions(self) -> dict[str, int]:
        """Blocks that each session used; a block can count for several."""
        with self._lock:
            return {session: len(keys) for session, keys in self._sessions.items()}

    def figures(self) -> HostFigures:
        with self._lock:
            used = len(self._slots)
            filling = sum(1 for slot in self._slots.values() if not slot.ready)
            pinned = sum(1 for slot in self._slots.values() if slot.pins and slot.ready)
            return HostFigures(len(self.slots), used, filling, pinned, self.slot_bytes, self._evicted, self._expired)

    def check(self) -> None:
        """Raises InvariantError where the books do not add up."""
        with self._lock:
            if len(self._free) + len(self._slots) != len(self.slots):
                raise InvariantError(f"{len(self._free)} free + {len(self._slots)} used of {len(self.slots)} slots")
            if {id(s) for s in self._free} | {id(s) for s in self._slots.values()} != {id(s) for s in self.slots}:
                raise InvariantError("a slot is neither free nor used")
            for key, slot in self._slots.items():
                if slot.key != key or slot.pins < 0 or (not slot.ready and slot.pins < 1):
                    raise InvariantError(
                        f"slot {slot.index}: {slot.pins} pins, ready {slot.ready}, key {slot.key.hex()}"
                    )
            idle = sum(1 for slot in self._slots.values() if slot.ready and not slot.pins)
            if len(self._order) != idle:
                raise InvariantError(f"the order knows {len(self._order)} blocks, {idle} may go")
            for session, keys in self._sessions.items():
                if any(session not in self._slots[key].owners for key in keys):
                    raise InvariantError(f"session {session!r} is listed for a block that it does not own")

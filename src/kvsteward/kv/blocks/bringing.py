"""Brings blocks into host memory: from the nearest tier that has them, in threads of its own, for tickets.

Methods that end in `_locked` are called under the store's lock, which is this one's too. Invariant: each key is
fetched once at a time however many ask; a block that a ticket counts stays in its slot; keys in the air and tickets are
bounded.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvsteward.errors import InvariantError
from kvsteward.kv.blocks.account import Counts
from kvsteward.kv.blocks.behind import seal
from kvsteward.kv.blocks.codecs import Codec, Raw
from kvsteward.kv.blocks.host import HostPool, Slot
from kvsteward.kv.blocks.record import DAMAGED, HEADER_BYTES, Miss, Reason, Record, decode
from kvsteward.kv.blocks.tickets import Ticket
from kvsteward.kv.blocks.tier import Tier

log = logging.getLogger("kvsteward.blocks")


@dataclass(slots=True, eq=False)
class _Fetch:
    """Keys to look for, first in the tiers from `tier` on; once asked, to be read from that one."""

    keys: list[bytes]
    tier: int = 0
    asked: bool = False


class Bringing:
    """`codecs` that may be met in the tiers. `seal_all`: blocks that were not written raw get a checksum here too."""

    def __init__(
        self,
        lock: threading.Lock,
        host: HostPool,
        tiers: Sequence[Tier],
        codecs: Iterable[Codec],
        counts: Counts,
        *,
        load_blocks: int,
        batch_blocks: int,
        max_tickets: int,
        seal_all: bool,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._lock, self._host, self._tiers, self._counts = lock, host, tiers, counts
        self._codecs = {codec.number: codec for codec in codecs}
        self._load_blocks, self._batch_blocks, self._max_tickets = load_blocks, batch_blocks, max_tickets
        self._seal_all, self._clock, self._wall = seal_all, clock, wall
        self._to_load = threading.Condition(lock)
        self._fetches: deque[_Fetch] = deque()
        self._flying: dict[bytes, list[Ticket]] = {}
        self._tickets: set[Ticket] = set()
        self._closed = self._stopping = False

    def threads(self, loaders: int) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names and what to run: until `stop_locked`."""
        for number in range(loaders):
            yield f"load-{number}", self._load_all

    # what the store calls

    def stage(self, keys: Sequence[bytes], deadline_s: float, session: str, *, lower: bool) -> Ticket:
        ticket = Ticket(self, keys, session, self._clock() + deadline_s)
        with self._lock:
            if self._closed or len(self._tickets) >= self._max_tickets:
                self._counts.misses[Reason.CLOSED if self._closed else Reason.BUSY] += 1
                ticket.result = 0
                return ticket
            self._tickets.add(ticket)
            for slot in self._host.pin_leading(ticket.keys, ticket.session):
                ticket.slots[slot.key] = slot
            self._counts.host_hits += len(ticket.slots)
            wanted = [key for key in ticket.keys[len(ticket.slots) :] if key not in ticket.slots]
            if wanted and not (lower and self._tiers):
                self._miss(ticket, wanted[0], Reason.ABSENT)
            elif wanted:
                self._fetch(ticket, wanted)
            self._advance(ticket)
        return ticket

    def close_locked(self) -> None:
        """Takes no more tickets; those that wait get what is there."""
        self._closed = True
        for ticket in self._tickets:
            if ticket.result is None:
                self._settle(ticket)

    def stop_locked(self) -> None:
        """Drops what is queued and lets the threads end."""
        self._stopping = True
        self._fetches.clear()
        self._flying.clear()
        self._to_load.notify_all()

    def counts_locked(self) -> tuple[int, int]:
        """Keys in the air, tickets."""
        return len(self._flying), len(self._tickets)

    def check_locked(self) -> None:
        """Raises InvariantError where the books do not add up."""
        if len(self._flying) > self._load_blocks or len(self._tickets) > self._max_tickets:
            raise InvariantError(f"{len(self._flying)} keys in the air, {len(self._tickets)} tickets")
        for ticket in self._tickets:
            if ticket.settled > ticket.limit or any(k not in ticket.slots for k in ticket.keys[: ticket.settled]):
                raise InvariantError("a ticket counts blocks that it does not hold")

    # what tickets call

    def poll(self, ticket: Ticket) -> int | None:
        with self._lock:
            if ticket.result is None and self._clock() >= ticket.deadline_s:
                self._counts.misses[Reason.LATE] += 1
                ticket.late = True
                self._settle(ticket)
            return ticket.result

    def held(self, ticket: Ticket) -> list[Slot]:
        with self._lock:
            return [ticket.slots[key] for key in ticket.keys[: ticket.settled]] if ticket.slots else []

    def release(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket.released:
                return
            ticket.released = True
            if ticket.result is None:
                ticket.result = ticket.settled
            held, ticket.slots = list(ticket.slots.values()), {}
            self._host.unpin(held[::-1])
            self._tickets.discard(ticket)

    # tickets

    def _fetch(self, ticket: Ticket, wanted: Sequence[bytes]) -> None:
        mine: list[bytes] = []
        for key in dict.fromkeys(wanted):
            slot = self._host.pin(key)
            if slot is not None:
                self._counts.host_hits += 1
                ticket.slots[key] = slot
            elif key in self._flying:
                self._counts.fetches_shared += 1
                self._flying[key].append(ticket)
            elif len(self._flying) < self._load_blocks:
                self._flying[key] = [ticket]
                mine.append(key)
            else:
                self._miss(ticket, key, Reason.BUSY)
                break
        if mine:
            self._fetches.append(_Fetch(mine))
            self._to_load.notify_all()

    def _miss(self, ticket: Ticket, key: bytes, reason: Reason) -> None:
        """The ticket ends before this key."""
        place = ticket.keys.index(key)
        if ticket.result is None and place < ticket.limit:
            ticket.limit = place
            self._counts.misses[reason] += 1

    def _advance(self, ticket: Ticket) -> None:
        while ticket.settled < ticket.limit and ticket.keys[ticket.settled] in ticket.slots:
            ticket.settled += 1
        if ticket.result is None and ticket.settled >= ticket.limit:
            self._settle(ticket)

    def _settle(self, ticket: Ticket) -> None:
        ticket.result = ticket.settled
        kept = set(ticket.keys[: ticket.settled])
        self._host.touch(ticket.keys[: ticket.settled], ticket.session)
        spare = [slot for key, slot in ticket.slots.items() if key not in kept]
        ticket.slots = {key: slot for key, slot in ticket.slots.items() if key in kept}
        self._host.unpin(spare)

    def _land(self, landed: dict[bytes, Slot | None], missed: dict[bytes, Reason]) -> None:
        """Tells the tickets. A slot that comes along is pinned once, and is let go here."""
        with self._lock:
            told: dict[Ticket, None] = {}
            for key, slot in landed.items():
                for ticket in self._flying.pop(key, ()):
                    if ticket.result is None:
                        held = self._host.pin(key)
                        if held is None:
                            self._miss(ticket, key, Reason.LATE)
                        else:
                            self._host.own(key, ticket.session)
                            ticket.slots[key] = held
                        told[ticket] = None
                if slot is not None:
                    self._host.unpin([slot])
            for key, reason in missed.items():
                for ticket in self._flying.pop(key, ()):
                    if ticket.result is None:
                        self._miss(ticket, key, reason)
                        told[ticket] = None
            for ticket in told:
                self._advance(ticket)

    # the threads

    def _load_all(self) -> None:
        while True:
            with self._lock:
                while not self._fetches and not self._stopping:
                    self._to_load.wait()
                if self._stopping:
                    return
                fetch = self._fetches.popleft()
                fetch.keys = self._still_wanted(fetch.keys)
            if not fetch.keys:
                continue
            try:
                self._read(fetch) if fetch.asked else self._ask(fetch)
            except Exception:  # whatever it is, the thread lives on; whoever waits gets misses
                log.exception("kvsteward: reading blocks failed")
                self._land({}, dict.fromkeys(fetch.keys, Reason.ERROR))

    def _still_wanted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Takes keys that no ticket waits for any more out of the air."""
        wanted = []
        for key in keys:
            waiting = self._flying.get(key)
            if waiting is None:
                continue
            if any(ticket.result is None for ticket in waiting):
                wanted.append(key)
            else:
                del self._flying[key]
        return wanted

    def _ask(self, fetch: _Fetch) -> None:
        """Finds the nearest tier of each key, up to the first one that nobody has, and queues the reads."""
        where = dict.fromkeys(fetch.keys, -1)
        reason = Reason.ABSENT
        for number in range(fetch.tier, len(self._tiers)):
            unknown = [key for key in fetch.keys if where[key] < 0]
            if not unknown:
                break
            answer = self._tiers[number].holds(unknown)
            if isinstance(answer, Miss):
                self._tiers[number].missed(answer.reason)
                reason = answer.reason
                continue
            for key, held in zip(unknown, answer, strict=True):
                if held:
                    where[key] = number
        found = next((n for n, key in enumerate(fetch.keys) if where[key] < 0), len(fetch.keys))
        jobs: list[_Fetch] = []
        for key in fetch.keys[:found]:
            if not jobs or jobs[-1].tier != where[key] or len(jobs[-1].keys) == self._batch_blocks:
                jobs.append(_Fetch([], where[key], asked=True))
            jobs[-1].keys.append(key)
        with self._lock:
            self._fetches.extend(jobs)
            self._to_load.notify_all()
        if found < len(fetch.keys):  # those behind a missing one are of no use
            self._land({}, dict.fromkeys(fetch.keys[found:], reason))

    def _read(self, fetch: _Fetch) -> None:
        tier = self._tiers[fetch.tier]
        slots: dict[bytes, Slot] = {}
        landed: dict[bytes, Slot | None] = {}
        missed: dict[bytes, Reason] = {}
        again: list[bytes] = []
        try:
            for key in fetch.keys:
                slot = self._host.reserve(key)
                if slot is not None:
                    slots[key] = slot
                elif self._host.holds(key):
                    landed[key] = None
                else:
                    missed[key] = Reason.NO_ROOM
            if slots:
                answers = tier.read(list(slots), [slot.record for slot in slots.values()])
                for key, answer in zip(list(slots), answers, strict=True):
                    miss = self._unpack(tier, key, answer, slots[key])
                    if miss is None:
                        landed[key] = slots.pop(key)
                    elif fetch.tier + 1 < len(self._tiers):
                        again.append(key)
                    else:
                        missed[key] = miss.reason
        finally:
            for slot in slots.values():
                self._host.abandon(slot)
        with self._lock:
            self._counts.staged[tier.name] += sum(1 for slot in landed.values() if slot is not None)
            if again:
                self._fetches.append(_Fetch(again, fetch.tier + 1))
                self._to_load.notify_all()
        self._land(landed, missed)

    def _unpack(self, tier: Tier, key: bytes, answer: memoryview | Miss, slot: Slot) -> Miss | None:
        """Checks a record and puts its block into the slot."""
        if isinstance(answer, Miss):
            tier.missed(answer.reason)
            return answer
        record = decode(answer, key, now_s=self._wall())
        miss = record if isinstance(record, Miss) else self._decoded(record, answer, key, slot)
        if miss is None:
            return None
        tier.missed(miss.reason)
        if miss.reason in DAMAGED:
            log.warning("kvsteward: a record of tier %s is dropped: %s %s", tier.name, miss.reason, miss.detail)
            tier.forget([key])
        return miss

    def _decoded(self, record: Record, answer: memoryview, key: bytes, slot: Slot) -> Miss | None:
        """The block of a sound record goes into its slot, which may be where it was read to."""
        codec, in_place = self._codecs.get(record.codec), answer.obj is slot.record.obj
        if codec is None:
            return Miss(Reason.CODEC, str(record.codec))
        raw = codec.number == Raw.number
        if record.raw_bytes != slot.block.nbytes or (raw and record.payload.nbytes != slot.block.nbytes):
            return Miss(Reason.SIZE, str(record.raw_bytes))
        try:
            if not (in_place and raw):
                codec.decode(memoryview(bytes(record.payload)) if in_place else record.payload, slot.block)
        except ValueError as error:
            return Miss(Reason.CODEC, str(error))
        if raw and not in_place:
            slot.record[:HEADER_BYTES] = answer[:HEADER_BYTES]
        elif not raw and self._seal_all:
            seal(slot, key, record.expires_s)
        self._host.commit(slot, expires_s=record.expires_s, sealed=raw or self._seal_all)
        return None

"""The block store: host memory in front, slower tiers behind, threads of its own between them.

Callers are engine steps, so none of their calls waits for a disk, a socket or another thread's copy: `put` copies into
host memory or drops, `stage` asks for blocks and `Ticket.poll` says what came, `get_into` copies out of host memory or
answers no. Writing to the lower tiers happens behind; a full queue drops and counts. Only `flush` and `close` wait, as
long as they are told.

`clock` is monotonic (deadlines), `wall` Unix time (what expires). Invariant: each key is fetched once at a time however
many ask; a block that a ticket or a queue holds stays in its slot; everything that is held is bounded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvsteward.errors import ConfigError, InvariantError
from kvsteward.kv.blocks.codecs import Codec, Raw
from kvsteward.kv.blocks.fingerprint import DIGEST_BYTES, MAX_KEY_BYTES
from kvsteward.kv.blocks.host import HostFigures, HostPool, Slot
from kvsteward.kv.blocks.record import (
    DAMAGED,
    HEADER_BYTES,
    Miss,
    Reason,
    crc,
    decode,
    encode_header,
    payload_crc,
    plain_crc,
)
from kvsteward.kv.blocks.tier import Tier, TierFigures, Write

log = logging.getLogger("kvsteward.blocks")
JOIN_S = 1.0
"""For threads that are in a call to a tier when the store is closed."""


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Counts of blocks since the start, except where said.

    `dropped`: puts that were not kept, by reason. `not_behind`: blocks that stayed in host memory only, by tier,
    since its queue was full. `host_hits`: blocks that a stage found in host memory; `staged`: that it brought, by
    tier; `misses`: that it did not get, by reason (a ticket counts only its first missing one). `writing`, `loading`,
    `tickets`: now.
    """

    host: HostFigures
    tiers: tuple[TierFigures, ...]
    puts: int
    put_again: int
    dropped: dict[str, int]
    not_behind: dict[str, int]
    host_hits: int
    staged: dict[str, int]
    fetches_shared: int
    misses: dict[str, int]
    served: int
    not_served: dict[str, int]
    writing: dict[str, int]
    loading: int
    tickets: int


class Ticket:
    """Blocks that are being brought into host memory, or are pinned there. Give it back with `release`."""

    def __init__(self, store: BlockStore, keys: Sequence[bytes], session: str, deadline_s: float) -> None:
        self.keys = tuple(keys)
        self.session = session
        self._store = store
        self._deadline_s = deadline_s
        self._limit = len(self.keys)
        """No more than these can come."""
        self._held: dict[bytes, Slot] = {}
        self._settled = 0
        """Of the first keys, those that are held."""
        self._result: int | None = None
        self._released = False
        self.late = False
        """It was settled by its deadline."""

    def poll(self) -> int | None:
        """None while blocks may still come; then how many of the first keys are in host memory, pinned until `release`.

        Never waits. At the deadline what is there counts; what comes later stays in the pool, but not for this ticket.
        """
        return self._store._poll(self)

    def blocks(self) -> list[memoryview]:
        """The blocks in host memory, in the order of the keys. Read them, do not write; not after `release`."""
        return self._store._blocks(self)

    def indices(self) -> list[int]:
        """The numbers of their slots in the pool's buffer, for a process that has it mapped. Not after `release`."""
        return self._store._indices(self)

    def release(self) -> None:
        """Lets the blocks go, whatever `poll` said. A second call does nothing."""
        self._store._release(self)


class Filling:
    """A slot that the caller fills itself, in parts if it likes: write to `block`, then `commit` or `abandon`."""

    def __init__(self, store: BlockStore, slot: Slot, session: str, ttl_s: float | None) -> None:
        self.block = slot.block
        self.index = slot.index
        """The slot's number in the pool's buffer."""
        self._store, self._slot, self._session, self._ttl_s = store, slot, session, ttl_s
        self._open = True

    def commit(self) -> bool:
        """True where it was also queued for every lower tier."""
        if not self._open:
            return False
        self._open = False
        return self._store._commit(self._slot, self._session, self._ttl_s)

    def abandon(self) -> None:
        """Gives the slot back unused. After `commit` it does nothing."""
        if self._open:
            self._open = False
            self._store.host.abandon(self._slot)


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A block on its way down; pinned until every tier has had it."""

    slot: Slot
    key: bytes
    session: str
    expires_s: float
    tiers: list[int]
    left: int
    parts: tuple[memoryview | bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class _Forget:
    session: str


@dataclass(slots=True, eq=False)
class _Fetch:
    """Keys to look for, first in the tiers from `tier` on; once asked, to be read from that one."""

    keys: list[bytes]
    tier: int = 0
    asked: bool = False


@dataclass(slots=True)
class _Counts:
    puts: int = 0
    put_again: int = 0
    host_hits: int = 0
    fetches_shared: int = 0
    served: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    not_behind: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    staged: Counter[str] = field(default_factory=Counter)
    not_served: Counter[str] = field(default_factory=Counter)


class BlockStore:
    """`tiers` below the host pool, the nearest first. Every `put` is written to each of them. `codec` is how blocks are
    written there; `reads` are codecs of others that this store may meet besides. A lossy codec belongs into the
    fingerprint (`Fingerprint.codec`), so that nobody takes its blocks for exact ones.

    `queue_blocks` bounds the blocks that wait to be written to each tier, which are pinned meanwhile (default: a
    quarter of the pool, 1,024 at most); `load_blocks` those that are being looked for; `batch_blocks` those of one
    read or write. `loaders` threads read, one per tier writes, `sealers` encode and make checksums that no hardware
    makes. `check_host`: `get_into` checks the checksum again, and `put` makes it.
    """

    def __init__(
        self,
        host: HostPool,
        tiers: Sequence[Tier] = (),
        *,
        codec: Codec | None = None,
        reads: Sequence[Codec] = (),
        queue_blocks: int | None = None,
        load_blocks: int = 4096,
        batch_blocks: int = 8,
        loaders: int = 2,
        sealers: int = 1,
        max_tickets: int = 1024,
        check_host: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if queue_blocks is None:
            queue_blocks = max(1, min(1024, len(host.slots) // 2))
        for name, value in (
            ("queue_blocks", queue_blocks),
            ("load_blocks", load_blocks),
            ("batch_blocks", batch_blocks),
            ("loaders", loaders),
            ("sealers", sealers),
            ("max_tickets", max_tickets),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if len({tier.name for tier in tiers}) != len(tiers):
            raise ConfigError("two tiers have the same name")
        self.host = host
        self.tiers = tuple(tiers)
        self._codec: Codec = codec or Raw()
        self._inline = self._codec.number == Raw.number and crc() is not plain_crc
        self._codecs: dict[int, Codec] = {c.number: c for c in (Raw(), *reads, self._codec)}
        self._queue_blocks, self._load_blocks, self._batch_blocks = queue_blocks, load_blocks, batch_blocks
        self._max_tickets, self._check_host = max_tickets, check_host
        self._clock, self._wall = clock, wall
        self._lock = threading.Lock()
        self._to_load, self._to_seal, self._idle = (threading.Condition(self._lock) for _ in range(3))
        self._to_write = [threading.Condition(self._lock) for _ in self.tiers]
        self._writes: list[deque[_Outgoing | _Forget]] = [deque() for _ in self.tiers]
        self._pending = [0] * len(self.tiers)
        """Of each tier: what is queued, sealed or being written."""
        self._seals: deque[_Outgoing] = deque()
        self._fetches: deque[_Fetch] = deque()
        self._flying: dict[bytes, list[Ticket]] = {}
        self._tickets: set[Ticket] = set()
        self._counts = _Counts()
        self._closed = self._stopping = False
        self._threads: list[threading.Thread] = []
        if self.tiers:
            for number in range(loaders):
                self._start(f"kvsteward-load-{number}", self._load_all, ())
            for number in range(sealers):
                self._start(f"kvsteward-seal-{number}", self._seal_all, ())
            for number, tier in enumerate(self.tiers):
                self._start(f"kvsteward-write-{tier.name}", self._write_all, (number,))

    def _start(self, name: str, target: Callable[..., None], arguments: tuple[int, ...]) -> None:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # for engine steps: looking and loading

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are in host memory now. Marks nothing as used."""
        return self.host.leading(keys)

    def touch(self, keys: Sequence[bytes], session: str | None = None) -> int:
        """Marks the keys, in the order of their chain, as used now and together: of them the last ones go first. Call
        it when a turn ends. Returns how many are in host memory."""
        return self.host.touch(keys, session or "")

    def pin(self, keys: Sequence[bytes], session: str | None = None) -> Ticket:
        """Pins the first keys that are in host memory, and marks them as used. The ticket is settled at once."""
        return self.stage(keys, 0.0, session, lower=False)

    def stage(
        self, keys: Sequence[bytes], deadline_s: float, session: str | None = None, *, lower: bool = True
    ) -> Ticket:
        """Starts to bring the first keys into host memory; those that are there are pinned, the others as they come.

        The ticket is settled at the first key that nobody has, and `deadline_s` seconds from now at the latest.
        `lower=False` looks into host memory only.
        """
        ticket = Ticket(self, keys, session or "", self._clock() + deadline_s)
        with self._lock:
            if self._closed or len(self._tickets) >= self._max_tickets:
                self._counts.misses[Reason.CLOSED if self._closed else Reason.BUSY] += 1
                ticket._result = 0
                return ticket
            self._tickets.add(ticket)
            for slot in self.host.pin_leading(ticket.keys, ticket.session):
                ticket._held[slot.key] = slot
            self._counts.host_hits += len(ticket._held)
            wanted = [key for key in ticket.keys[len(ticket._held) :] if key not in ticket._held]
            if wanted and not (lower and self.tiers):
                self._miss(ticket, wanted[0], Reason.ABSENT)
            elif wanted:
                self._fetch(ticket, wanted)
            self._advance(ticket)
        return ticket

    def _fetch(self, ticket: Ticket, wanted: Sequence[bytes]) -> None:
        mine: list[bytes] = []
        for key in dict.fromkeys(wanted):
            slot = self.host.pin(key)
            if slot is not None:
                self._counts.host_hits += 1
                ticket._held[key] = slot
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
        if ticket._result is None and place < ticket._limit:
            ticket._limit = place
            self._counts.misses[reason] += 1

    def _advance(self, ticket: Ticket) -> None:
        while ticket._settled < ticket._limit and ticket.keys[ticket._settled] in ticket._held:
            ticket._settled += 1
        if ticket._result is None and ticket._settled >= ticket._limit:
            self._settle(ticket)

    def _settle(self, ticket: Ticket) -> None:
        ticket._result = ticket._settled
        kept = set(ticket.keys[: ticket._settled])
        self.host.touch(ticket.keys[: ticket._settled], ticket.session)
        spare = [slot for key, slot in ticket._held.items() if key not in kept]
        ticket._held = {key: slot for key, slot in ticket._held.items() if key in kept}
        self.host.unpin(spare)

    def _poll(self, ticket: Ticket) -> int | None:
        with self._lock:
            if ticket._result is None and self._clock() >= ticket._deadline_s:
                self._counts.misses[Reason.LATE] += 1
                ticket.late = True
                self._settle(ticket)
            return ticket._result

    def _blocks(self, ticket: Ticket) -> list[memoryview]:
        with self._lock:
            return [ticket._held[key].block for key in ticket.keys[: ticket._settled]] if ticket._held else []

    def _indices(self, ticket: Ticket) -> list[int]:
        with self._lock:
            return [ticket._held[key].index for key in ticket.keys[: ticket._settled]] if ticket._held else []

    def _release(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket._released:
                return
            ticket._released = True
            if ticket._result is None:
                ticket._result = ticket._settled
            held, ticket._held = list(ticket._held.values()), {}
            self.host.unpin(held[::-1])
            self._tickets.discard(ticket)

    def get_into(self, key: bytes, out: memoryview) -> bool:
        """Copies a block out of host memory; False where it is not there. Raises ValueError on another size."""
        out = memoryview(out).cast("B")
        if out.nbytes != self.host.block_bytes:
            raise ValueError(f"{out.nbytes} bytes for a block of {self.host.block_bytes}")
        slot = self.host.pin(key)
        if slot is None:
            return self._served(Reason.ABSENT)
        try:
            out[:] = slot.block
            if self._check_host and slot.sealed and payload_crc(slot.record) != crc()(out, 0):
                self.host.forget([key])
                return self._served(Reason.CHECKSUM)
            return self._served(None)
        finally:
            self.host.unpin([slot])

    def _served(self, reason: Reason | None) -> bool:
        with self._lock:
            if reason is None:
                self._counts.served += 1
            else:
                self._counts.not_served[reason] += 1
        return reason is None

    # for engine steps: keeping

    def put(self, key: bytes, block: memoryview, session: str | None = None, ttl_s: float | None = None) -> bool:
        """Copies the block into host memory and queues it for the lower tiers. False where there was no room: dropped.

        True too where the key is there already. Raises ValueError on a block of another size or an impossible key.
        """
        block = memoryview(block).cast("B")
        if block.nbytes != self.host.block_bytes:
            raise ValueError(f"a block of {block.nbytes} bytes for a pool of {self.host.block_bytes}")
        filling = self.open_put(key, session, ttl_s)
        if filling is None:
            return self.host.holds(key)
        filling.block[:] = block
        filling.commit()
        return True

    def open_put(self, key: bytes, session: str | None = None, ttl_s: float | None = None) -> Filling | None:
        """A slot to fill for this key; None where the key is there already (see `lookup`) or there is no room. Raises
        ValueError on a key that no record can have."""
        if not DIGEST_BYTES < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes")
        with self._lock:
            slot = None if self._closed else self.host.reserve(key)
            if slot is not None:
                self._counts.puts += 1
                return Filling(self, slot, session or "", ttl_s)
            if not self._closed and self.host.holds(key):
                self._counts.put_again += 1
                self.host.own(key, session or "")
            else:
                self._counts.dropped[Reason.CLOSED if self._closed else Reason.NO_ROOM] += 1
            return None

    def _commit(self, slot: Slot, session: str, ttl_s: float | None) -> bool:
        expires_s = self._wall() + ttl_s if ttl_s is not None else 0.0
        if self._check_host:
            self._seal(slot, slot.key, expires_s)
        self.host.commit(slot, session=session, expires_s=expires_s, sealed=self._check_host)
        with self._lock:
            room = [] if self._closed else self._with_room()
            if len(room) < len(self.tiers):
                for number, tier in enumerate(self.tiers):
                    self._counts.not_behind[tier.name] += number not in room
            if room:
                for number in room:
                    self._pending[number] += 1
                self._send(_Outgoing(slot, slot.key, session, expires_s, room, len(room)))
                return len(room) == len(self.tiers)
        self.host.unpin([slot])
        return not self.tiers

    def _with_room(self) -> list[int]:
        return [n for n, pending in enumerate(self._pending) if pending < self._queue_blocks]

    def forget(self, keys: Iterable[bytes]) -> int:
        """Drops blocks from host memory. Returns how many."""
        return self.host.forget(keys)

    def forget_session(self, session: str) -> int:
        """The session is over: drops its blocks that no other session used, here at once and behind in the lower tiers.

        Returns how many went in host memory. Where a tier's queue is full its blocks stay until they expire or are
        evicted.
        """
        dropped = self.host.forget_session(session)
        with self._lock:
            if not self._closed:
                room = self._with_room()
                for number, tier in enumerate(self.tiers):
                    if number in room:
                        self._pending[number] += 1
                        self._writes[number].append(_Forget(session))
                        self._to_write[number].notify()
                    else:
                        self._counts.not_behind[tier.name] += 1
        return dropped

    # writing behind

    def _send(self, item: _Outgoing) -> None:
        """A checksum in hardware is made by the thread that writes, a slower one or a codec's work by another."""
        if self._inline:
            for number in item.tiers:
                self._writes[number].append(item)
                self._to_write[number].notify()
        else:
            self._seals.append(item)
            self._to_seal.notify()

    def _seal_all(self) -> None:
        """Checksums and codecs in a thread of their own: the next block's, while the one before is on its way."""
        while True:
            with self._lock:
                while not self._seals and not self._stopping:
                    self._to_seal.wait()
                if self._stopping:
                    return
                item = self._seals.popleft()
            try:
                if not item.slot.doomed:
                    item.parts = self._parts(item)
            except ValueError as error:
                log.warning("kvsteward: a block cannot be stored as %s: %s", self._codec.name, error)
            except Exception:  # whatever it is, the thread lives on; the block is not written below
                log.exception("kvsteward: a block could not be made ready for the tiers")
            with self._lock:
                for number in item.tiers:
                    if item.parts:
                        self._writes[number].append(item)
                        self._to_write[number].notify()
                    else:
                        self._counts.not_behind[self.tiers[number].name] += not item.slot.doomed
                        self._sent(number, [item])

    def _parts(self, item: _Outgoing) -> tuple[memoryview | bytes, ...]:
        """The record; the block as it is where the codec does not make it smaller, so no record is larger than a
        slot."""
        slot, number = item.slot, self._codec.number
        payload = None if number == Raw.number else self._codec.encode(slot.block)
        if payload is not None and memoryview(payload).nbytes < slot.block.nbytes:
            raw_bytes = slot.block.nbytes
            header = encode_header(item.key, payload, codec=number, raw_bytes=raw_bytes, expires_s=item.expires_s)
            return (header, payload)
        if not slot.sealed:
            self._seal(slot, item.key, item.expires_s)
            slot.sealed = True
        return (slot.record,)

    def _write_all(self, number: int) -> None:
        tier, queue = self.tiers[number], self._writes[number]
        while True:
            with self._lock:
                while not queue and not self._stopping:
                    self._to_write[number].wait()
                if self._stopping:
                    return
                taken = [queue.popleft()]
                while queue and len(taken) < self._batch_blocks and type(queue[0]) is type(taken[0]) is _Outgoing:
                    taken.append(queue.popleft())
            try:
                self._write(tier, taken)
            except Exception:  # whatever it is, the thread lives on; what was taken counts as sent
                log.exception("kvsteward: writing to tier %s failed", tier.name)
            finally:
                with self._lock:
                    self._sent(number, taken)

    def _write(self, tier: Tier, taken: Sequence[_Outgoing | _Forget]) -> None:
        writes: list[Write] = []
        for item in taken:
            if isinstance(item, _Forget):
                session = item.session
                tier.forget_session(session, lambda keys, name=session: self.host.used_elsewhere(keys, name))  # type: ignore[misc]
            elif not item.slot.doomed:  # its session ended meanwhile
                parts = item.parts or self._parts(item)
                writes.append(Write(item.key, parts, item.session, item.expires_s))
        if writes:
            tier.write(writes)

    def _seal(self, slot: Slot, key: bytes, expires_s: float) -> None:
        slot.record[:HEADER_BYTES] = encode_header(
            key, slot.block, codec=Raw.number, raw_bytes=slot.block.nbytes, expires_s=expires_s
        )

    def _sent(self, number: int, items: Iterable[_Outgoing | _Forget]) -> None:
        done = []
        for item in items:
            self._pending[number] -= 1
            if isinstance(item, _Outgoing):
                item.left -= 1
                if not item.left:
                    item.parts = ()
                    done.append(item.slot)
        self.host.unpin(done)
        if not any(self._pending):
            self._idle.notify_all()

    def _unsent(self, number: int, items: Iterable[_Outgoing | _Forget]) -> None:
        left = list(items)
        self._counts.not_behind[self.tiers[number].name] += sum(isinstance(item, _Outgoing) for item in left)
        self._sent(number, left)

    # loading

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
            if any(ticket._result is None for ticket in waiting):
                wanted.append(key)
            else:
                del self._flying[key]
        return wanted

    def _ask(self, fetch: _Fetch) -> None:
        """Finds the nearest tier of each key, up to the first one that nobody has, and queues the reads."""
        where = dict.fromkeys(fetch.keys, -1)
        reason = Reason.ABSENT
        for number in range(fetch.tier, len(self.tiers)):
            unknown = [key for key in fetch.keys if where[key] < 0]
            if not unknown:
                break
            answer = self.tiers[number].holds(unknown)
            if isinstance(answer, Miss):
                self.tiers[number].missed(answer.reason)
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
        tier = self.tiers[fetch.tier]
        slots: dict[bytes, Slot] = {}
        landed: dict[bytes, Slot | None] = {}
        missed: dict[bytes, Reason] = {}
        again: list[bytes] = []
        try:
            for key in fetch.keys:
                slot = self.host.reserve(key)
                if slot is not None:
                    slots[key] = slot
                elif self.host.holds(key):
                    landed[key] = None
                else:
                    missed[key] = Reason.NO_ROOM
            if slots:
                answers = tier.read(list(slots), [slot.record for slot in slots.values()])
                for key, answer in zip(list(slots), answers, strict=True):
                    miss = self._unpack(tier, key, answer, slots[key])
                    if miss is None:
                        landed[key] = slots.pop(key)
                    elif fetch.tier + 1 < len(self.tiers):
                        again.append(key)
                    else:
                        missed[key] = miss.reason
        finally:
            for slot in slots.values():
                self.host.abandon(slot)
        with self._lock:
            self._counts.staged[tier.name] += sum(1 for slot in landed.values() if slot is not None)
            if again:
                self._fetches.append(_Fetch(again, fetch.tier + 1))
                self._to_load.notify_all()
        self._land(landed, missed)

    def _unpack(self, tier: Tier, key: bytes, answer: memoryview | Miss, slot: Slot) -> Miss | None:
        """Checks a record and puts its block into the slot."""
        record = decode(answer, key, now_s=self._wall()) if isinstance(answer, memoryview) else answer
        if not isinstance(record, Miss) and isinstance(answer, memoryview):
            codec = self._codecs.get(record.codec)
            if codec is None:
                record = Miss(Reason.CODEC, str(record.codec))
            elif record.raw_bytes != slot.block.nbytes or (
                codec.number == Raw.number and record.payload.nbytes != slot.block.nbytes
            ):
                record = Miss(Reason.SIZE, str(record.raw_bytes))
            else:
                in_place = answer.obj is slot.record.obj
                raw = codec.number == Raw.number
                try:
                    if not (in_place and raw):
                        codec.decode(memoryview(bytes(record.payload)) if in_place else record.payload, slot.block)
                except ValueError as error:
                    record = Miss(Reason.CODEC, str(error))
                else:
                    if raw and not in_place:
                        slot.record[:HEADER_BYTES] = answer[:HEADER_BYTES]
                    elif not raw and self._check_host:
                        self._seal(slot, key, record.expires_s)
                    self.host.commit(slot, expires_s=record.expires_s, sealed=raw or self._check_host)
                    return None
        assert isinstance(record, Miss)
        tier.missed(record.reason)
        if record.reason in DAMAGED and isinstance(answer, memoryview):
            log.warning("kvsteward: a record of tier %s is dropped: %s %s", tier.name, record.reason, record.detail)
            tier.forget([key])
        return record

    def _land(self, landed: dict[bytes, Slot | None], missed: dict[bytes, Reason]) -> None:
        """Tells the tickets. A slot that comes along is pinned once, and is let go here."""
        with self._lock:
            told: dict[Ticket, None] = {}
            for key, slot in landed.items():
                for ticket in self._flying.pop(key, ()):
                    if ticket._result is None:
                        held = self.host.pin(key)
                        if held is None:
                            self._miss(ticket, key, Reason.LATE)
                        else:
                            self.host.own(key, ticket.session)
                            ticket._held[key] = held
                        told[ticket] = None
                if slot is not None:
                    self.host.unpin([slot])
            for key, reason in missed.items():
                for ticket in self._flying.pop(key, ()):
                    if ticket._result is None:
                        self._miss(ticket, key, reason)
                        told[ticket] = None
            for ticket in told:
                self._advance(ticket)

    # the account

    def figures(self) -> StoreFigures:
        host, tiers = self.host.figures(), tuple(tier.figures() for tier in self.tiers)
        with self._lock:
            counts = self._counts
            return StoreFigures(
                host,
                tiers,
                counts.puts,
                counts.put_again,
                dict(counts.dropped),
                {name: n for name, n in counts.not_behind.items() if n},
                counts.host_hits,
                dict(counts.staged),
                counts.fetches_shared,
                dict(counts.misses),
                counts.served,
                dict(counts.not_served),
                {tier.name: self._pending[n] for n, tier in enumerate(self.tiers)},
                len(self._flying),
                len(self._tickets),
            )

    def check(self) -> None:
        """Raises InvariantError where the books do not add up."""
        self.host.check()
        with self._lock:
            if any(not 0 <= pending <= self._queue_blocks for pending in self._pending):
                raise InvariantError(f"{self._pending} blocks wait to be written, {self._queue_blocks} at most may")
            if len(self._flying) > self._load_blocks or len(self._tickets) > self._max_tickets:
                raise InvariantError(f"{len(self._flying)} keys in the air, {len(self._tickets)} tickets")
            for ticket in self._tickets:
                if ticket._settled > ticket._limit or any(
                    k not in ticket._held for k in ticket.keys[: ticket._settled]
                ):
                    raise InvariantError("a ticket counts blocks that it does not hold")

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that is queued for the lower tiers is written, `timeout_s` at most. Not for engine steps."""
        with self._lock:
            return self._drained(timeout_s)

    def _drained(self, timeout_s: float) -> bool:
        return self._idle.wait_for(lambda: not any(self._pending), timeout_s)

    def close(self, drain_s: float = 5.0) -> None:
        """Takes nothing more, writes what is queued for `drain_s` at most, drops the rest and ends the threads; one
        that a tier holds is left to itself after a second."""
        with self._lock:
            if self._stopping:
                return
            self._closed = True
            for ticket in self._tickets:
                if ticket._result is None:
                    self._settle(ticket)
            self._drained(drain_s)
            self._stopping = True
            self._fetches.clear()
            self._flying.clear()
            for item in self._seals:
                for number in item.tiers:
                    self._unsent(number, [item])
            self._seals.clear()
            for number, queue in enumerate(self._writes):
                self._unsent(number, queue)
                queue.clear()
            for condition in (self._to_load, self._to_seal, self._idle, *self._to_write):
                condition.notify_all()
        until = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for tier in self.tiers:
            tier.close()

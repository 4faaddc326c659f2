"""The block store: host memory in front, slower tiers behind, threads of its own between them.

Callers are engine steps, so none of their calls waits for a disk, a socket or another thread's copy: `put` copies into
host memory or drops, `stage` asks for blocks and `Ticket.poll` says what came (`bringing`), `get_into` copies out of
host memory or answers no. Writing to the lower tiers happens behind (`behind`); a full queue drops and counts. Only
`flush` and `close` wait, as long as they are told.

`clock` is monotonic (deadlines), `wall` Unix time (what expires). Invariant: one lock covers all books but the pool's,
whose own is only ever taken inside of it; everything that is held is bounded.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvsteward.errors import ConfigError
from kvsteward.kv.blocks.account import Counts, StoreFigures
from kvsteward.kv.blocks.behind import WriteBehind, seal
from kvsteward.kv.blocks.bringing import Bringing
from kvsteward.kv.blocks.codecs import Codec, Raw
from kvsteward.kv.blocks.copying import copy, copy_and_sum
from kvsteward.kv.blocks.fingerprint import DIGEST_BYTES, MAX_KEY_BYTES
from kvsteward.kv.blocks.host import HostPool, Slot
from kvsteward.kv.blocks.record import Reason, crc, payload_crc
from kvsteward.kv.blocks.tickets import Filling, Ticket
from kvsteward.kv.blocks.tier import Tier

MAX_TOLD = 4096
"""Sessions of which it is known what was told; of others all is told again."""
JOIN_S = 1.0
"""For threads that are in a call to a tier when the store is closed."""


class BlockStore:
    """`tiers` below the host pool, the nearest first. Every `put` is written to each of them. `codec` is how blocks are
    written there; `reads` are codecs of others that this store may meet besides. A lossy codec belongs into the
    fingerprint (`Fingerprint.codec`), so that nobody takes its blocks for exact ones.

    `queue_blocks` bounds the blocks that wait to be written to each tier, which are pinned meanwhile (default: half of
    the pool, 1,024 at most); `load_blocks` those that are being looked for; `batch_blocks` those of one read or write.
    `loaders` threads read, as many write as a tier can use, `sealers` encode and make checksums that no hardware makes.
    `check_host`: `get_into` checks the checksum again, which `put` makes (it does so too where hardware does
    it and blocks go down raw).
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
        self._check_host, self._wall = check_host, wall
        self._lock = threading.Lock()
        self._shared = any(tier.shared for tier in self.tiers)
        self._told: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        """Of each session how many blocks of its chain tiers were told of, and the last of them."""
        self._counts = Counts()
        self._closed = self._stopping = False
        written: Codec = codec or Raw()
        self._behind = WriteBehind(
            self._lock,
            host,
            self.tiers,
            written,
            self._counts.not_behind,
            queue_blocks=queue_blocks,
            batch_blocks=batch_blocks,
        )
        self._bringing = Bringing(
            self._lock,
            host,
            self.tiers,
            (Raw(), *reads, written),
            self._counts,
            load_blocks=load_blocks,
            batch_blocks=batch_blocks,
            max_tickets=max_tickets,
            seal_all=check_host,
            clock=clock,
            wall=wall,
        )
        self._threads: list[threading.Thread] = []
        if self.tiers:
            for name, run in (*self._bringing.threads(loaders), *self._behind.threads(sealers)):
                thread = threading.Thread(target=run, name=f"kvsteward-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    # for engine steps: looking and loading

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are in host memory now. Marks nothing as used."""
        return self.host.leading(keys)

    def touch(self, keys: Sequence[bytes], session: str | None = None) -> int:
        """Marks the keys, in the order of their chain, as used now and together: of them the last ones go first. Call
        it when a turn ends. Returns how many are in host memory."""
        self.use(keys, session or "")
        return self.host.touch(keys, session or "")

    def use(self, keys: Sequence[bytes], session: str) -> None:
        """Tells tiers that others share that the session uses the blocks of this chain, wherever they lie, so that the
        end of a session elsewhere leaves them. Costs nothing for what of a chain was told before; where a queue is full
        it is told with the next turn."""
        if not self._shared or not session or not keys:
            return
        with self._lock:
            count, last = self._told.pop(session, (0, b""))
            if count > len(keys) or (count and keys[count - 1] != last):  # another branch
                count = 0
            if count == len(keys) or (not self._closed and self._behind.use_locked(session, keys[count:])):
                count, last = len(keys), keys[-1]
            if count:
                self._told[session] = (count, last)
            while len(self._told) > MAX_TOLD:
                self._told.popitem(last=False)

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
        return self._bringing.stage(keys, deadline_s, session or "", lower=lower)

    def get_into(self, key: bytes, out: memoryview) -> bool:
        """Copies a block out of host memory; False where it is not there. Raises ValueError on another size."""
        out = memoryview(out).cast("B")
        if out.nbytes != self.host.block_bytes:
            raise ValueError(f"{out.nbytes} bytes for a block of {self.host.block_bytes}")
        slot = self.host.pin(key)
        if slot is None:
            return self._served(Reason.ABSENT)
        try:
            copy(out, slot.block)
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
        if self._check_host or self._behind.inline:
            filling.commit(copy_and_sum(filling.block, block, crc()))
        else:
            copy(filling.block, block)
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

    def commit(self, slot: Slot, session: str, ttl_s: float | None, crc: int | None) -> bool:
        """For `Filling`: the slot is full. True where it was queued for every lower tier."""
        expires_s = self._wall() + ttl_s if ttl_s is not None else 0.0
        sealed = self._check_host or crc is not None
        if sealed:
            seal(slot, slot.key, expires_s, crc)
        self.host.commit(slot, session=session, expires_s=expires_s, sealed=sealed)
        with self._lock:
            went = self._behind.send_locked(slot, session, expires_s, closed=self._closed)
        if not went:
            self.host.unpin([slot])
        return len(went) == len(self.tiers)

    def abandon(self, slot: Slot) -> None:
        """For `Filling`: the slot is given back unused."""
        self.host.abandon(slot)

    def forget(self, keys: Iterable[bytes]) -> int:
        """Drops blocks from host memory. Returns how many."""
        return self.host.forget(keys)

    def forget_session(self, session: str) -> int:
        """The session is over: drops its blocks that no other session used, here at once and behind in the lower tiers;
        in a tier that others share, no session of theirs either.

        Returns how many went in host memory. Where a tier's queue is full its blocks stay until they expire or are
        evicted.
        """
        dropped = self.host.forget_session(session)
        with self._lock:
            self._told.pop(session, None)
            if not self._closed:
                self._behind.forget_locked(session)
        return dropped

    # the account

    def figures(self) -> StoreFigures:
        host, tiers = self.host.figures(), tuple(tier.figures() for tier in self.tiers)
        with self._lock:
            return self._counts.figures(host, tiers, self._behind.pending_locked(), *self._bringing.counts_locked())

    def check(self) -> None:
        """Raises InvariantError where the books do not add up."""
        self.host.check()
        with self._lock:
            self._behind.check_locked()
            self._bringing.check_locked()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that is queued for the lower tiers is written, `timeout_s` at most. Not for engine steps."""
        with self._lock:
            return self._behind.drained_locked(timeout_s)

    def close(self, drain_s: float = 5.0) -> None:
        """Takes nothing more, writes what is queued for `drain_s` at most, drops the rest and ends the threads; one
        that a tier holds is left to itself after a second."""
        with self._lock:
            if self._stopping:
                return
            self._closed = True
            self._bringing.close_locked()
            self._behind.drained_locked(drain_s)
            self._stopping = True
            self._bringing.stop_locked()
            self._behind.stop_locked()
        until = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for tier in self.tiers:
            tier.close()

"""The store over a tier whose faults the test makes: what callers may rely on."""

from __future__ import annotations

import threading
import time

import pytest
from memory_tier import MemoryTier
from support import BLOCK_BYTES, PATIENCE_S, block, keys, loaded, wait

from kvsteward.errors import ConfigError
from kvsteward.kv.blocks import BlockStore, HostPool, Reason
from kvsteward.kv.blocks.copying import PIECE_BYTES, SMALL_BYTES
from kvsteward.kv.blocks.int8 import Int8
from kvsteward.kv.blocks.lossless import Lossless
from kvsteward.kv.blocks.record import Record, decode

KEYS = keys(20)
BLOCKS = [block(key) for key in KEYS]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fill(store: BlockStore, count: int, session: str | None = None, first: int = 0) -> None:
    for n in range(first, first + count):
        assert store.put(KEYS[n], memoryview(BLOCKS[n]), session)
        assert store.flush(PATIENCE_S)


def below(make, tier: MemoryTier, count: int, **options) -> BlockStore:
    """A store whose blocks are in the tier only."""
    store = make([tier], **options)
    fill(store, count)
    store.host.clear()
    return store


def test_what_was_put_comes_back(make):
    store = make()
    assert store.put(KEYS[0], memoryview(BLOCKS[0]))
    out = bytearray(BLOCK_BYTES)
    assert store.get_into(KEYS[0], memoryview(out))
    assert out == BLOCKS[0]
    assert not store.get_into(KEYS[1], memoryview(out))
    assert store.lookup(KEYS) == 1
    figures = store.figures()
    assert (figures.puts, figures.served, figures.not_served) == (1, 1, {"absent": 1})


def test_a_block_of_another_size_is_a_fault_of_the_caller(make):
    store = make()
    with pytest.raises(ValueError, match="10 bytes"):
        store.put(KEYS[0], memoryview(bytes(10)))
    with pytest.raises(ValueError, match="10 bytes"):
        store.get_into(KEYS[0], memoryview(bytearray(10)))


def test_a_key_that_no_record_can_have_is_a_fault_of_the_caller(make):
    store = make()
    for wrong in (b"", b"d" * 16, b"d" * 65):
        with pytest.raises(ValueError, match="a key of"):
            store.put(wrong, memoryview(BLOCKS[0]))
    assert store.host.figures().used == 0


@pytest.mark.parametrize("inline", [True, False], ids=["one thread", "two threads"])
def test_checksums_are_made_where_they_are_cheap(make, monkeypatch, inline):
    """By the thread that writes, or by one of its own: the same records, in each of two tiers."""
    tiers = [MemoryTier("first"), MemoryTier("second")]
    store = make(tiers)
    monkeypatch.setattr(store._behind, "inline", inline)
    fill(store, 5)
    assert tiers[0].records == tiers[1].records
    store.host.clear()
    assert loaded(store, KEYS[:6]) == BLOCKS[:5]


def test_large_blocks_come_back_bit_for_bit_from_memory_of_each_kind():
    """They are copied and summed piece by piece, another way than small ones."""
    size = PIECE_BYTES + SMALL_BYTES + 1
    sources = [block(n, size) for n in range(4)]
    views = [
        memoryview(sources[0]),
        memoryview(bytearray(sources[1])),
        memoryview(b"x" + sources[2])[1:],
        memoryview(bytearray(sources[3])).toreadonly(),
    ]
    tier = MemoryTier()
    store = BlockStore(HostPool(size, 5 * (size + 8192)), [tier], queue_blocks=4)
    for name, view in zip(KEYS, views, strict=False):
        assert store.put(name, view)
    assert store.flush(PATIENCE_S)
    out = bytearray(size)
    for name, source in zip(KEYS, sources, strict=False):
        record = decode(memoryview(tier.records[name]), name, now_s=0.0)
        assert isinstance(record, Record) and record.payload == source
        assert store.get_into(name, memoryview(out))
        assert out == source
    store.host.clear()
    assert loaded(store, KEYS[:4]) == sources
    store.close(drain_s=0.0)
    store.check()


@pytest.mark.parametrize("codec", [None, Lossless(2), Lossless(2, "zstd")], ids=["raw", "deflate", "zstd"])
def test_blocks_go_down_and_come_back_bit_for_bit(make, codec):
    tier = MemoryTier()
    store = below(make, tier, 5, codec=codec)
    assert loaded(store, KEYS[:7]) == BLOCKS[:5]
    assert store.figures().staged == {"memory": 5}
    assert store.figures().misses == {"absent": 1}


def test_int8_is_read_as_int8_and_only_by_those_who_know_it(make):
    tier = MemoryTier()
    numbers = b"".join((0x3F80 + n % 64).to_bytes(2, "little") for n in range(BLOCK_BYTES // 2))
    store = make([tier], codec=Int8("bfloat16", 60))
    store.put(KEYS[0], memoryview(numbers))
    assert store.flush(PATIENCE_S)
    store.host.clear()
    (back,) = loaded(store, KEYS[:1])
    assert back != numbers
    assert max(abs(a - b) for a, b in zip(numbers[::2], back[::2], strict=True)) <= 2
    assert loaded(make([tier]), KEYS[:1]) == []
    assert tier.meter.misses == {Reason.CODEC: 1}
    assert tier.records  # sound, only not for that store


def test_a_block_that_the_codec_refuses_stays_in_host_memory(make):
    tier = MemoryTier()
    store = make([tier], codec=Int8("bfloat16", 60))
    store.put(KEYS[0], memoryview(b"\x80\x7f" * (BLOCK_BYTES // 2)))  # infinity
    assert store.flush(PATIENCE_S)
    assert store.lookup(KEYS[:1]) == 1
    assert not tier.records
    assert store.figures().not_behind == {"memory": 1}


def test_a_fault_in_a_codec_loses_what_it_was_for_and_no_more(make, caplog):
    class Faulty(Lossless):
        def encode(self, block):
            if block[0] == 0:
                raise RuntimeError("a fault in the codec")
            return super().encode(block)

    tier = MemoryTier()
    store = make([tier], codec=Faulty(2))
    store.put(KEYS[0], memoryview(bytes(BLOCK_BYTES)))
    store.put(KEYS[1], memoryview(b"\1" * BLOCK_BYTES))
    assert store.flush(PATIENCE_S)
    assert set(tier.records) == {KEYS[1]}
    assert "a fault in the codec" in caplog.text
    assert store.figures().not_behind == {"memory": 1}
    assert store.host.figures().pinned == 0


def test_no_call_waits_for_a_tier_that_hangs(make):
    """Each in a thread that must come back although every call into the tier hangs until the end."""
    tier = MemoryTier()
    store = make([tier], slots=8, queue_blocks=2, loaders=1)
    tier.gate.clear()
    out = memoryview(bytearray(BLOCK_BYTES))

    def step() -> None:
        for n in range(6):
            store.put(KEYS[n], memoryview(BLOCKS[n]), "s")
        ticket = store.stage(KEYS[6:9], 0.0)
        assert ticket.poll() == 0
        ticket.release()
        store.lookup(KEYS)
        store.touch(KEYS, "s")
        assert store.get_into(KEYS[0], out)
        store.pin(KEYS[:2]).release()
        store.forget(KEYS[2:3])
        store.forget_session("s")
        store.figures()
        store.check()

    caller = threading.Thread(target=step, daemon=True)
    caller.start()
    caller.join(PATIENCE_S)
    hung = caller.is_alive()
    tier.gate.set()
    assert not hung


def test_a_full_queue_drops_and_counts_and_the_block_stays_here(make):
    tier = MemoryTier()
    store = make([tier], slots=8, queue_blocks=2)
    tier.gate.clear()
    for n in range(5):
        assert store.put(KEYS[n], memoryview(BLOCKS[n]))
    store.check()
    assert store.figures().not_behind == {"memory": 3}
    assert store.figures().writing == {"memory": 2}
    assert store.lookup(KEYS) == 5
    tier.gate.set()
    assert store.flush(PATIENCE_S)
    assert set(tier.records) == set(KEYS[:2])


def test_the_end_of_a_session_overtakes_no_block_and_none_overtakes_it(make):
    """Also where several threads write to a tier: all that was put before is gone, all that came after is there."""
    tier = MemoryTier()
    tier.writers = 3
    store = make([tier], slots=20, batch_blocks=2)
    tier.gate.clear()
    for n in range(8):
        assert store.put(KEYS[n], memoryview(BLOCKS[n]), "s")
    for _ in range(3):
        assert tier.waiting.acquire(timeout=PATIENCE_S)  # three writes are under way at once
    store.forget_session("s")
    for n in range(8, 12):
        assert store.put(KEYS[n], memoryview(BLOCKS[n]), "s")
    tier.gate.set()
    assert store.flush(PATIENCE_S)
    assert set(tier.records) == set(KEYS[8:12])
    assert tier.sessions == {"s": set(KEYS[8:12])}


def test_a_pool_whose_blocks_all_wait_to_be_written_drops_puts(make):
    tier = MemoryTier()
    store = make([tier], slots=1, queue_blocks=5)
    tier.gate.clear()
    assert store.put(KEYS[0], memoryview(BLOCKS[0]))
    assert not store.put(KEYS[1], memoryview(BLOCKS[1]))
    assert store.figures().dropped == {"no_room": 1}
    tier.gate.set()
    assert store.flush(PATIENCE_S)
    assert store.put(KEYS[1], memoryview(BLOCKS[1]))


def test_a_pool_of_one_slot_that_is_pinned_loads_nothing_and_says_so(make):
    tier = MemoryTier()
    store = below(make, tier, 2, slots=1)
    held = store.stage(KEYS[:1], PATIENCE_S)
    assert wait(held) == 1
    other = store.stage(KEYS[1:2], PATIENCE_S)
    assert wait(other) == 0
    assert store.figures().misses == {"no_room": 1}
    other.release()
    held.release()
    assert loaded(store, KEYS[1:2]) == [BLOCKS[1]]


def test_a_deadline_ends_a_ticket_and_what_comes_late_stays_in_the_pool(make):
    clock = Clock()
    tier = MemoryTier()
    store = below(make, tier, 4, clock=clock, batch_blocks=2, loaders=1)
    while tier.waiting.acquire(blocking=False):
        pass
    tier.gate.clear()
    ticket = store.stage(KEYS[:4], 1.0)
    assert tier.waiting.acquire(timeout=PATIENCE_S)
    clock.now += 0.999
    assert ticket.poll() is None
    clock.now += 0.001
    assert ticket.poll() == 0
    assert store.figures().misses == {"late": 1}
    ticket.release()
    tier.gate.set()
    until = time.monotonic() + PATIENCE_S
    while store.figures().loading and time.monotonic() < until:
        time.sleep(0.001)
    assert tier.reads == []  # nobody waits any more, so nothing is read
    assert ticket.poll() == 0
    assert loaded(store, KEYS[:4]) == BLOCKS[:4]


def test_what_came_before_the_deadline_counts(make):
    clock = Clock()
    tier = MemoryTier()
    store = below(make, tier, 3, clock=clock)
    fill(store, 2)
    tier.gate.clear()
    ticket = store.stage(KEYS[:3], 1.0)
    assert ticket.poll() is None
    clock.now += 1.0
    assert ticket.poll() == 2
    assert [bytes(b) for b in ticket.blocks()] == BLOCKS[:2]
    ticket.release()
    tier.gate.set()


def test_two_stages_of_the_same_keys_fetch_once(make):
    tier = MemoryTier()
    store = below(make, tier, 6, loaders=2, batch_blocks=2)
    tier.gate.clear()
    one, two = store.stage(KEYS[:4], PATIENCE_S), store.stage(KEYS[:6], PATIENCE_S)
    tier.gate.set()
    assert (wait(one), wait(two)) == (4, 6)
    assert sorted(key for read in tier.reads for key in read) == sorted(KEYS[:6])
    assert store.figures().fetches_shared == 4
    one.release()
    assert [bytes(b) for b in two.blocks()] == BLOCKS[:6]
    two.release()


def test_a_ticket_holds_its_blocks_against_eviction_until_it_is_released(make):
    tier = MemoryTier()
    store = below(make, tier, 3, slots=4)
    ticket = store.stage(KEYS[:3], PATIENCE_S)
    assert wait(ticket) == 3
    for n in range(10, 14):
        store.put(KEYS[n], memoryview(BLOCKS[n]))
    assert store.lookup(KEYS[:3]) == 3
    assert [bytes(b) for b in ticket.blocks()] == BLOCKS[:3]
    ticket.release()
    ticket.release()
    assert ticket.blocks() == []
    assert store.flush(PATIENCE_S)
    for n in range(14, 18):
        store.put(KEYS[n], memoryview(BLOCKS[n]))
        assert store.flush(PATIENCE_S)
    assert store.lookup(KEYS[:1]) == 0


def test_a_missing_block_ends_the_prefix(make):
    tier = MemoryTier()
    store = below(make, tier, 5)
    del tier.records[KEYS[2]]
    assert loaded(store, KEYS[:5]) == BLOCKS[:2]
    assert sum(len(read) for read in tier.reads) == 2  # those behind it are not even read


def test_the_next_tier_has_what_the_first_has_lost(make):
    first, second = MemoryTier("first"), MemoryTier("second")
    store = make([first, second])
    fill(store, 4)
    store.host.clear()
    del first.records[KEYS[1]]
    damaged = bytearray(first.records[KEYS[2]])
    damaged[-1] ^= 1
    first.records[KEYS[2]] = bytes(damaged)
    assert loaded(store, KEYS[:4]) == BLOCKS[:4]
    assert store.figures().staged == {"first": 2, "second": 2}
    assert first.meter.misses == {Reason.CHECKSUM: 1}
    assert KEYS[2] not in first.records  # dropped, since nobody can use it


@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.ERROR, Reason.DOWN])
def test_a_tier_that_fails_is_a_miss_with_its_reason(make, reason):
    tier = MemoryTier()
    store = below(make, tier, 2)
    tier.broken = reason
    assert loaded(store, KEYS[:2]) == []
    assert store.figures().misses == {reason: 1}
    assert tier.records.keys() == set(KEYS[:2])


@pytest.mark.filterwarnings("error")
def test_a_fault_in_a_tier_loses_blocks_not_the_store(make, caplog):
    tier = MemoryTier()
    store = below(make, tier, 2)
    tier.crash = RuntimeError("a fault in the tier")
    assert loaded(store, KEYS[:2]) == []
    assert store.put(KEYS[3], memoryview(BLOCKS[3]))
    assert store.flush(PATIENCE_S)
    assert "a fault in the tier" in caplog.text
    tier.crash = None
    assert loaded(store, KEYS[:2]) == BLOCKS[:2]


def test_a_session_that_ends_gives_its_blocks_back_everywhere(make):
    tier = MemoryTier()
    store = make([tier])
    fill(store, 3, "a")
    fill(store, 2, "b", first=3)
    store.touch(KEYS[:1], "b")
    assert store.forget_session("a") == 2
    assert store.flush(PATIENCE_S)
    assert set(tier.records) == {KEYS[0], KEYS[3], KEYS[4]}
    assert store.host.sessions() == {"b": 3}


def test_blocks_of_a_session_that_ends_while_they_wait_are_not_written(make):
    tier = MemoryTier()
    store = make([tier])
    tier.gate.clear()
    store.put(KEYS[0], memoryview(BLOCKS[0]), "other")
    assert tier.waiting.acquire(timeout=PATIENCE_S)
    store.put(KEYS[1], memoryview(BLOCKS[1]), "a")
    store.forget_session("a")
    tier.gate.set()
    assert store.flush(PATIENCE_S)
    assert set(tier.records) == {KEYS[0]}
    assert store.host.figures().used == 1


def test_a_put_again_costs_nothing_and_makes_the_session_an_owner(make):
    tier = MemoryTier()
    store = make([tier])
    fill(store, 1, "a")
    assert store.put(KEYS[0], memoryview(BLOCKS[0]), "b")
    assert store.figures().put_again == 1
    assert store.forget_session("a") == 0
    assert store.lookup(KEYS) == 1


def test_a_time_to_live_holds_here_and_below(make):
    clock = Clock()
    tier = MemoryTier()
    store = make([tier], wall=clock)
    store.put(KEYS[0], memoryview(BLOCKS[0]), ttl_s=10)
    assert store.flush(PATIENCE_S)
    clock.now += 9
    assert store.lookup(KEYS) == 1
    store.host.clear()
    assert loaded(store, KEYS[:1]) == [BLOCKS[0]]
    clock.now += 1
    assert store.lookup(KEYS) == 0  # what came back expires too
    assert loaded(store, KEYS[:1]) == []
    assert tier.meter.misses == {Reason.EXPIRED: 1}


def test_a_filled_slot_is_seen_only_when_it_is_committed(make):
    store = make()
    filling = store.open_put(KEYS[0], "a")
    assert store.lookup(KEYS) == 0
    assert store.open_put(KEYS[0]) is None
    filling.block[:] = BLOCKS[0]
    filling.commit()
    filling.abandon()
    assert store.lookup(KEYS) == 1
    other = store.open_put(KEYS[1])
    other.abandon()
    other.commit()
    assert store.lookup(KEYS[1:]) == 0
    assert store.host.figures().used == 1


def test_close_writes_what_waits_for_as_long_as_it_may(make):
    tier = MemoryTier()
    store = make([tier])
    for n in range(2):
        store.put(KEYS[n], memoryview(BLOCKS[n]))
    store.close(drain_s=PATIENCE_S)
    assert set(tier.records) == set(KEYS[:2])
    assert not store.put(KEYS[2], memoryview(BLOCKS[2]))
    assert store.stage(KEYS[:1], 1.0).poll() == 0
    assert store.figures().dropped == {"closed": 1}


def test_close_gives_up_on_a_tier_that_hangs(make):
    tier = MemoryTier()
    store = make([tier], queue_blocks=3)
    tier.gate.clear()
    for n in range(3):
        store.put(KEYS[n], memoryview(BLOCKS[n]))
    waiting = store.stage(KEYS[5:6], 1000.0)
    closer = threading.Thread(target=store.close, args=(0.01,), daemon=True)
    closer.start()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert waiting.poll() == 0
    waiting.release()
    tier.gate.set()


def test_bounds_are_kept_and_counted(make):
    tier = MemoryTier()
    store = below(make, tier, 6, load_blocks=4, max_tickets=2)
    tier.gate.clear()
    one = store.stage(KEYS[:6], PATIENCE_S)
    two = store.stage(KEYS[10:11], PATIENCE_S)
    refused = store.stage(KEYS[:1], PATIENCE_S)
    assert refused.poll() == 0
    refused.release()
    store.check()
    assert store.figures().misses == {"busy": 3}
    tier.gate.set()
    assert wait(one) == 4
    assert wait(two) == 0
    one.release()
    two.release()


def test_a_changed_bit_in_host_memory_is_found_where_that_is_asked_for(make):
    store = make(check_host=True)
    store.put(KEYS[0], memoryview(BLOCKS[0]))
    out = memoryview(bytearray(BLOCK_BYTES))
    assert store.get_into(KEYS[0], out)
    slot = store.host.pin(KEYS[0])
    slot.block[17] ^= 4
    store.host.unpin([slot])
    assert not store.get_into(KEYS[0], out)
    assert store.figures().not_served == {"checksum": 1}
    assert store.lookup(KEYS) == 0


def test_a_loaded_block_is_checked_in_host_memory_too(make):
    for codec in (None, Lossless(2)):
        tier = MemoryTier()
        store = make([tier], check_host=True, codec=codec)
        numbers = bytes(BLOCK_BYTES)
        store.put(KEYS[0], memoryview(numbers))
        assert store.flush(PATIENCE_S)
        store.host.clear()
        assert loaded(store, KEYS[:1]) == [numbers]
        slot = store.host.pin(KEYS[0])
        slot.block[17] ^= 4
        store.host.unpin([slot])
        assert not store.get_into(KEYS[0], memoryview(bytearray(BLOCK_BYTES)))


def test_many_threads_at_once(make):
    """Puts, stages, reads and ends of sessions from four threads over a pool that is too small: right bytes or none."""
    tier = MemoryTier()
    store = make([tier], slots=6, queue_blocks=3, batch_blocks=2)
    wrong: list[str] = []

    def work(number: int) -> None:
        out = memoryview(bytearray(BLOCK_BYTES))
        for turn in range(100):
            first = (number * 5 + turn) % 16
            for n in range(first, first + 4):
                store.put(KEYS[n], memoryview(BLOCKS[n]), f"s{number}")
            if turn % 2:
                store.forget(KEYS[first : first + 4])
            ticket = store.stage(KEYS[first : first + 4], 0.02)
            while ticket.poll() is None:
                time.sleep(0.0005)
            if [bytes(b) for b in ticket.blocks()] != BLOCKS[first : first + (ticket.poll() or 0)]:
                wrong.append(f"staged {number} {turn}")
            if store.get_into(KEYS[first], out) and out != BLOCKS[first]:
                wrong.append(f"read {number} {turn}")
            ticket.release()
            if turn % 7 == 0:
                store.forget_session(f"s{number}")
            store.check()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert store.flush(PATIENCE_S)
    assert store.host.figures().pinned == 0
    assert store.figures().tickets == 0
    assert store.figures().staged["memory"] > 10


def test_settings_that_cannot_work_are_refused():
    host = HostPool(BLOCK_BYTES, 8 * 4096)
    for options in ({"queue_blocks": 0}, {"load_blocks": 0}, {"batch_blocks": 0}, {"loaders": 0}, {"max_tickets": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            BlockStore(host, **options)
    with pytest.raises(ConfigError, match="same name"):
        BlockStore(host, [MemoryTier(), MemoryTier()])

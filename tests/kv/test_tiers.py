"""What is planned in the scheduler's process and copied in the workers': on a small engine whose blocks are plain bytes.

The engine does what vLLM does around a connector: it takes leading blocks that it has, asks for more, allocates, runs a
step, hears what became of it, frees. What a block must hold follows from its hash, so any wrong copy is seen.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsteward.errors import ConfigError
from kvsteward.kv.blocks import Fingerprint
from kvsteward.kv.blocks.cost import LoadOrRecompute
from kvsteward.kv.blocks.record import Reason
from kvsteward.kv.vllm.copies import Place, Shape
from kvsteward.kv.vllm.loads import HOLD_S, TRY_AGAIN_S, Moves
from kvsteward.kv.vllm.options import GIB, Options, parse
from kvsteward.kv.vllm.segment import Segment, SegmentName
from kvsteward.kv.vllm.tiers import Tiers
from kvsteward.kv.vllm.worker import Report, Worker

PART = 48
TOKENS = 4
SLOT = 4096


def chain(session: str, blocks: int) -> list[bytes]:
    hashes = [hashlib.sha256(session.encode()).digest()]
    while len(hashes) < blocks:
        hashes.append(hashlib.sha256(hashes[-1]).digest())
    return hashes


def content(block_hash: bytes, rank: int) -> bytes:
    return hashlib.shake_128(block_hash + bytes([rank])).digest(PART)


class ByteCopies:
    """Copies between blocks that are bytes and the real shared memory; `fail` makes the next copies fail."""

    def __init__(self, rank: int) -> None:
        self.shape = Shape(
            part_bytes=PART, layers=1, heads=1, row=1, dtype="x", value_bytes=1, digest="d", backends="plain"
        )
        self.blocks: dict[int, bytes] = {}
        self.rank, self.fail = rank, 0
        self.place: Place | None = None
        self.view: memoryview | None = None

    def attach(self, place: Place) -> None:
        self.place = place
        self.view = self.view or Segment.attach(place.segment).view

    def _at(self, slot: int) -> slice:
        assert self.place
        start = slot * self.place.slot_bytes + self.place.offset_bytes
        return slice(start, start + PART)

    def _may(self) -> None:
        if self.fail:
            self.fail -= 1
            raise RuntimeError("the copy engine is on fire")

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._may()
        assert self.view
        for slot, block in pairs:
            self.blocks[block] = bytes(self.view[self._at(slot)])

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._may()
        assert self.view
        for slot, block in pairs:
            self.view[self._at(slot)] = self.blocks[block]


@dataclass(eq=False)
class Turn:
    request_id: str
    session: str
    hashes: list[bytes]
    num_tokens: int
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    output: int = 0
    block_ids: list[int] = field(default_factory=list)

    @property
    def block_hashes(self) -> list[bytes]:
        return self.hashes[: self.num_tokens // TOKENS]


class Engine:
    """`size` blocks, LRU. One step at a time, or `lag` steps whose results are not heard yet."""

    def __init__(
        self,
        size: int,
        *,
        slots: int = 32,
        ranks: int = 1,
        now: Callable[[], float] = time.monotonic,
        disk: Path | None = None,
        valkey: str | None = None,
        salt: str = "",
    ) -> None:
        self.copies = [ByteCopies(rank) for rank in range(ranks)]
        self.workers = [Worker(copies) for copies in self.copies]  # type: ignore[arg-type]
        shapes = {(0, rank): copies.shape for rank, copies in enumerate(self.copies)}
        options = Options(host_bytes=slots * SLOT, check=True, stage_within_s=5.0, salt=salt, valkey_url=valkey)
        if disk is not None:
            options = replace(options, disk_path=disk, disk_bytes=GIB)
        self.tiers = Tiers(options, shapes, fingerprint(ranks), now)
        self.tiers.loads.cost = LoadOrRecompute(PART * ranks, TOKENS, tokens_per_s=1.0)  # any wait is worth it
        self.free = list(range(size))
        self.cached: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.held: dict[int, int] = {}
        self.running: list[Turn] = []
        self.number = 0
        self.loaded = self.computed = 0

    def take(self, block: int) -> None:
        self.held[block] = self.held.get(block, 0) + 1
        if block in self.free:
            self.free.remove(block)

    def give(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.held[block] -= 1
            if not self.held[block]:
                self.free.append(block)

    def fresh(self) -> int | None:
        if not self.free:
            return None
        block = self.free.pop(0)
        old = self.hash_of.pop(block, None)
        if old is not None and self.cached.get(old) == block:
            del self.cached[old]
        self.held[block] = 1
        return block

    def begin(
        self, session: str, tokens: int, output: int = 3, ttl_s: float | None = None, text: str | None = None
    ) -> Turn:
        """`text`: sessions that say the same have the same blocks; without it each its own."""
        self.number += 1
        turn = Turn(f"r{self.number}", session, chain(text or session, 64), tokens, output=output)
        self.tiers.loads.began(turn, session, ttl_s)
        return turn

    def admit(self, turn: Turn) -> bool | None:
        """True where it runs now, None where it must ask again, False where there is no room."""
        local = []
        for block_hash in turn.block_hashes[: (turn.num_tokens - 1) // TOKENS]:
            if block_hash not in self.cached:
                break
            local.append(self.cached[block_hash])
        more = self.tiers.loads.matched(turn, len(local) * TOKENS)
        if more is None:
            return None
        assert more % TOKENS == 0
        assert len(local) * TOKENS + more < turn.num_tokens
        whole = -(-(turn.num_tokens + turn.output) // TOKENS)
        for block in local:
            self.take(block)
        if len(self.free) < whole - len(local):
            self.give(local)
            return False
        turn.block_ids = [*local, *[self.fresh() for _ in range(whole - len(local))]]  # type: ignore[list-item]
        turn.num_computed_tokens = len(local) * TOKENS + more
        self.tiers.loads.allocated(turn, turn.block_ids, more)
        self.running.append(turn)
        self.loaded += more
        return True

    def step(self, tokens: int = 8) -> None:
        scheduled = {t.request_id: min(tokens, t.num_tokens - t.num_computed_tokens) for t in self.running}
        by_id = {turn.request_id: turn for turn in self.running}
        for turn in self.running:
            self.cache(turn, turn.num_computed_tokens + scheduled[turn.request_id])
        moves = self.tiers.plan(scheduled, lambda request: by_id[request].block_ids)
        bad = self.run(moves, scheduled)
        self.uncache(bad)
        report = Report()
        for worker in self.workers:
            report.add(worker.report() or Report())
        for turn in list(self.running):
            before = turn.num_computed_tokens
            wrong = [n for n, block in enumerate(turn.block_ids) if block in bad and n * TOKENS < before]
            if wrong:
                turn.num_computed_tokens = wrong[0] * TOKENS
                continue
            turn.num_computed_tokens += scheduled[turn.request_id]
            if turn.num_computed_tokens == turn.num_tokens:
                turn.output -= 1
                if turn.output < 0:
                    self.end(turn)
                else:
                    turn.num_tokens += 1
        self.tiers.heard(report)
        self.tiers.store.check()

    def cache(self, turn: Turn, computed: int) -> None:
        for block_hash, block in list(zip(turn.block_hashes, turn.block_ids, strict=False))[: computed // TOKENS]:
            if block_hash not in self.cached and block not in self.hash_of:
                self.cached[block_hash] = block
                self.hash_of[block] = block_hash

    def uncache(self, bad: set[int]) -> None:
        """As `compat.uncache` does: the bad blocks, and those of running turns that come after one."""
        lost = set(bad)
        for turn in self.running:
            first = next((n for n, block in enumerate(turn.block_ids) if block in bad), len(turn.block_ids))
            lost.update(turn.block_ids[first:])
        for block in lost:
            block_hash = self.hash_of.pop(block, None)
            if block_hash is not None and self.cached.get(block_hash) == block:
                del self.cached[block_hash]

    def run(self, moves: Moves, scheduled: dict[str, int]) -> set[int]:
        bad: set[int] = set()
        places = self.tiers.places(moves)
        for rank, worker in enumerate(self.workers):
            if moves:
                worker.before(moves, places[(0, rank)] if places else None)
            worker.load(moves)
            bad |= worker.bad()
        for rank, (worker, copies) in enumerate(zip(self.workers, self.copies, strict=True)):
            for turn in self.running:
                end = turn.num_computed_tokens + scheduled[turn.request_id]
                for n, block in enumerate(turn.block_ids[: -(-end // TOKENS)]):
                    right = content(turn.hashes[n], rank)
                    if (n + 1) * TOKENS > turn.num_computed_tokens:  # computed in this step, or its last part
                        copies.blocks[block] = right
                    elif not bad:
                        assert copies.blocks[block] == right, f"block {n} of {turn.session} is wrong"
            worker.save(moves)
        return bad

    def end(self, turn: Turn, *, final: bool = False) -> None:
        self.tiers.loads.ended(turn, turn.block_ids, final=final)
        if turn in self.running:
            self.running.remove(turn)
            self.give(turn.block_ids)

    def forget_all(self) -> None:
        """Nothing is left in the pool and in host memory."""
        assert self.tiers.store.flush(10)
        self.tiers.store.host.clear()
        self.cached.clear()
        self.hash_of.clear()

    def whole_turn(self, session: str, tokens: int, output: int = 3, **said: Any) -> int:
        """Runs one turn alone; tokens that it loaded."""
        before, turn = self.loaded, self.begin(session, tokens, output, **said)
        while (admitted := self.admit(turn)) is None:
            self.step()
            time.sleep(0.0002)
        assert admitted
        while turn in self.running:
            self.step()
        return self.loaded - before


def fingerprint(ranks: int) -> Callable[[str], Fingerprint]:
    return lambda salt: Fingerprint(
        model="m", revision="", dtype="", layout="", block_tokens=TOKENS, block_bytes=PART * ranks, tenant_salt=salt
    )


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(size: int, **options: object) -> Engine:
        made.append(Engine(size, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.tiers.close()


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_left_the_pool_is_loaded_and_right(engines, ranks):
    engine = engines(9, ranks=ranks)
    assert engine.whole_turn("a", 30) == 0
    assert engine.whole_turn("b", 30) == 0
    assert engine.whole_turn("a", 30) == 28  # 7 whole blocks; the last token is always computed
    assert engine.whole_turn("a", 33) == 0  # all of it is in the pool
    counts = engine.tiers.loads.counts
    assert (counts.loads, counts.loaded_tokens, counts.lost, counts.no_slot) == (1, 28, 0, 0)


def test_a_prompt_of_whole_blocks_leaves_one_block_to_compute(engines):
    engine = engines(9)
    engine.whole_turn("a", 32)
    engine.whole_turn("b", 32)
    assert engine.whole_turn("a", 32) == 28


def test_each_block_is_saved_once(engines):
    engine = engines(32)
    for tokens in (20, 24, 30, 40):
        engine.whole_turn("a", tokens, output=2)
    assert engine.tiers.store.figures().puts == (40 + 2) // TOKENS


def test_blocks_that_were_given_up_below_are_saved_again_while_the_pool_has_them(engines):
    engine = engines(40, slots=8)
    engine.whole_turn("a", 25)
    engine.whole_turn("b", 33)
    assert engine.tiers.store.lookup([]) == 0
    engine.whole_turn("a", 25)
    assert engine.tiers.store.figures().puts > (28 + 36) // TOKENS


def test_a_final_turn_leaves_nothing(engines):
    engine = engines(9)
    turn = engine.begin("a", 30)
    engine.admit(turn)
    engine.step()
    engine.end(turn, final=True)
    assert engine.tiers.store.figures().host.used == 0
    engine.whole_turn("b", 30)
    assert engine.whole_turn("a", 30) == 0


def test_a_block_whose_hash_comes_after_its_last_step_is_saved_before_anything_is_written(engines):
    """As with async scheduling: the step that fills a block is planned before its last token is known."""
    engine = engines(9)
    loads, copies = engine.tiers.loads, engine.copies[0]
    turn = engine.begin("a", 8)
    turn.block_ids, turn.num_computed_tokens = [3, 4, 5], 8
    copies.blocks = {block: content(turn.hashes[n], 0) for n, block in enumerate(turn.block_ids)}
    assert len(loads.plan({turn.request_id: 4}, lambda _: turn.block_ids).saves) == 2
    turn.num_computed_tokens = turn.num_tokens = 12
    assert not loads.unsent
    loads.ended(turn, turn.block_ids, final=False)
    assert loads.unsent
    moves = engine.tiers.plan({}, lambda _: [])
    assert [block for _, block in moves.late] == [5]
    engine.workers[0].before(moves, engine.tiers.places(moves)[(0, 0)])
    copies.blocks[5] = b"written by the next step".ljust(PART)
    engine.workers[0].save(moves)
    engine.tiers.heard(engine.workers[0].report())
    slot = moves.late[0][0]
    pool = engine.tiers.store.host
    assert bytes(pool.slots[slot].block) == content(turn.hashes[2], 0)
    assert pool.slots[slot].ready
    assert not loads.unsent


def test_a_reset_forgets_what_was_about_to_be_saved(engines):
    engine = engines(9)
    turn = engine.begin("a", 12)
    turn.block_ids, turn.num_computed_tokens = [3, 4, 5], 12
    engine.tiers.loads.ended(turn, turn.block_ids, final=False)
    engine.tiers.reset()
    assert not engine.tiers.loads.unsent
    assert engine.tiers.store.figures().host.filling == 0


def test_what_is_not_to_be_kept_is_not_saved(engines):
    engine = engines(9)
    turn = engine.begin("a", 30, ttl_s=0)
    engine.admit(turn)
    while turn in engine.running:
        engine.step()
    assert engine.tiers.store.figures().puts == 0


def test_a_note_of_an_end_drops_what_a_session_left(engines):
    engine = engines(10)
    engine.whole_turn("a", 30)
    engine.tiers.loads.forget("a")
    assert engine.tiers.store.figures().host.used == 0


def test_a_load_that_fails_is_computed_and_nothing_wrong_is_saved(engines):
    engine = engines(9)
    engine.whole_turn("a", 30)
    engine.whole_turn("b", 30)
    engine.copies[0].fail = 1
    assert engine.whole_turn("a", 30) == 28
    assert engine.tiers.loads.counts.lost == 1
    engine.whole_turn("b", 30)
    assert engine.whole_turn("a", 30) == 28


def test_one_rank_that_fails_fails_the_step_of_all(engines):
    engine = engines(9, ranks=2)
    engine.whole_turn("a", 30)
    engine.whole_turn("b", 30)
    engine.copies[1].fail = 1
    engine.whole_turn("a", 30)
    assert engine.tiers.loads.counts.lost == 1
    engine.whole_turn("b", 30)
    engine.whole_turn("a", 30)


def test_a_save_that_fails_is_no_hit_later(engines):
    engine = engines(9)
    turn = engine.begin("a", 30, output=0)
    engine.admit(turn)
    engine.copies[0].fail = 1
    while turn in engine.running:
        engine.step(tokens=30)
    engine.whole_turn("b", 30)
    assert engine.whole_turn("a", 30) == 0


def test_a_worker_saves_nothing_until_the_scheduler_knows_of_a_failure():
    copies = ByteCopies(0)
    worker, segment = Worker(copies), Segment.create(4 * SLOT)  # type: ignore[arg-type]
    copies.blocks = {0: b"x" * PART, 1: b"y" * PART}
    copies.fail = 1
    place = Place(segment.name, 4, SLOT, 0)
    first = Moves(number=1, loads=[(0, 0)], saves=[(1, 1)])
    worker.before(first, place)
    worker.load(first)
    worker.save(first)
    assert worker.bad() == {0}
    worker.save(Moves(number=2, saves=[(2, 1)]))
    assert bytes(segment.view) == bytes(4 * SLOT)
    worker.save(Moves(number=3, saves=[(3, 1)], seen=1))
    assert bytes(segment.view[3 * SLOT : 3 * SLOT + PART]) == b"y" * PART
    report = worker.report()
    assert report is not None
    assert (report.done, report.failed) == ({3: 1}, {1: 1, 2: 1})
    assert worker.report() is None
    segment.close()


def test_what_was_promised_before_a_fault_is_reported_as_bad(engines):
    engine = engines(9)
    engine.whole_turn("a", 30)
    engine.whole_turn("b", 30)
    turn = engine.begin("a", 30)
    assert engine.admit(turn)
    engine.tiers.give_up(RuntimeError("a fault of ours"))
    moves = engine.tiers.rescue()
    assert sorted(moves.bad) == sorted(turn.block_ids[:7])
    assert not moves.loads
    worker = engine.workers[0]
    worker.load(moves)
    assert worker.bad() == set(turn.block_ids[:7])
    assert not engine.tiers.rescue()


def test_vllm_that_takes_more_than_was_pinned_is_told_so(engines):
    engine = engines(10)
    engine.whole_turn("a", 30)
    turn = engine.begin("a", 30)
    turn.block_ids = [1, 2, 3]
    engine.tiers.loads.allocated(turn, turn.block_ids, 2 * TOKENS)
    assert engine.tiers.rescue().bad == [1, 2]


def test_pins_of_a_request_that_gets_no_room_or_asks_no_more_are_let_go(engines):
    now = [0.0]
    engine = engines(10, now=lambda: now[0])
    engine.whole_turn("a", 30)
    engine.whole_turn("b", 30)
    turn = engine.begin("a", 30)
    assert engine.tiers.loads.matched(turn, 0) == 28
    assert engine.tiers.store.figures().host.pinned == 7
    engine.step()
    assert engine.tiers.store.figures().host.pinned == 0
    assert engine.admit(turn)
    aborted = engine.begin("b", 30)
    assert engine.tiers.loads.matched(aborted, 0) == 28
    engine.end(aborted)
    engine.end(turn)
    engine.step()
    figures = engine.tiers.store.figures()
    assert (figures.host.pinned, figures.host.filling, figures.tickets) == (0, 0, 0)
    assert HOLD_S > 0


def test_a_reset_makes_all_that_was_stored_useless(engines):
    engine = engines(9)
    engine.whole_turn("a", 30)
    engine.whole_turn("b", 30)
    engine.tiers.reset()
    assert engine.tiers.store.figures().host.used == 0
    assert engine.whole_turn("a", 30) == 0
    engine.whole_turn("b", 30)
    assert engine.whole_turn("a", 30) == 28


def test_a_pool_of_one_slot_and_one_full_of_pins_drop_and_count(engines):
    engine = engines(10, slots=1)
    engine.whole_turn("a", 30)
    engine.whole_turn("b", 30)
    engine.whole_turn("a", 30)
    assert engine.tiers.loads.counts.no_slot > 0


def test_a_request_whose_tokens_change_is_not_mixed_up(engines):
    engine = engines(20)
    turn = engine.begin("a", 30, output=0)
    engine.admit(turn)
    engine.step(tokens=16)
    turn.hashes = chain("other", 64)
    turn.num_computed_tokens = 0
    while turn in engine.running:
        engine.step()
    engine.free.sort()
    for block in list(engine.cached.values()):
        engine.hash_of.pop(block, None)
    engine.cached.clear()
    assert engine.whole_turn("other", 30) == 28


# below host memory


def test_what_left_host_memory_too_comes_back_from_below(engines, tmp_path):
    engine = engines(9, disk=tmp_path)
    engine.whole_turn("a", 30)
    engine.forget_all()
    assert engine.whole_turn("a", 30) == 28
    figures = engine.tiers.figures()
    assert figures["store"]["staged"] == {"disk": 7}
    assert figures["turns"] == 0
    assert engine.tiers.loads.counts.waits > 0


def test_the_end_of_a_session_leaves_what_sessions_of_another_replica_use(engines, valkey_server):
    a, b = (engines(20, valkey=valkey_server.url) for _ in range(2))
    a.whole_turn("s1", 30, text="the same")
    assert a.tiers.store.flush(10)
    assert b.whole_turn("s2", 30, text="the same") == 28
    assert b.tiers.store.flush(10)
    a.tiers.loads.forget("s1")
    assert a.tiers.store.flush(10)
    b.forget_all()
    assert b.whole_turn("not kept", 30, ttl_s=0, text="the same") == 28
    b.forget_all()
    assert b.whole_turn("s2", 30, text="the same") == 28
    b.tiers.loads.forget("s2")
    assert b.tiers.store.flush(10)
    assert valkey_server.client.keys() == []


def test_a_session_whose_turn_still_runs_uses_its_blocks_already(engines, valkey_server):
    a, b = (engines(20, valkey=valkey_server.url) for _ in range(2))
    a.whole_turn("s1", 30, text="the same")
    assert a.tiers.store.flush(10)
    turn = b.begin("s2", 30, text="the same")
    while b.admit(turn) is None:
        b.step()
        time.sleep(0.0002)
    assert b.tiers.store.flush(10)
    a.tiers.loads.forget("s1")
    assert a.tiers.store.flush(10)
    assert len(valkey_server.client.keys("kv:1:????????????????????????????????:0:*")) == 7
    b.end(turn)


def test_another_process_goes_on_from_what_was_written_unless_its_salt_differs(engines, tmp_path):
    for salt, loaded in (("", 0), ("", 28), ("other", 0), ("", 28)):
        engine = engines(9, disk=tmp_path, salt=salt)
        assert engine.whole_turn("a", 30) == loaded
        engine.tiers.close()


def test_a_block_that_is_below_is_not_written_again_and_one_that_was_lost_there_is(engines, tmp_path):
    engine = engines(40, slots=64, disk=tmp_path)
    engine.whole_turn("a", 30)
    assert engine.tiers.store.flush(10)
    puts = engine.tiers.store.figures().puts
    engine.tiers.store.host.clear()
    engine.whole_turn("a", 30)  # all in the pool, nothing in host memory
    assert engine.tiers.store.figures().puts == puts
    for path in tmp_path.glob("*/*"):
        path.unlink()
    engine.forget_all()
    assert engine.whole_turn("a", 30) == 0
    engine.forget_all()
    assert engine.whole_turn("a", 30) == 28


def test_blocks_that_come_too_late_are_computed(engines, tmp_path):
    now = [0.0]
    engine = engines(9, disk=tmp_path, now=lambda: now[0])
    engine.whole_turn("a", 30)
    engine.forget_all()
    gate = threading.Event()
    (disk,) = engine.tiers.store.tiers
    disk.read, read = lambda keys, rooms: gate.wait(30) and read(keys, rooms), disk.read
    turn = engine.begin("a", 30)
    engine.tiers.loads._within_s = 0.05
    assert engine.admit(turn) is None
    time.sleep(0.06)
    now[0] = 0.25
    assert engine.admit(turn) is True
    assert turn.num_computed_tokens == 0
    assert engine.tiers.loads.counts.longest_wait_s == 0.25
    gate.set()
    while turn in engine.running:
        engine.step()


def test_what_is_computed_faster_than_it_can_be_fetched_is_computed(engines, tmp_path):
    engine = engines(9, disk=tmp_path)
    engine.whole_turn("a", 30)
    engine.forget_all()
    engine.tiers.loads.cost = LoadOrRecompute(PART, TOKENS, latency_s=1.0, tokens_per_s=1000.0)
    waits = engine.tiers.loads.counts.waits
    assert engine.whole_turn("a", 30) == 0
    assert engine.tiers.loads.counts.waits == waits


def test_a_tier_that_was_slow_is_tried_again_later(engines, tmp_path):
    """What came late counts as slow, so the next turn does not wait; after a minute one tries, and finds it fast."""
    now = [0.0]
    engine = engines(9, disk=tmp_path, now=lambda: now[0])
    engine.whole_turn("a", 30)
    engine.forget_all()
    engine.tiers.loads.cost = LoadOrRecompute(PART, TOKENS, tokens_per_s=30.0)
    gate = threading.Event()
    (disk,) = engine.tiers.store.tiers
    disk.read, read = lambda keys, rooms: gate.wait(30) and read(keys, rooms), disk.read
    turn = engine.begin("a", 30)
    engine.tiers.loads._within_s = 0.05
    assert engine.admit(turn) is None
    time.sleep(0.06)
    now[0] += 2.0
    assert engine.admit(turn) is True
    while turn in engine.running:
        engine.step()
    gate.set()
    while engine.tiers.store.figures().loading:
        time.sleep(0.001)
    engine.tiers.loads._within_s = 5.0
    waits = engine.tiers.loads.counts.waits
    for pause_s, loaded in ((0.0, 0), (TRY_AGAIN_S - 3, 0), (1.0, 28), (0.0, 28)):
        now[0] += pause_s
        engine.forget_all()
        assert engine.whole_turn("a", 30) == loaded
        assert (engine.tiers.loads.counts.waits > waits) is bool(loaded)


def test_a_full_disk_and_one_that_forgets_cost_nothing_but_hits(engines, tmp_path):
    engine = engines(9, disk=tmp_path)
    (disk,) = engine.tiers.store.tiers
    disk.write = lambda writes: [Reason.FULL for _ in writes]
    engine.whole_turn("a", 30)
    engine.whole_turn("b", 30)
    assert engine.whole_turn("a", 30) == 28  # from host memory
    engine.forget_all()
    assert engine.whole_turn("a", 30) == 0
    assert engine.tiers.loads.counts.lost == 0


def damage(rng: random.Random, path: Path, other: Path) -> None:
    """One record is cut, bent, emptied, put in the place of another or longer than it was."""
    record = bytearray(path.read_bytes())
    kind = rng.randrange(6)
    if kind == 0:
        record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del record[rng.randrange(len(record)) :]
    elif kind == 2:
        record = bytearray(other.read_bytes())
    elif kind == 3:
        record += rng.randbytes(rng.randrange(1, 64))
    elif kind == 4:
        start = rng.randrange(len(record))
        record[start:] = rng.randbytes(len(record) - start)
    else:
        record.clear()
    path.write_bytes(record)


def test_a_thousand_damaged_records_are_a_thousand_misses(engines, tmp_path):
    """What is loaded ends before the damaged block; every block that a turn uses is right (the engine looks)."""
    rng = random.Random(11)
    engine = engines(40, slots=64, disk=tmp_path)
    engine.whole_turn("a", 30, output=0)
    for number in range(1000):
        engine.forget_all()
        paths = {
            bytes(block_hash): path for block_hash in chain("a", 7) for path in tmp_path.glob(f"*/*{block_hash.hex()}*")
        }
        assert len(paths) == 7
        broken = rng.randrange(7)
        order = [paths[block_hash] for block_hash in chain("a", 7)]
        damage(rng, order[broken], order[broken - 1])
        assert engine.whole_turn("a", 30, output=0) == broken * TOKENS, number
    misses = engine.tiers.figures()["store"]["tiers"][0]["misses"]
    damaged = {reason: n for reason, n in misses.items() if reason != "absent"}
    assert sum(damaged.values()) == 1000
    assert {"checksum", "truncated", "wrong_key"} <= damaged.keys()


@given(st.integers(0, 2**32), st.integers(1, 2), st.sampled_from([3, 12, 64]))
@settings(max_examples=60, deadline=None)
def test_random_sessions_never_see_wrong_blocks_and_leave_nothing_held(seed, ranks, slots):
    """Turns that finish, abort while they wait or run, end their session, and copies that fail, in any order."""
    rng = random.Random(seed)
    engine = Engine(24, slots=slots, ranks=ranks)
    waiting: list[Turn] = []
    lengths: dict[str, int] = {}
    try:
        for _ in range(80):
            act = rng.random()
            if act < 0.4:
                session = rng.choice("abcdefgh")
                lengths[session] = min(lengths.get(session, 8) + rng.randrange(9), 60)
                waiting.append(engine.begin(session, lengths[session], rng.randrange(5)))
            elif act < 0.5 and waiting:
                engine.end(waiting.pop(rng.randrange(len(waiting))), final=rng.random() < 0.3)
            elif act < 0.6 and engine.running:
                engine.end(rng.choice(engine.running), final=rng.random() < 0.3)
            elif act < 0.65:
                rng.choice(engine.copies).fail = 1
            elif act < 0.67:
                engine.tiers.reset()
            waiting = [turn for turn in waiting if not (len(engine.running) < 3 and engine.admit(turn))]
            engine.step(rng.choice([4, 8, 32]))
        for turn in [*waiting, *engine.running]:
            engine.end(turn)
        engine.step()
        engine.step()
        figures = engine.tiers.store.figures()
        assert (figures.host.pinned, figures.host.filling, figures.tickets) == (0, 0, 0)
        assert len(engine.free) == 24
        assert not any(engine.held.values())
    finally:
        engine.tiers.close()


# options and shared memory


def test_options_are_read():
    options = parse(
        {"host_gib": 2, "disk_path": "/d", "disk_gib": 0.5, "valkey_url": "valkey://h", "stage_within_s": 1}
    )
    assert (options.host_bytes, options.disk_bytes, options.stage_within_s) == (2 * GIB, GIB // 2, 1.0)
    assert options.tiers
    assert not parse({"reorder_s": 0, "check": True}).tiers
    assert parse({"host_bytes": 5}).host_bytes == 5


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"host_gb": 2}, "unknown options: host_gb"),
        ({"host_gib": -1}, "host_gib must be a number"),
        ({"host_gib": True}, "host_gib must be a number"),
        ({"host_gib": "2"}, "host_gib must be a number"),
        ({"host_gib": 1, "host_bytes": 1}, "give one of them"),
        ({"check": "yes"}, "check must be true or false"),
        ({"valkey_url": "valkey://h"}, "needs host memory"),
        ({"disk_path": "/d", "host_gib": 1}, "both disk_path and disk_gib"),
        ({"disk_gib": 1, "host_gib": 1}, "both disk_path and disk_gib"),
        ({"salt": 5, "host_gib": 1}, "salt must be text"),
        ({"host_gib": 1, "valkey_url": "valkey://h", "codec": "zip"}, "codec 'zip' is unknown"),
        ({"host_gib": 1, "codec": "int8"}, "neither is there"),
        ({"host_gib": 1, "valkey_cluster": True}, "needs a valkey_url"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(extra, says):
    with pytest.raises(ConfigError, match=says):
        parse(extra)


def test_shared_memory_is_the_same_in_both_and_gone_after_its_maker_closes_it():
    made = Segment.create(8192)
    found = Segment.attach(made.name)
    made.view[5] = 7
    assert found.view[5] == 7
    name = made.name
    made.close()
    made.close()
    assert found.view[5] == 7
    with pytest.raises(ConfigError, match="cannot be opened"):
        Segment.attach(name)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Segment.attach(SegmentName(2**22 - 1, 3, 4096))

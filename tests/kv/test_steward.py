"""Hints, and which session's blocks go first in a pool like vLLM's."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.errors import ProtocolError
from kvsteward.kv.vllm.hints import FIELD, Told, parse
from kvsteward.kv.vllm.snapshot import labelled, listed, snapshot
from kvsteward.kv.vllm.steward import MAX_RANKED, Steward
from kvsteward.policy.guard import RATIO
from kvsteward.policy.retention import Hint


@dataclass(eq=False)
class Block:
    block_id: int
    prev_free_block: Any = None
    next_free_block: Any = None


@dataclass
class Pool:
    """Turns of whole blocks on a steward; a session's blocks are its path, head first."""

    size: int
    now: float = 0.0
    reorder_s: float = 0.0
    paths: dict[str, list[Block]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks = [Block(i) for i in range(self.size)]
        self.steward = Steward(blocks, lambda: self.now, block_tokens=16, reorder_s=self.reorder_s)
        self.turn_number = 0

    def turn(self, session: str, blocks: int, told: Told | None = None, pause_s: float = 1.0) -> int:
        """One turn; returns how many blocks it reused. The same ids in a path mean that nothing took them since."""
        told = told or Told()
        self.turn_number += 1
        request, free = f"r{self.turn_number}", self.steward.free
        self.steward.began(request, session)
        self.steward.step()
        path, reused = self.paths.get(session, []), []
        where = {b.block_id for b in free.get_all_free_blocks()}
        for block in path[:blocks]:
            if block.block_id not in where or self.lost(session, block):
                break
            reused.append(block)
        for block in reused:
            free.remove(block)
        self.steward.matched([(session, i) for i in range(blocks)], len(reused))
        fresh = free.popleft_n(blocks - len(reused))
        for block in fresh:
            for other in self.paths.values():
                if block in other:
                    del other[other.index(block) :]
        used = [*reused, *fresh]
        self.paths[session] = list(used)
        self.now += 0.5
        self.steward.ended(request, session, told, "stopped", [b.block_id for b in used])
        free.append_n(used[::-1])
        free.check()
        assert free.num_free_blocks == self.size
        self.now += pause_s
        return len(reused)

    def path(self, session: str) -> list[Block]:
        """What it has in the pool, from the head on."""
        return self.paths.get(session, [])

    def lost(self, session: str, block: Block) -> bool:
        return block not in self.paths[session]


def test_a_session_is_reused_and_figures_say_what_it_holds():
    pool = Pool(10)
    assert pool.turn("a", 3) == 0
    assert pool.turn("a", 4) == 3
    figures = pool.steward.figures()
    assert figures.sessions == {"a": 4}
    assert figures.tokens("a") == 64
    assert figures.turns == 2


def test_a_final_session_gives_its_blocks_first_though_it_is_the_newest():
    pool = Pool(8)
    pool.turn("a", 4)
    pool.turn("b", 4, Told(Hint(final=True)))
    pool.turn("c", 4)
    assert pool.turn("a", 4) == 4


def test_a_final_note_releases_at_once_and_shared_blocks_stay_in_line():
    pool = Pool(9)
    pool.turn("a", 4)
    pool.turn("b", 4)
    pool.steward.note("b", Told(Hint(final=True), note=True))
    figures = pool.steward.figures()
    assert figures.sessions == {"a": 4}
    assert (figures.released, figures.free_blocks) == (1, 9)
    first = [block.block_id for block in pool.steward.free.get_all_free_blocks()]
    assert first[1:5] == [block.block_id for block in pool.paths["b"]][::-1], "after the one that holds nothing"
    pool.turn("c", 4)
    assert pool.turn("a", 4) == 4


def test_a_session_that_was_said_to_be_over_and_goes_on_is_kept_as_before():
    pool = Pool(8)
    pool.turn("b", 4)
    pool.turn("a", 4)
    pool.steward.note("a", Told(Hint(final=True), note=True))
    pool.steward.began("queued", "a")
    assert pool.steward.figures().sessions == {"a": 4, "b": 4}
    pool.turn("c", 4)
    assert pool.turn("a", 4) == 4


def test_a_final_note_during_a_turn_is_old_news():
    pool = Pool(8)
    pool.turn("a", 4)
    pool.steward.began("queued", "a")
    pool.steward.note("a", Told(Hint(final=True), note=True))
    assert pool.steward.figures().sessions == {"a": 4}


def test_what_is_released_goes_first_however_many_sessions_there_are():
    """A ranking looks at the oldest runs only; the newest one was released."""
    steward = Steward([Block(i) for i in range(MAX_RANKED + 8)], lambda: 0.0, block_tokens=16)
    for number in range(MAX_RANKED + 8):
        taken = steward.free.popleft_n(1)
        told = Told(Hint(final=number == MAX_RANKED + 7))
        steward.ended(f"r{number}", f"s{number}", told, "stopped", [taken[0].block_id])
        steward.free.append_n(taken)
    steward.step()
    assert steward.free.popleft() is taken[0]


def test_a_snapshot_names_the_largest_and_adds_up_the_others():
    pool = Pool(40)
    for number in range(8):
        pool.turn(f"s{number}", number + 1, pause_s=10)
    data = snapshot(pool.steward.figures(), 3, {"step": 0.25}, max_named=3)
    assert data["waits_s"] == {"step": 0.25}
    assert {name: blocks for name, (blocks, _) in data["sessions"].items()} == {"s7": 8, "s6": 7, "s5": 6}
    assert data["sessions"]["s7"][1] == 10.0
    assert data["others"] == [5, 1 + 2 + 3 + 4 + 5]
    assert labelled(data, 2) == ({"s7": 8, "s6": 7}, 6, 21)
    listing = listed({0: (100.0, data), 1: (90.0, data)}, 101.0)
    assert listing["totals"] == {"sessions": 13, "blocks": 72, "tokens": 72 * 16, "free_blocks": 80}
    assert listing["data"][0] == {"session": "s7", "blocks": 16, "tokens": 256, "idle_s": 11.0}
    assert listing["age_s"] == 11.0


def test_a_ttl_keeps_a_session_over_newer_ones_and_then_ends():
    pool = Pool(8)
    pool.turn("a", 4, Told(Hint(ttl_s=100)))
    pool.turn("b", 4)
    pool.turn("c", 4)
    assert pool.turn("a", 4, Told(Hint(ttl_s=5)), pause_s=50) == 4
    pool.turn("d", 4)
    assert pool.turn("a", 4) == 0


def test_ask_for_more_than_is_unprotected_is_given():
    pool = Pool(8)
    pool.turn("a", 8, Told(Hint(ttl_s=1000)))
    assert pool.turn("b", 8) == 0


def test_what_a_queued_turn_awaits_is_kept():
    pool = Pool(8)
    pool.turn("a", 4)
    pool.turn("b", 4)
    pool.steward.began("queued", "a")
    pool.turn("c", 4)
    assert pool.turn("a", 4) == 4


def test_a_note_of_a_slow_tool_lets_its_session_go_first():
    """`slow` always takes 1,000 s, `fast` 1 s; a note says which of the two the paused session waits for."""
    pool = Pool(8)
    for tool, pause_s in (("slow", 1000.0), ("fast", 1.0)):
        for _ in range(40):
            pool.turn(tool, 2, Told(stop="tool_calls", tools=(tool,)), pause_s=pause_s)
    pool.turn("x", 4)
    pool.turn("y", 4, pause_s=0)
    pool.steward.note("x", Told(stop="tool_calls", tools=("fast",), note=True))
    pool.steward.note("y", Told(stop="tool_calls", tools=("slow",), note=True))
    pool.now += 0.5
    pool.turn("z", 4, pause_s=0)
    assert pool.turn("x", 4) == 4


def test_round_robin_beyond_the_pool_is_reused_where_lru_reuses_nothing():
    """8 sessions of 10 blocks, 60 blocks: LRU always evicts just what comes next."""
    pool, lru = Pool(60, reorder_s=1e9), Pool(60)  # few runs are ranked in each step, whatever `reorder_s` says
    lru.steward.free.ranked_by(None)
    reused, by_lru = 0, 0
    for turn in range(8 * 12):
        reused += pool.turn(f"s{turn % 8}", 10)
        by_lru += lru.turn(f"s{turn % 8}", 10)
    assert by_lru == 0
    assert reused > 0.4 * 8 * 12 * 10


def lead_over_lru(turns: int, seed: int, *, guarded: bool) -> tuple[int, int]:
    """(blocks reused beyond those of LRU, blocks asked) where each turn is the worst one for what is learned: of the
    session of which LRU has most that the learned order has given up."""
    rng = random.Random(seed)
    pool, lru = Pool(40), Pool(40)
    lru.steward.free.ranked_by(None)
    if not guarded:
        pool.steward.matched = lambda followed, hits: None  # type: ignore[method-assign]
    lead = 0
    for _ in range(turns):
        worst = max(range(16), key=lambda i: (len(lru.path(f"s{i}")) - len(pool.path(f"s{i}")), rng.random()))
        pause_s = rng.choice([0.1, 1.0, 30.0, 600.0])
        lead += pool.turn(f"s{worst}", 5, pause_s=pause_s) - lru.turn(f"s{worst}", 5, pause_s=pause_s)
    return lead, 5 * turns


@pytest.mark.parametrize("seed", [1, 2])
def test_the_guard_bounds_what_an_adversary_can_take(seed):
    lead, asked = lead_over_lru(1500, seed, guarded=True)
    assert lead >= -(RATIO * asked + 2 * 40 + 5)


def test_without_the_guard_the_adversary_takes_more_than_that():
    lead, asked = lead_over_lru(1500, 1, guarded=False)
    assert lead < -(RATIO * asked + 2 * 40 + 5)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.integers(1, 10),
            st.builds(Hint, ttl_s=st.none() | st.floats(0, 50), final=st.booleans()),
            st.floats(0, 60),
        ),
        max_size=25,
    )
)
def test_any_turns_keep_the_totals_and_are_never_refused(turns):
    pool = Pool(12)
    for session, blocks, hint, pause_s in turns:
        pool.turn(session, blocks, Told(hint), pause_s)


def test_hints_are_read():
    body = {
        "version": 1,
        "class": "batch",
        "ttl_s": 5,
        "final": True,
        "stop": "tool_calls",
        "tools": ["t"],
        "note": True,
    }
    assert parse({FIELD: body}) == Told(Hint(5.0, True, "batch"), "tool_calls", ("t",), True)
    over = parse({FIELD: {"version": 1, "final": True, "session": "s"}})
    assert over.over
    assert over.session == "s"
    assert not parse({FIELD: {"version": 1, "final": True, "moved": True}}).over
    assert parse(None) == parse({"do_remote_prefill": True}) == parse({FIELD: {"version": 1}}) == Told()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"version": 2},
        {"version": 1, "ttl": 5},
        {"version": 1, "ttl_s": -1},
        {"version": 1, "ttl_s": float("nan")},
        {"version": 1, "final": "yes"},
        {"version": 1, "class": "urgent"},
        {"version": 1, "tools": "run"},
        {"version": 1, "tools": ["t"] * 17},
        {"version": 1, "stop": "x" * 129},
        {"version": 1, "session": 5},
        {"version": 1, "moved": "yes"},
        "final",
    ],
)
def test_wrong_hints_are_refused(body):
    with pytest.raises(ProtocolError):
        parse({FIELD: body})

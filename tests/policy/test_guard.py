"""The shadow is LRU; the margin follows from it."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvsteward.policy.guard import BANK, FOLLOWED, RATIO, Guard


def lru_hits(turns: list[list[int]], size: int) -> list[int]:
    """Hits of each turn in an LRU of single blocks: the run of blocks from the head that are there."""
    held: OrderedDict[int, None] = OrderedDict()
    found = []
    for blocks in turns:
        hits = 0
        while hits < len(blocks) and blocks[hits] in held:
            hits += 1
        found.append(hits)
        for block in reversed(blocks):
            held.pop(block, None)
            held[block] = None
        while len(held) > size:
            held.popitem(last=False)
    return found


TURNS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda t: [10 * t[0] + i for i in range(t[1])]), max_size=60
)


@given(TURNS, st.integers(1, 20))
def test_who_does_as_lru_never_loses_margin(turns, size):
    guard = Guard(size)
    for blocks, hits in zip(turns, lru_hits(turns, size), strict=True):
        before = guard.margin
        guard.turn(blocks, hits)
        assert guard.margin >= before or guard.margin == BANK * size
        assert not guard.lru


@given(TURNS, st.integers(1, 20), st.data())
def test_margin_is_what_was_reused_beyond_lru(turns, size, data):
    guard, margin = Guard(size), float(size)
    for blocks, by_lru in zip(turns, lru_hits(turns, size), strict=True):
        hits = data.draw(st.integers(0, len(blocks)))
        guard.turn(blocks, hits)
        margin = min(BANK * size, margin + hits - by_lru + RATIO * len(blocks))
        assert guard.margin == margin


def test_lru_is_used_from_a_lost_pool_on_until_a_pool_is_won_back():
    guard = Guard(10)
    guard.turn(range(10), 0)
    guard.turn(range(10), 0)
    assert not guard.lru
    guard.turn(range(10), 0)
    assert guard.lru
    fresh = 100
    while guard.margin < 10:
        assert guard.lru
        guard.turn(range(fresh, fresh + 5), 5)
        fresh += 5
    assert not guard.lru


def test_a_large_pool_is_followed_in_part():
    guard = Guard(100 * FOLLOWED)
    assert (guard.every, guard.size) == (100, FOLLOWED)
    guard.turn(range(3 * FOLLOWED), 0)
    assert len(guard._shadow) == FOLLOWED
    guard.clear()
    assert not guard._shadow

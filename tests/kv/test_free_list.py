"""The free list against a plain model of vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.errors import InvariantError
from kvsteward.kv.vllm.free_list import FreeList


@dataclass(eq=False)
class Block:
    block_id: int
    prev_free_block: Any = None
    next_free_block: Any = None


def blocks(n: int) -> list[Block]:
    return [Block(i) for i in range(n)]


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("pop"), st.integers(0, 12)),
        st.tuples(st.just("free"), st.integers(0, 12)),
        st.tuples(st.just("discard"), st.integers(0, 12)),
        st.tuples(st.just("use"), st.integers(0, 11)),
        st.tuples(st.just("refresh"), st.just(0)),
    ),
    max_size=60,
)


class Pool:
    """Plays calls on a free list and on a Python list that is vLLM's queue: front is next."""

    def __init__(self, size: int, free: FreeList, all_blocks: list[Block]) -> None:
        self.free, self.size = free, size
        self.stock: list[Block] = list(all_blocks)
        self.held: list[Block] = []

    def play(self, what: str, n: int, owner: str = "") -> list[int]:
        popped: list[Block] = []
        if what == "pop":
            popped = self.free.popleft_n(min(n, self.free.num_free_blocks))
            expected = [self.stock.pop(0) for _ in range(len(popped))]
            self.held += popped
            return [b.block_id for b in expected]
        if what in ("free", "discard"):
            back, self.held = self.held[:n], self.held[n:]
            if what == "free":
                if owner:
                    self.free.own([b.block_id for b in back], owner, lambda o: "shared:" + o)
                self.free.append_n(back)
                self.stock += back
            else:
                self.free.prepend_n(back)
                self.stock = back + self.stock
        if what == "use" and n < len(self.stock):
            block = self.stock.pop(n)
            self.free.remove(block)
            self.held.append(block)
        if what == "refresh":
            self.free.refresh()
        return []


@given(CALLS)
def test_without_ranking_it_is_vllms_own_order(calls):
    made = blocks(12)
    pool = Pool(12, FreeList(made), made)
    for what, n in calls:
        before = len(pool.held)
        expected = pool.play(what, n, owner="s" if n % 2 else "")
        assert [b.block_id for b in pool.held[before:]] == expected or what != "pop"
        pool.free.check()
    assert [b.block_id for b in pool.free.get_all_free_blocks()] == [b.block_id for b in pool.stock]


@given(CALLS, st.randoms())
def test_any_ranking_keeps_all_blocks_and_never_starves(calls, rng):
    made = blocks(12)
    free = FreeList(made)

    def rank(runs):
        """Repeats, leaves out and makes up runs."""
        numbers = [n for n in runs if rng.random() < 0.7] * 2 + [10_000]
        rng.shuffle(numbers)
        return numbers

    free.ranked_by(rank)
    held: list[Block] = []
    for what, n in calls:
        if what == "pop":
            popped = free.popleft_n(min(n, free.num_free_blocks))
            assert len(popped) == min(n, 12 - len(held))
            held += popped
        elif what in ("free", "discard"):
            back, held = held[:n], held[n:]
            free.own([b.block_id for b in back], "ab"[n % 2], lambda o: "shared:" + o)
            free.append_n(back) if what == "free" else free.prepend_n(back)
        elif what == "use" and free.num_free_blocks:
            block = free.get_all_free_blocks()[n % free.num_free_blocks]
            free.remove(block)
            held.append(block)
        free.check()
        ids = [b.block_id for b in free.get_all_free_blocks()] + [b.block_id for b in held]
        assert sorted(ids) == list(range(12))
        assert free.num_free_blocks + len(held) == 12


def test_the_ranked_run_goes_last_and_from_its_tail():
    made = blocks(6)
    free = FreeList(made)
    free.popleft_n(6)
    for owner, part in (("keep", made[:3]), ("drop", made[3:])):
        free.own([b.block_id for b in part], owner, str)
        free.append_n(part[::-1])
    free.ranked_by(lambda runs: sorted(runs, key=lambda n: runs[n].owner))
    assert [b.block_id for b in free.popleft_n(5)] == [5, 4, 3, 2, 1]


def test_a_failing_rank_leaves_vllms_order_and_is_told_once():
    made = blocks(4)
    free = FreeList(made)
    heard: list[Exception] = []
    free.on_fault(heard.append)
    free.ranked_by(lambda runs: [1 // 0])
    free.popleft_n(4)
    free.append_n(made)
    assert [free.popleft().block_id for _ in range(4)] == [0, 1, 2, 3]
    assert [type(e) for e in heard] == [ZeroDivisionError]


def test_blocks_of_several_owners_become_shared_until_they_are_given_up():
    made = blocks(2)
    free = FreeList(made)
    held = free.popleft_n(2)
    for owner in "ab":
        free.own([0], owner, lambda o: "shared:" + o)
        free.append_n([held[0]])
        (run,) = free.runs.values()
        assert run.owner == ("a" if owner == "a" else "shared:b")
        free.remove(held[0])
    free.append_n([held[0]])
    free.popleft_n(1)
    free.own([0], "c", lambda o: "shared:" + o)
    free.append_n([held[0]])
    assert [run.owner for run in free.runs.values()] == ["c"]


def test_faults_of_the_caller_are_raised():
    made = blocks(2)
    free = FreeList(made)
    held = free.popleft()
    with pytest.raises(RuntimeError, match="not free"):
        free.remove(held)
    with pytest.raises(ValueError, match="1 are free"):
        free.popleft_n(2)
    free.num_free_blocks += 1
    with pytest.raises(InvariantError):
        free.check()


def test_clear_makes_all_blank():
    made = blocks(3)
    free = FreeList(made)
    free.append_n(free.popleft_n(2))
    free.clear()
    free.check()
    assert not free.runs
    assert free.num_free_blocks == 3

"""The host pool: the books add up whatever is done, and nobody loses a block that is in use."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from support import BLOCK_BYTES, block, keys

from kvsteward.errors import ConfigError, InvariantError
from kvsteward.kv.blocks import LRU, HostPool, Ranked
from kvsteward.kv.blocks.host import MAX_OWNERS

KEYS = keys(12)
SLOT_BYTES = 4096


def pool(slots: int = 4, **options) -> HostPool:
    return HostPool(BLOCK_BYTES, slots * SLOT_BYTES, **options)


def put(pool: HostPool, key: bytes, session: str = "", content: bytes | None = None) -> bool:
    slot = pool.reserve(key)
    if slot is None:
        return False
    slot.block[:] = content or block(key)
    pool.commit(slot, session=session)
    pool.unpin([slot])
    return True


def there(pool: HostPool) -> list[int]:
    return [n for n, key in enumerate(KEYS) if pool.leading([key])]


class HostPoolMachine(RuleBasedStateMachine):
    """Against a model: what was committed and not given up is there with its bytes; what is pinned cannot go."""

    pins = Bundle("pins")
    fillings = Bundle("fillings")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.random = random.Random(0)
        self.pool = pool(4, clock=lambda: self.now)
        self.pinned: dict[int, int] = {}
        self.content: dict[bytes, bytes] = {}

    @rule(key=st.sampled_from(KEYS), target=fillings)
    def reserve(self, key):
        slot = self.pool.reserve(key)
        if slot is None:
            return multiple()
        assert self.pinned.get(slot.index, 0) == 0
        slot.block[:] = self.random.randbytes(BLOCK_BYTES)
        return slot

    @rule(
        slot=consumes(fillings), session=st.sampled_from(["", "a", "b"]), ttl=st.sampled_from([0.0, 3.0]), target=pins
    )
    def commit(self, slot, session, ttl):
        self.content[slot.key] = bytes(slot.block)
        self.pool.commit(slot, session=session, expires_s=self.now + ttl if ttl else 0.0)
        self.pinned[slot.index] = 1
        return slot

    @rule(slot=consumes(fillings))
    def abandon(self, slot):
        self.pool.abandon(slot)

    @rule(
        keys=st.lists(st.sampled_from(KEYS), max_size=5, unique=True),
        session=st.sampled_from(["", "a", "b"]),
        target=pins,
    )
    def pin(self, keys, session):
        slots = self.pool.pin_leading(keys, session)
        for slot in slots:
            self.pinned[slot.index] = self.pinned.get(slot.index, 0) + 1
        return multiple(*slots)

    @rule(slot=consumes(pins))
    def unpin(self, slot):
        self.pool.unpin([slot])
        self.pinned[slot.index] -= 1

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5, unique=True))
    def touch(self, keys):
        assert self.pool.touch(keys, "a") <= len(keys)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
    def forget(self, keys):
        self.pool.forget(keys)
        assert self.pool.leading(keys) == 0

    @rule(session=st.sampled_from(["a", "b"]))
    def forget_session(self, session):
        self.pool.forget_session(session)
        assert session not in self.pool.sessions()

    @rule()
    def clear(self):
        self.pool.clear()

    @rule(seconds=st.floats(0, 5))
    def pass_time(self, seconds):
        self.now += seconds

    @invariant()
    def the_books_add_up(self):
        self.pool.check()
        figures = self.pool.figures()
        assert figures.used <= figures.slots == 4
        assert figures.pinned == sum(1 for count in self.pinned.values() if count)

    @invariant()
    def what_is_there_is_right(self):
        for key in KEYS:
            slot = self.pool.pin(key)
            if slot is not None:
                assert bytes(slot.block) == self.content[key]
                self.pool.unpin([slot])


TestHostPool = HostPoolMachine.TestCase
TestHostPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_goes_first():
    host = pool(3)
    for n in range(3):
        put(host, KEYS[n])
    host.touch([KEYS[0]])
    put(host, KEYS[3])
    assert there(host) == [0, 2, 3]


def test_of_blocks_used_together_the_deepest_goes_first():
    host = pool(4)
    for n in range(4):
        put(host, KEYS[n])
    host.touch(KEYS[:4])
    put(host, KEYS[4])
    put(host, KEYS[5])
    assert there(host)[:2] == [0, 1]


def test_a_rank_of_sessions_decides():
    asked = []

    def rank(sessions):
        asked.append(dict(sessions))
        return ["b", "gone", "a"]

    order = Ranked(rank, every=5)
    host = pool(4, order=order)
    for n, session in enumerate("bcab"):
        put(host, KEYS[n], session)
    given_up = []
    for n in range(4, 8):
        before = set(there(host))
        put(host, KEYS[n], "new")
        given_up += before - set(there(host))
    assert given_up == [0, 3, 2, 1]  # those of b, then a; c, which the rank does not name, last
    assert asked == [{"b": 2, "c": 1, "a": 1}]


def test_a_rank_is_good_for_so_many_blocks():
    asked = []
    host = pool(2, order=Ranked(lambda sessions: asked.append(1) or ["a"], every=2))
    for n in range(7):
        put(host, KEYS[n], "a")
    assert len(asked) == 3  # five blocks went


def test_a_rank_is_asked_again_when_it_is_stale():
    order = Ranked(lambda sessions: sorted(sessions))
    host = pool(2, order=order)
    put(host, KEYS[0], "b")
    put(host, KEYS[1], "c")
    put(host, KEYS[2], "a")
    assert there(host) == [1, 2]
    order.stale()
    put(host, KEYS[3], "d")
    assert there(host) == [1, 3]


def test_a_pool_whose_blocks_are_all_in_use_takes_nothing():
    host = pool(1)
    put(host, KEYS[0])
    held = host.pin_leading([KEYS[0]])
    assert host.reserve(KEYS[1]) is None
    host.unpin(held)
    assert put(host, KEYS[1])
    assert there(host) == [1]


def test_a_session_ends_but_what_others_use_stays():
    host = pool(4)
    put(host, KEYS[0], "a")
    put(host, KEYS[1], "a")
    put(host, KEYS[2], "b")
    host.touch([KEYS[0]], "b")
    assert host.used_elsewhere(KEYS, "a") == {KEYS[0], KEYS[2]}
    assert host.forget_session("a") == 1
    assert there(host) == [0, 2]
    assert host.forget_session("b") == 2
    assert there(host) == []
    host.check()


def test_a_block_of_many_sessions_is_nobodys():
    host = pool(2)
    put(host, KEYS[0], "s0")
    for n in range(1, MAX_OWNERS + 3):
        host.touch([KEYS[0]], f"s{n}")
    for n in range(MAX_OWNERS + 3):
        assert host.forget_session(f"s{n}") == 0
    assert there(host) == [0]
    host.check()


def test_a_block_that_is_dropped_in_use_goes_when_it_is_let_go():
    host = pool(2)
    put(host, KEYS[0], "a")
    held = host.pin_leading([KEYS[0]])
    assert host.forget_session("a") == 1
    assert there(host) == []
    assert bytes(held[0].block) == block(KEYS[0])
    assert host.figures().used == 1
    host.unpin(held)
    assert host.figures().used == 0


def test_letting_go_twice_is_a_fault():
    host = pool(2)
    put(host, KEYS[0])
    held = host.pin_leading([KEYS[0]])
    host.unpin(held)
    with pytest.raises(InvariantError):
        host.unpin(held)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="holds no block"):
        HostPool(BLOCK_BYTES, SLOT_BYTES - 1)
    with pytest.raises(ConfigError, match="cannot be kept"):
        HostPool(0, SLOT_BYTES)
    with pytest.raises(ConfigError, match="read-only: True"):
        HostPool(BLOCK_BYTES, SLOT_BYTES, allocate=lambda size: memoryview(bytes(size)))
    with pytest.raises(ConfigError, match="gave 5 bytes"):
        HostPool(BLOCK_BYTES, SLOT_BYTES, allocate=lambda size: memoryview(bytearray(5)))


def test_the_buffer_can_be_anybodys():
    area = bytearray(2 * SLOT_BYTES)
    host = HostPool(BLOCK_BYTES, 2 * SLOT_BYTES, allocate=lambda size: memoryview(area), order=LRU())
    put(host, KEYS[0])
    assert block(KEYS[0]) in area

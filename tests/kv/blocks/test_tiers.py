"""What every real tier must do, on disk and in Valkey: the same tests for both."""

from __future__ import annotations

import dataclasses
import random

import pytest
from support import BLOCK_BYTES, OURS, PATIENCE_S, block, keys, loaded, wait

from kvsteward.kv.blocks import Miss, Reason
from kvsteward.kv.blocks.lossless import Lossless
from kvsteward.kv.blocks.record import HEADER_BYTES, encode_header
from kvsteward.kv.blocks.tier import Write

KEYS = keys(12)
BLOCKS = [block(key) for key in KEYS]
CORRUPTIONS = 1000
FOREIGN = {
    "another model": dataclasses.replace(OURS, model="other"),
    "another tenant": dataclasses.replace(OURS, tenant_salt="b"),
    "another layout": dataclasses.replace(OURS, layout="LNBHC"),
}


def record(key: bytes, content: bytes) -> bytes:
    return encode_header(key, content, codec=0, raw_bytes=len(content)) + content


def keep(tier, key: bytes, data: bytes, session: str = "") -> None:
    assert tier.write([Write(key, (data,), session)]) == [None]


def rooms(count: int) -> list[memoryview]:
    return [memoryview(bytearray(HEADER_BYTES + BLOCK_BYTES)) for _ in range(count)]


def spoiled(dice: random.Random, key: bytes, content: bytes) -> tuple[str, bytes]:
    """A record that must not be believed under this key, and what is wrong with it."""
    good = record(key, content)
    kind = dice.choice(["flipped bit", "cut", "longer", "another key", "another block", *FOREIGN])
    if kind == "flipped bit":
        data = bytearray(good)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        return kind, bytes(data)
    if kind == "cut":
        return kind, good[: dice.randrange(len(good))]
    if kind == "longer":
        return kind, good + dice.randbytes(dice.randrange(1, 200))
    if kind == "another key":
        return kind, record(keys(1, name="other")[0], content)
    if kind == "another block":  # a sound header with another block's bytes behind it
        return kind, good[:HEADER_BYTES] + block("another")
    return kind, record(key.replace(OURS.digest(), FOREIGN[kind].digest()), content)


def test_a_thousand_corruptions_are_a_thousand_misses(make, lower):
    store = make([lower], slots=2)
    dice = random.Random(20)
    seen = set()
    for n in range(CORRUPTIONS):
        place = n % len(KEYS)
        kind, data = spoiled(dice, KEYS[place], BLOCKS[place])
        seen.add(kind)
        keep(lower, KEYS[place], data)
        assert loaded(store, [KEYS[place]]) == [], (n, kind)
        assert lower.holds([KEYS[place]]) == [False], (n, kind)  # it is dropped, or it would be met again and again
    assert len(seen) == 8
    misses = lower.figures().misses
    assert sum(misses.values()) == CORRUPTIONS
    assert set(misses) <= {"truncated", "checksum", "foreign", "wrong_key", "version", "size"}
    assert sum(store.figures().misses.values()) == CORRUPTIONS
    assert store.figures().staged.get(lower.name, 0) == 0
    keep(lower, KEYS[0], record(KEYS[0], BLOCKS[0]))
    assert loaded(store, KEYS[:1]) == BLOCKS[:1]


@pytest.mark.parametrize("codec", [None, Lossless(2)], ids=["raw", "lossless"])
def test_blocks_come_back_bit_for_bit_in_another_process_s_store(make, lower, codec):
    writer = make([lower], slots=16, codec=codec)
    for n, content in enumerate(BLOCKS):
        assert writer.put(KEYS[n], memoryview(content), "a")
    assert writer.flush(PATIENCE_S)
    reader = make([lower], slots=16, reads=[Lossless(2)], batch_blocks=5)
    assert loaded(reader, KEYS) == BLOCKS
    figures = lower.figures()
    assert figures.written_blocks == figures.read_blocks == len(KEYS)
    assert figures.misses == figures.refused == {}


def test_a_block_in_the_wrong_size_is_a_miss(make, lower):
    store = make([lower])
    keep(lower, KEYS[0], record(KEYS[0], BLOCKS[0][:-1]))
    keep(lower, KEYS[1], record(KEYS[1], BLOCKS[0] + b"x"))
    assert loaded(store, KEYS[:1]) == []
    assert loaded(store, KEYS[1:2]) == []
    assert lower.figures().misses == {"size": 2}


def test_reads_answer_in_the_order_of_the_keys(lower):
    for n in (0, 2):
        keep(lower, KEYS[n], record(KEYS[n], BLOCKS[n]))
    assert lower.holds(KEYS[:3]) == [True, False, True]
    one, two, three = lower.read(KEYS[:3], rooms(3))
    assert bytes(one) == record(KEYS[0], BLOCKS[0])
    assert two == Miss(Reason.ABSENT)
    assert bytes(three) == record(KEYS[2], BLOCKS[2])


def test_a_second_write_replaces_the_first(lower):
    keep(lower, KEYS[0], record(KEYS[0], BLOCKS[1]))
    keep(lower, KEYS[0], record(KEYS[0], BLOCKS[0]))
    assert [bytes(a) for a in lower.read(KEYS[:1], rooms(1))] == [record(KEYS[0], BLOCKS[0])]


def test_a_session_is_forgotten_but_for_what_is_spared(lower):
    for n, session in enumerate(["a", "a", "b", "a"]):
        keep(lower, KEYS[n], record(KEYS[n], BLOCKS[n]), session)
    assert lower.forget_session("a", lambda found: {KEYS[1]} & set(found)) == 2
    assert lower.holds(KEYS[:4]) == [False, True, True, False]
    assert lower.forget_session("nobody", lambda found: set()) == 0
    assert lower.forget(KEYS[:3]) == 2
    assert lower.holds(KEYS[:4]) == [False] * 4


def test_a_session_is_forgotten_through_the_store(make, lower):
    store = make([lower])
    for n, session in enumerate(["a", "a", "b"]):
        store.put(KEYS[n], memoryview(BLOCKS[n]), session)
    store.touch(KEYS[:1], "b")
    store.forget_session("a")
    assert store.flush(PATIENCE_S)
    assert lower.holds(KEYS[:3]) == [True, False, True]


def test_two_loaders_and_a_writer_at_once(make, lower):
    store = make([lower], slots=16, loaders=2, batch_blocks=2)
    for n in range(8):
        store.put(KEYS[n], memoryview(BLOCKS[n]))
    assert store.flush(PATIENCE_S)
    store.host.clear()
    tickets = [store.stage(KEYS[first:8], PATIENCE_S) for first in range(8)]
    for n in range(8, 12):
        store.put(KEYS[n], memoryview(BLOCKS[n]))
    for first, ticket in enumerate(tickets):
        assert wait(ticket) == 8 - first
        assert [bytes(b) for b in ticket.blocks()] == BLOCKS[first:8]
        ticket.release()
    assert store.flush(PATIENCE_S)
    assert lower.holds(KEYS) == [True] * 12

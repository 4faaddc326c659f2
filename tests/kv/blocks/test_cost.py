"""Load or compute again: learned from what was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.kv.blocks.cost import Line, LoadOrRecompute

MIB = 1 << 20


def cost(**options: float) -> LoadOrRecompute:
    return LoadOrRecompute(MIB, 16, latency_s=0.01, bytes_per_s=100 * MIB, tokens_per_s=1000, **options)


def test_before_anything_was_seen_the_priors_decide():
    decision = cost().decide("valkey", 10)
    assert decision.load_s == pytest.approx(0.01 + 10 / 100)
    assert decision.recompute_s == pytest.approx(160 / 1000)
    assert decision.load_blocks == 10
    assert decision.reason == "loading takes 0.110 s, computing 0.160 s"


def test_a_slow_tier_is_left_alone_once_that_was_seen():
    learned = cost()
    for blocks in (5, 10, 20):
        learned.loaded("valkey", blocks, 0.5 + blocks * 0.1)
    decision = learned.decide("valkey", 10)
    assert decision.load_blocks == 0
    assert decision.load_s == pytest.approx(1.5)
    assert learned.decide("disk", 10).load_blocks == 10  # another tier is another line


def test_a_fast_engine_computes():
    learned = cost()
    for tokens in (1000, 2000):
        learned.computed(tokens, tokens / 100_000)
    assert learned.recompute_s(160) == pytest.approx(0.0016)
    assert learned.decide("valkey", 10).load_blocks == 0


def test_latency_makes_short_prefixes_not_worth_a_load():
    learned = cost()
    for blocks in (1, 50, 100):
        learned.loaded("valkey", blocks, 0.2 + blocks / 1000)
    assert learned.decide("valkey", 1).load_blocks == 0
    assert learned.decide("valkey", 100).load_blocks == 100


def test_attention_makes_late_tokens_dearer():
    flat, quadratic = cost(), cost(quadratic_s=1e-6)
    assert flat.recompute_s(160, 10_000) == flat.recompute_s(160)
    assert quadratic.recompute_s(160, 10_000) == pytest.approx(0.16 + 1e-6 * 160 * (80 + 10_000))
    assert quadratic.recompute_s(0, 10_000) == 0


def test_what_is_learned_leaves_the_attention_out():
    learned = cost(quadratic_s=1e-6)
    for tokens, context in ((1000, 0), (500, 4000), (2000, 1000)):
        learned.computed(tokens, tokens / 500 + 1e-6 * tokens * (tokens / 2 + context), context)
    assert learned.recompute_s(100) == pytest.approx(100 / 500 + 1e-6 * 100 * 50)


def test_a_margin_asks_for_more_than_just_faster():
    assert cost(margin=2.0).decide("valkey", 10).load_blocks == 0
    assert cost().decide("valkey", 0).reason == "nothing to load"


def test_the_newest_measurements_weigh_most():
    line = Line(0.0, 1.0, keep=0.5)
    for x in (1.0, 2.0) * 10:
        line.saw(x, 10 * x)
    for x in (1.0, 2.0) * 10:
        line.saw(x, x)
    assert line.at(2.0) == pytest.approx(2.0, rel=0.05)


@given(
    latency=st.floats(0, 10),
    per_byte=st.floats(1e-12, 1e-3),
    sizes=st.lists(st.floats(1, 1e9), min_size=2, max_size=20, unique=True),
)
def test_a_true_line_is_found(latency, per_byte, sizes):
    line = Line(0.0, 1.0)
    for size in sizes:
        line.saw(size, latency + per_byte * size)
    middle = sum(sizes) / len(sizes)
    assert line.at(middle) == pytest.approx(latency + per_byte * middle, rel=0.05)


@given(seen=st.lists(st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=20))
def test_nonsense_never_makes_a_negative_cost(seen):
    line = Line(0.1, 0.1)
    for x, y in seen:
        if not (abs(x) > 1e100 or abs(y) > 1e100):
            line.saw(x, y)
    a, b = line.parameters()
    assert a >= 0
    assert b >= 0

"""Where the marks lie, and that the model that places them is right."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.context.block import plan_text, stages
from kvsteward.context.layout import Epoch, Item, PlanItem, View
from kvsteward.context.marks import Load, Policy, best_span, cycle_of, load_of
from kvsteward.context.tokens import Estimator
from kvsteward.errors import ConfigError


def lived(load: Load, room: float, kept: float, high: float, price: float) -> float:
    """Cost of a turn, lived: a view grows by what each turn adds; when it would pass `high`, its condensed part is
    written anew or gets one more section, and what no cache has is prefilled. A miss is spread over the turns. One whole
    cycle: all others are like it."""
    front, blocks = load.fixed_tokens + load.plan_tokens + kept, stages(room)
    prefilled, held, count = 0.0, 0.0, 0
    for block, written in blocks:
        length, fresh = front + block, kept + written
        while length <= high:
            prefilled += (1 - load.miss_ratio) * fresh + load.miss_ratio * length
            held += length
            count += 1
            length, fresh = length + load.growth_tokens, load.growth_tokens
    return (prefilled + price * held) / count


def test_without_a_price_sessions_use_their_budget():
    load = Load(200.0, 500)
    assert best_span(load, cycle_of(load, 2_000, 600), 0.0) == inf
    policy = Policy()
    assert policy.marks(8_192, 24, Load(200.0, 500)) == policy.marks(8_192, 24)


def test_a_condensed_part_is_written_anew_and_then_gets_one_section():
    assert stages(2_000) == ((1_600, 1_600), (pytest.approx(2_200), pytest.approx(600)))
    assert stages(399) == ((399, 399),), "where no section would fit, it takes all of its room"
    assert stages(0) == ((0, 0),)


def test_a_cycle_is_the_mean_of_its_compactions():
    cycle = cycle_of(Load(200.0, 500, plan_tokens=100), 2_000, 600.0)
    assert cycle.left_tokens == 500 + 100 + 600 + (1_600 + 2_200) / 2
    assert cycle.swing_tokens == pytest.approx(300)
    assert cycle.again_tokens == pytest.approx(600 + (1_600 + 600) / 2 - 200)


def test_the_square_root_rule():
    load = Load(200.0, 500)
    cycle = cycle_of(load, 2_000, 600.0)
    span = (2 * 200 * 1_500 / 0.1 - 300**2) ** 0.5 - 100
    assert best_span(load, cycle, 0.1) == pytest.approx(span)
    missing = replace(load, miss_ratio=0.5)
    assert best_span(missing, cycle, 0.1) == pytest.approx((2 * 200 * 1_500 * 0.5 / 0.6 - 300**2) ** 0.5 - 100)


def test_the_mark_is_where_the_rule_says():
    marks = Policy(memory_price=0.1).marks(8_192, 24, Load(200.0, 500))
    assert (marks.low, marks.block) == (3_276, 2_048)
    cycle = cycle_of(Load(200.0, 500), 2_048, 600.0)
    assert marks.high == int(cycle.left_tokens + best_span(Load(200.0, 500), cycle, 0.1))
    planned = Load(200.0, 900, plan_tokens=700)  # the low mark leaves less than a quarter of the budget
    marks = Policy(memory_price=0.1).marks(8_192, 24, planned)
    cycle = cycle_of(planned, 3_276 - 900 - 700 - 600, 600.0)
    assert marks.high == int(cycle.left_tokens + best_span(planned, cycle, 0.1))


@given(
    growth=st.floats(20, 500),
    fixed=st.integers(0, 1_500),
    plan=st.integers(0, 500),
    room=st.floats(160, 3_000),
    miss=st.floats(0, 0.6),
    price=st.floats(0.005, 1.0),
)
def test_no_mark_is_cheaper_by_one_in_a_hundred(growth, fixed, plan, room, miss, price):
    load, kept = Load(growth, fixed, miss, plan), 3 * growth
    cycle = cycle_of(load, room, kept)
    least = (fixed + plan + kept + room) * 1.25  # as in `Policy.marks`
    chosen = max(cycle.left_tokens + best_span(load, cycle, price), least)
    cost = lived(load, room, kept, chosen, price)
    grid = [lived(load, room, kept, least + (3 * chosen - least) * n / 150, price) for n in range(151)]
    assert cost <= min(grid) * 1.01


@given(miss=st.floats(0, 1), price=st.floats(0, 10), budget=st.integers(512, 200_000), growth=st.floats(0, 5_000))
def test_marks_are_in_order_whatever_the_load(miss, price, budget, growth):
    marks = Policy(memory_price=price).marks(budget, None, Load(growth, 0, miss))
    assert 0 < marks.low < marks.prepare <= marks.high <= marks.hard <= marks.budget


def test_the_load_is_measured_on_the_view():
    message = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "y"}
    system = Item("s", 1, {"role": "system", "content": "z"}, 300, 300)
    items = tuple(Item(f"h{n}", n + 2, (message, answer)[n % 2], 100, 100) for n in range(8))
    found = load_of(View((system,), items=items), 50, 0.25, Estimator())
    assert found == Load(200.0, 350, 0.25)
    assert load_of(View((system,), items=items[:3]), 50, 0.0, Estimator()) is None
    rule = PlanItem("Never delete a ledger.", "rule", "h0", 2)
    planned = load_of(View((system,), Epoch(block="b", plan=(rule,)), items), 50, 0.0, Estimator())
    assert planned.plan_tokens == Estimator().text(plan_text([rule])) > 10
    assert isclose(found.growth_tokens, 200.0)


def test_a_price_below_zero_is_refused():
    with pytest.raises(ConfigError, match="memory_price"):
        Policy(memory_price=-0.1)

"""Where the marks lie, and that the model that places them is right."""

from __future__ import annotations

from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.context.layout import Item, View
from kvsteward.context.marks import Load, Policy, best_span, load_of
from kvsteward.errors import ConfigError


def simulated_cost(load: Load, low: int, high: float, price: float, turns: int = 4_000) -> float:
    """Cost of a turn, lived: a view grows by what each turn adds, is cut down to `low` when it would pass `high`, and
    is prefilled as far as no cache has it. A miss is spread over the turns."""
    length, prefilled, held = float(low), 0.0, 0.0
    for _ in range(turns):
        again = 0.0
        length += load.growth_tokens
        if length > high:
            length = low + load.growth_tokens
            again = low - load.fixed_tokens
        fresh = load.growth_tokens + again
        prefilled += (1 - load.miss_ratio) * fresh + load.miss_ratio * length
        held += length
    return (prefilled + price * held) / turns


def test_without_a_price_sessions_use_their_budget():
    assert best_span(Load(200.0, 500), 3_000, 0.0) == inf
    policy = Policy()
    assert policy.marks(8_192, 24, Load(200.0, 500)) == policy.marks(8_192, 24)


def test_the_square_root_rule():
    assert best_span(Load(200.0, 500), 3_000, 0.1) == pytest.approx((2 * 200 * 2_500 / 0.1) ** 0.5)
    marks = Policy(memory_price=0.1).marks(8_192, 24, Load(200.0, 500))
    assert marks.low == 3_276
    left = 500 + 2_048 + 3 * 200  # in front, the condensed part at its largest, three rounds: less than the low mark
    assert marks.high == int(left + (2 * 200 * (left - 500) / 0.1) ** 0.5)
    known = Policy(memory_price=0.1).marks(8_192, 24, Load(200.0, 500, block_tokens=1_000))
    assert known.high == int(2_100 + (2 * 200 * 1_600 / 0.1) ** 0.5)
    assert Policy().marks(8_192, 24, Load(200.0, 500, miss_ratio=0.5)).high == int(
        left + (2 * 200 * (left - 500)) ** 0.5
    )


@given(
    growth=st.floats(20, 800),
    fixed=st.integers(0, 1_500),
    miss=st.floats(0, 0.6),
    price=st.floats(0.005, 1.0),
)
def test_no_mark_of_a_grid_is_better(growth, fixed, miss, price):
    """The model takes turns as infinitely small; the simulation has whole ones. So the grid may win by one turn's
    worth of an epoch, never by more."""
    load, low = Load(growth, fixed, miss), 3_000
    chosen = low + max(best_span(load, low, price), 2 * growth)
    cost = simulated_cost(load, low, chosen, price)
    grid = [simulated_cost(load, low, low + growth * turns, price) for turns in (2, 3, 4, 6, 8, 12, 16, 24, 40, 80)]
    one_turn = (miss + price) * growth + (1 - miss) * growth * (low - fixed) / (chosen - low - growth + 1e-9) * 0.5
    assert cost <= min(grid) * 1.02 + one_turn


@given(miss=st.floats(0, 1), price=st.floats(0, 10), budget=st.integers(512, 200_000), growth=st.floats(0, 5_000))
def test_marks_are_in_order_whatever_the_load(miss, price, budget, growth):
    marks = Policy(memory_price=price).marks(budget, None, Load(growth, 0, miss))
    assert 0 < marks.low < marks.prepare <= marks.high <= marks.hard <= marks.budget


def test_the_load_is_measured_on_the_view():
    message = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "y"}
    system = Item("s", 1, {"role": "system", "content": "z"}, 300, 300)
    items = tuple(Item(f"h{n}", n + 2, (message, answer)[n % 2], 100, 100) for n in range(8))
    found = load_of(View((system,), items=items), 50, 0.25)
    assert found == Load(200.0, 350, 0.25)
    assert load_of(View((system,), items=items[:3]), 50, 0.0) is None
    assert isclose(found.growth_tokens, 200.0)


def test_a_price_below_zero_is_refused():
    with pytest.raises(ConfigError, match="memory_price"):
        Policy(memory_price=-0.1)

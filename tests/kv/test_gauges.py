"""The connector's metrics where a process has several engines, one after the other or at once."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvsteward.kv.vllm.gauges import Gauges


class Page:
    """A registry, and engines that show there what they know."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def engine(self, model: str, *ranks: str) -> Gauges:
        return Gauges(
            partial(Gauge, registry=self.registry),
            partial(Counter, registry=self.registry),
            self.registry._names_to_collectors.get,
            ["model_name", "engine"],
            [(model, rank) for rank in ranks or ("0",)],
        )

    def value(self, name: str, model: str, rank: str = "0", **more: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": model, "engine": rank, **more})

    def series(self) -> set[tuple[str, ...]]:
        return {tuple(s.labels.values()) for family in self.registry.collect() for s in family.samples}


@pytest.fixture
def page() -> Page:
    return Page()


def told(sessions: dict[str, int], *, released: int = 0) -> dict[str, Any]:
    return {
        "block_tokens": 16,
        "sessions": {name: [blocks, 1.0] for name, blocks in sessions.items()},
        "others": [2, 30],
        "hints": {"released": released, "kept": 0, "refused": 0},
        "waits_s": {"step": 0.5},
    }


def test_a_second_engine_neither_fails_nor_takes_the_first_one_s_figures(page):
    one, two = page.engine("a"), page.engine("b")
    one.show(("a", "0"), told({"s1": 7}, released=3))
    two.show(("b", "0"), told({"s2": 5}, released=1))
    one.show(("a", "0"), told({"s1": 8}, released=4))
    assert page.value("kvsteward_session_blocks", "a", session="s1") == 8
    assert page.value("kvsteward_session_tokens", "a", session="s1") == 128
    assert page.value("kvsteward_session_blocks", "b", session="s2") == 5
    assert page.value("kvsteward_session_blocks", "a", session="s2") is None
    assert page.value("kvsteward_sessions", "a") == page.value("kvsteward_sessions", "b") == 3
    assert page.value("kvsteward_other_session_blocks", "a") == 30
    assert page.value("kvsteward_other_session_tokens", "b") == 480
    assert page.value("kvsteward_longest_wait_seconds", "b", kind="step") == 0.5
    assert page.value("kvsteward_hints_total", "a", kind="released") == 4
    assert page.value("kvsteward_hints_total", "b", kind="released") == 1


def test_ranks_of_an_engine_are_told_apart(page):
    engine = page.engine("a", "0", "1")
    engine.show(("a", "0"), told({"s": 3}))
    engine.show(("a", "1"), told({"s": 4}))
    engine.show(("a", "0"), told({}))
    assert page.value("kvsteward_session_blocks", "a", "0", session="s") is None
    assert page.value("kvsteward_session_blocks", "a", "1", session="s") == 4


def test_the_series_of_an_engine_that_is_gone_go_with_it(page):
    one, two = page.engine("a"), page.engine("b")
    one.show(("a", "0"), told({"s1": 7}))
    two.show(("b", "0"), told({"s2": 5}))
    del one
    gc.collect()
    assert {labels[0] for labels in page.series()} == {"b"}


def test_an_engine_that_takes_another_s_place_begins_without_what_that_one_left(page):
    old = page.engine("a")
    old.show(("a", "0"), told({"s1": 7}, released=9))
    new = page.engine("a")
    new.show(("a", "0"), told({"s2": 1}, released=1))
    assert page.value("kvsteward_session_blocks", "a", session="s1") is None
    assert page.value("kvsteward_session_blocks", "a", session="s2") == 1
    assert page.value("kvsteward_hints_total", "a", kind="released") == 1


def test_a_counter_goes_on_after_a_rank_began_anew(page):
    engine = page.engine("a")
    for released in (3, 5, 2):
        engine.show(("a", "0"), told({}, released=released))
    assert page.value("kvsteward_hints_total", "a", kind="released") == 7


def test_metrics_of_another_kind_that_cannot_be_taken_away_are_left(page):
    """As Ray's, which are no collectors."""
    made: dict[str, dict[tuple[str, ...], float]] = {}

    class Plain:
        def __init__(self, name: str, what: str, labelnames: list[str], **about: str) -> None:
            self.values = made.setdefault(name, {})

        def labels(self, *labels: str) -> Any:
            self.at = labels
            return self

        def set(self, value: float) -> None:
            self.values[self.at] = value

        def inc(self, value: float) -> None:
            self.values[self.at] = self.values.get(self.at, 0) + value

    engine = Gauges(Plain, Plain, lambda name: None, ["model_name"], [("a",)])
    engine.show(("a",), told({"s": 3}))
    engine.show(("a",), told({}))
    assert made["kvsteward_session_blocks"] == {("a", "s"): 0}

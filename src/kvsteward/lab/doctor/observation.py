"""What was seen of an engine in one window: readings with their times, its settings, and what the user added.

Knows no I/O and judges nothing. Invariant: a difference over the window is never taken across an engine restart, and a
figure that is missing raises `CannotJudge` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeVar

from kvsteward.lab.doctor.finding import CannotJudge
from kvsteward.lab.doctor.knobs import Knob, change, changes, given
from kvsteward.lab.doctor.names import METRICS, Metrics, Names
from kvsteward.lab.doctor.page import Histogram, Page
from kvsteward.lab.prompts import PromptReport
from kvsteward.ledger import ModelSpec

T = TypeVar("T")
Gauge = Literal["running", "waiting", "kv_usage_ratio"]
Counter = Literal["preemptions_total", "prefix_queried_tokens_total", "prefix_hit_tokens_total"]
_COUNTERS: tuple[Counter, ...] = ("preemptions_total", "prefix_queried_tokens_total", "prefix_hit_tokens_total")


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of llama-server. `streamed` is None where the server does not say."""

    id: int
    task: int | None
    busy: bool
    context_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    decoded_tokens: int = 0
    streamed: bool | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card as its driver reports it."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    busy_ratio: float | None
    processes: tuple[tuple[int, int], ...] = ()
    """Process id and bytes, the largest first."""


@dataclass(frozen=True, slots=True)
class TorchMemory:
    """`torch.cuda.memory_stats()` of the engine: what the caching allocator reserved, and what of it is in use."""

    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One scrape. `at_s` is monotonic; `clients` are client connections of the engine, where they can be counted."""

    at_s: float
    page: Page
    clients: int | None = None
    slots: tuple[Slot, ...] | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """What does not change while the engine runs. `None`: neither the engine nor the user says."""

    dialect: str
    source: str = ""
    version: str | None = None
    context_limit_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    block_tokens: int | None = None
    max_running: int | None = None
    kv_dtype: str | None = None
    prefix_caching: bool | None = None
    chunked_prefill: bool | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    pool_bytes: int | None = None
    state_mode: str | None = None
    """vLLM's `mamba_cache_mode` where the model has recurrent layers."""
    gateway: bool = False
    """A kvsteward gateway stands between; the figures are those that it passes on."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One window. `readings` are in time order, at least one; with one, counters count from the engine's start."""

    setup: Setup
    readings: tuple[Reading, ...]
    flags: Mapping[str, str] = field(default_factory=dict)
    flags_given: bool = False
    spec: ModelSpec | None = None
    torch: TorchMemory | None = None
    prompts: PromptReport | None = None
    names: Metrics | None = None

    # -- the window ------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> Metrics:
        return self.names or METRICS.get(self.setup.dialect, Metrics())

    @property
    def last(self) -> Page:
        return self.readings[-1].page

    @property
    def since_start(self) -> bool:
        """True for a single page: its counters count from the engine's start."""
        return len(self.readings) == 1

    @property
    def window_s(self) -> float:
        return self.readings[-1].at_s - self.readings[0].at_s

    @property
    def restarted(self) -> bool:
        """A counter fell between two readings."""
        pages = [reading.page for reading in self.readings]
        return any(self._fell(before, after) for before, after in pairwise(pages))

    def _fell(self, before: Page, after: Page) -> bool:
        pairs = [(getattr(before.load, name), getattr(after.load, name)) for name in _COUNTERS]
        for names in (self.metrics.generation_tokens, self.metrics.prompt_tokens, self.metrics.finished):
            pairs.append((before.value(names), after.value(names)))
        return any(then is not None and now is not None and now < then for then, now in pairs)

    # -- figures that may be missing -------------------------------------------------------------------------------

    def seen(self, gauge: Gauge) -> list[float]:
        """A gauge in every reading that has it. Raises CannotJudge if none has."""
        values = [v for reading in self.readings if (v := getattr(reading.page.load, gauge)) is not None]
        if not values:
            raise CannotJudge(self._missing(gauge))
        return [float(value) for value in values]

    def count(self, counter: Counter) -> float:
        """How much a counter of `EngineLoad` rose in the window. Raises CannotJudge."""
        return self._risen(
            counter, [None if (v := getattr(r.page.load, counter)) is None else float(v) for r in self.readings]
        )

    def risen(self, figure: str, **labels: str) -> float:
        """How much a counter of `Metrics` rose in the window. Raises CannotJudge."""
        names: Names = getattr(self.metrics, figure)
        return self._risen(figure, [reading.page.value(names, **labels) for reading in self.readings])

    def _risen(self, figure: str, values: list[float | None]) -> float:
        first, last = values[0], values[-1]
        if self.since_start:
            first = 0.0
        if first is None or last is None:
            raise CannotJudge(self._missing(figure))
        if self.restarted:
            raise CannotJudge("the engine restarted inside the window: its counters began again")
        return last - first

    def level(self, figure: str) -> float:
        """The last value of a gauge of `Metrics`. Raises CannotJudge."""
        value = self.last.value(getattr(self.metrics, figure))
        if value is None:
            raise CannotJudge(self._missing(figure))
        return value

    def histogram(self, figure: str) -> Histogram:
        """What a histogram took in within the window. Raises CannotJudge, also if it took in nothing."""
        whole = self.lifetime(figure)
        earlier = None if self.since_start else self.readings[0].page.histogram(getattr(self.metrics, figure))
        if self.restarted:
            raise CannotJudge("the engine restarted inside the window: its counters began again")
        taken = whole if earlier is None else whole.minus(earlier)
        if taken is None or taken.count <= 0:
            raise CannotJudge("no request ended in the window")
        return taken

    def lifetime(self, figure: str) -> Histogram:
        """A histogram since the engine's start. Raises CannotJudge, also if it is empty."""
        found = self.last.histogram(getattr(self.metrics, figure))
        if found is None:
            raise CannotJudge(self._missing(figure))
        if found.count <= 0:
            raise CannotJudge("no request has ended since the engine's start")
        return found

    def hit_ratio(self) -> tuple[float, float]:
        """Share of the prompt tokens of the window that were found in the prefix cache, and how many were looked up."""
        queried = self.count("prefix_queried_tokens_total")
        hits = self.count("prefix_hit_tokens_total")
        if queried <= 0:
            raise CannotJudge("no prompt was looked up in the prefix cache in the window")
        return min(1.0, hits / queried), queried

    def known(self, value: T | None, what: str) -> T:
        """`value`, or CannotJudge: neither the engine nor the user says `what`."""
        if value is None:
            raise CannotJudge(f"{what} is not known: the engine does not report it and --flags does not say")
        return value

    def _missing(self, figure: str) -> str:
        name = figure.removesuffix("_total").replace("_", " ")
        broken = sorted({b for reading in self.readings for b in reading.page.broken})
        why = f" (not a number: {', '.join(broken[:3])})" if broken else ""
        return f"{self.setup.dialect} does not report {name}{why}"

    # -- settings --------------------------------------------------------------------------------------------------

    def flag(self, knob: Knob) -> str | None:
        """What --flags says of a setting."""
        return given(self.flags, self.setup.dialect, knob)

    def change(self, knob: Knob, value: object = None) -> str | None:
        return change(self.setup.dialect, knob, value)

    def changes(self, *wanted: tuple[Knob, object]) -> tuple[str, ...]:
        return changes(self.setup.dialect, *wanted)


def median(values: list[float]) -> float:
    """The middle value; of an even number the lower of the two."""
    return sorted(values)[(len(values) - 1) // 2]


def share(values: list[float], least: float) -> float:
    """How large a part of `values` is `least` or more."""
    return sum(value >= least for value in values) / len(values)


def tokens(value: float) -> str:
    """A count as people read it."""
    return "more" if math.isinf(value) else f"{value:,.0f}"


def or_none(read: Callable[[], float]) -> float | None:
    """The figure, or None where it is missing: for evidence that a check can do without."""
    try:
        return read()
    except CannotJudge:
        return None

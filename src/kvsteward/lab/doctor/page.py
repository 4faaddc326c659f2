"""One metrics page as numbers by name, and histograms that can be subtracted from one another.

Knows the Prometheus text format, no engine. Invariant: a value that is not finite is not in the page; its name is in
`broken`, so that a check can say why it does not judge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from kvsteward.engines.base import EngineLoad
from kvsteward.errors import EngineError

Series = tuple[tuple[Mapping[str, str], float], ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts under upper bounds, as Prometheus has them: `counts[i]` observations were <= `bounds[i]`."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def count(self) -> float:
        """How many were observed."""
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        """The mean of what was observed; None if nothing was."""
        return self.total / self.count if self.count > 0 else None

    def bound_of(self, quantile: float) -> float | None:
        """The upper bound of the bucket with this quantile: the true value is not above it. None if it is empty."""
        if self.count <= 0:
            return None
        wanted = quantile * self.count
        return next(bound for bound, count in zip(self.bounds, self.counts, strict=True) if count >= wanted)

    def minus(self, earlier: Histogram) -> Histogram | None:
        """What was observed since `earlier`; None if the buckets differ or a count fell (the engine restarted)."""
        if self.bounds != earlier.bounds:
            return None
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, counts, self.total - earlier.total) if min(counts, default=0) >= 0 else None


@dataclass(frozen=True, slots=True)
class Page:
    """The values of one scrape by sample name. `load` are the figures that the engine's adapter reads from it."""

    load: EngineLoad = field(default_factory=EngineLoad)
    series: Mapping[str, Series] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()

    def value(self, names: Iterable[str], **labels: str) -> float | None:
        """The sum over the series of the first name that is there; only those that carry `labels`."""
        for name in names:
            if name in self.series:
                return math.fsum(v for own, v in self.series[name] if labels.items() <= own.items())
        return None

    def largest(self, names: Iterable[str]) -> float | None:
        """As `value`, but the largest series: for what each rank reports whole."""
        return next((max(v for _, v in self.series[name]) for name in names if name in self.series), None)

    def histogram(self, names: Iterable[str]) -> Histogram | None:
        """The histogram under the first name that is there; series of several ranks are added."""
        for name in names:
            buckets: dict[float, float] = {}
            for labels, value in self.series.get(f"{name}_bucket", ()):
                bound = float(labels.get("le", "nan"))
                buckets[bound] = buckets.get(bound, 0.0) + value
            if buckets:
                bounds = tuple(sorted(buckets))
                return Histogram(bounds, tuple(buckets[b] for b in bounds), self.value([f"{name}_sum"]) or 0.0)
        return None

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels of the first series called `name`: how engines export their settings."""
        found = self.series.get(name)
        return found[0][0] if found else {}


def read_page(text: str, load: EngineLoad, source: str) -> Page:
    """Reads a whole page. EngineError, naming `source`, if it is not in the Prometheus text format."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    series: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    broken = set()
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    series.setdefault(sample.name, []).append((sample.labels, sample.value))
                else:
                    broken.add(sample.name)
    except ValueError as error:
        raise EngineError(
            f"{source} is not in the Prometheus text format: {error}", hint="Give the engine's own URL, without a path."
        ) from error
    return Page(load, {name: tuple(values) for name, values in series.items()}, frozenset(broken))

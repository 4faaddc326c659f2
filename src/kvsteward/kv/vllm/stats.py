"""How snapshots travel: as vLLM's connector statistics from the scheduler to the API server, and to its metrics page.

vLLM takes them from the connector after each step and hands them to its loggers, so they come without a channel of our
own, and not at all with `--disable-log-stats`. Knows nothing of HTTP. Invariant: a fault here ends the metrics, never
the server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvsteward.kv.vllm import compat
from kvsteward.kv.vllm.gauges import Gauges
from kvsteward.kv.vllm.snapshot import labelled

EVERY_S = 1.0
log = logging.getLogger("vllm.kvsteward")


class SessionStats(compat.KVConnectorStats):  # type: ignore[misc]
    """The newest snapshot; an older one says nothing beside it."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> SessionStats:
        if not other.is_empty():
            self.data = other.data
        return self

    def reduce(self) -> dict[str, int | float]:
        """vLLM's log line."""
        named, others, more = labelled(self.data)
        return {
            "kvsteward sessions": len(named) + others,
            "idle blocks": sum(named.values()) + more,
            "free blocks": self.data["free_blocks"],
        }

    def is_empty(self) -> bool:
        return not self.data


class SessionMetrics(compat.KVConnectorPromMetrics):  # type: ignore[misc]
    """In the API server: keeps the newest snapshot of each rank and shows it as metrics."""

    def __init__(self, config: Any, types: Any, labelnames: list[str], labelvalues: Mapping[int, list[object]]) -> None:
        super().__init__(config, types, labelnames, labelvalues)
        self.latest: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self.on_news: Callable[[], None] | None = None
        self._labels = {engine: tuple(map(str, values)) for engine, values in labelvalues.items()}
        self._gauges = Gauges(
            self._gauge_cls, self._counter_cls, compat.metric_named, labelnames, self._labels.values()
        )
        self._broken = False

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Called where vLLM hands out answers: a fault here would end them all."""
        self.latest[engine_idx] = (time.monotonic(), transfer_stats_data)
        try:
            if not self._broken:
                self._gauges.show(self._labels[engine_idx], transfer_stats_data)
        except Exception:  # whatever it is, the server goes on without these metrics
            self._broken = True
            log.exception("kvsteward: the metrics stay as they are from now on")
        if self.on_news is not None:
            self.on_news()

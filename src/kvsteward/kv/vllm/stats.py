"""How snapshots travel: as vLLM's connector statistics from the scheduler to the API server, and to its metrics page.

vLLM takes them from the connector after each step and hands them to its loggers, so they come without a channel of our
own, and not at all with `--disable-log-stats`. Knows nothing of HTTP. Invariant: at most MAX_LABELS sessions are named
in metrics at a time.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from kvsteward.kv.vllm import compat
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
        compat.forget_metrics("kvsteward_")
        self.latest: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self.on_news: Callable[[], None] | None = None

        def gauge(name: str, what: str, *more: str) -> Any:
            return self._gauge_cls(
                name=name, documentation=what, labelnames=[*labelnames, *more], multiprocess_mode="mostrecent"
            )

        self._blocks = gauge("kvsteward_session_blocks", "KV blocks of an idle session, the largest ones", "session")
        self._tokens = gauge("kvsteward_session_tokens", "Tokens of these blocks", "session")
        self._other_blocks = gauge("kvsteward_other_session_blocks", "KV blocks of all other idle sessions")
        self._other_tokens = gauge("kvsteward_other_session_tokens", "Tokens of these blocks")
        self._sessions = gauge("kvsteward_sessions", "Idle sessions that have KV blocks")
        self._hints = self._counter_cls(
            name="kvsteward_hints",
            documentation="Hints by what they asked: released (final), kept (a TTL), refused (not understood)",
            labelnames=[*labelnames, "kind"],
        )
        self._waits = gauge(
            "kvsteward_longest_wait_seconds",
            "The longest since the start: of a step for the connector in the scheduler (step) and for copies in"
            " the workers (copy), of a request for blocks from disk or Valkey (request)",
            "kind",
        )
        self._named: dict[int, set[str]] = {}
        self._counted: dict[tuple[int, str], int] = {}
        self._broken = False

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Called where vLLM hands out answers: a fault here would end them all."""
        self.latest[engine_idx] = (time.monotonic(), transfer_stats_data)
        try:
            if not self._broken:
                self._show(transfer_stats_data, engine_idx)
        except Exception:  # whatever it is, the server goes on without these metrics
            self._broken = True
            log.exception("kvsteward: the metrics stay as they are from now on")
        if self.on_news is not None:
            self.on_news()

    def _show(self, data: Mapping[str, Any], engine_idx: int) -> None:
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        named, others, more = labelled(data)
        for name in self._named.get(engine_idx, set()) - named.keys():
            self._drop(*labels, name)
        self._named[engine_idx] = set(named)
        size = data["block_tokens"]
        for name, blocks in named.items():
            self._blocks.labels(*labels, name).set(blocks)
            self._tokens.labels(*labels, name).set(blocks * size)
        self._other_blocks.labels(*labels).set(more)
        self._other_tokens.labels(*labels).set(more * size)
        self._sessions.labels(*labels).set(len(named) + others)
        for kind, wait_s in data["waits_s"].items():
            self._waits.labels(*labels, kind).set(wait_s)
        for kind, total in data["hints"].items():
            before = self._counted.get((engine_idx, kind), 0)
            self._hints.labels(*labels, kind).inc(total - before if total >= before else total)
            self._counted[engine_idx, kind] = total

    def _drop(self, *labels: str) -> None:
        for metric in (self._blocks, self._tokens):
            metric.labels(*labels).set(0)
            with warnings.catch_warnings():  # with several API servers prometheus_client cannot: then it stays at 0
                warnings.simplefilter("ignore")
                metric.remove(*labels)

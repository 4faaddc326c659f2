"""The connector's metrics on the API server's page: one family for all engines of a process, a series for each.

Engines in one process share vLLM's registry, where a name can stand once. So the family that an engine before this one
made is used again; vLLM's labels (model, engine) tell their series apart. A series goes with its engine. Two engines
with the same labels have one series, as they have of vLLM's own metrics: a gauge shows which of them spoke last, a
counter counts both.

No vLLM import: what makes a metric and finds one by its name is given. Invariant: at most `MAX_LABELS` sessions of an
engine are named at a time.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvsteward.kv.vllm.snapshot import labelled

Labels = tuple[str, ...]


class Gauges:
    """`gauge` and `counter` make metrics as prometheus_client's classes do; `registered` finds one by its name.
    `labelnames`: vLLM's; `engines`: this process's values of them."""

    def __init__(
        self,
        gauge: Callable[..., Any],
        counter: Callable[..., Any],
        registered: Callable[[str], Any],
        labelnames: Sequence[str],
        engines: Iterable[Labels],
    ) -> None:
        def family(make: Callable[..., Any], name: str, what: str, *more: str, **about: Any) -> Any:
            known = registered(name)
            return known if known is not None else make(name, what, [*labelnames, *more], **about)

        def newest(name: str, what: str, *more: str) -> Any:
            return family(gauge, name, what, *more, multiprocess_mode="mostrecent")

        self._blocks = newest("kvsteward_session_blocks", "KV blocks of an idle session, the largest ones", "session")
        self._tokens = newest("kvsteward_session_tokens", "Tokens of these blocks", "session")
        self._other_blocks = newest("kvsteward_other_session_blocks", "KV blocks of all other idle sessions")
        self._other_tokens = newest("kvsteward_other_session_tokens", "Tokens of these blocks")
        self._sessions = newest("kvsteward_sessions", "Idle sessions that have KV blocks")
        self._waits = newest(
            "kvsteward_longest_wait_seconds",
            "The longest since the start: of a step for the connector in the scheduler (step) and for copies in"
            " the workers (copy), of a request for blocks from disk or Valkey (request)",
            "kind",
        )
        self._hints = family(
            counter,
            "kvsteward_hints",
            "Hints by what they asked: released (final), kept (a TTL), refused (not understood)",
            "kind",
        )
        self._named: dict[Labels, set[str]] = {}
        self._counted: dict[tuple[Labels, str], int] = {}
        self._size = len(labelnames)
        mine, families = frozenset(engines), self._families()
        _clear(families, self._size, mine)  # of an engine before this one that nobody has thrown away yet
        weakref.finalize(self, _clear, families, self._size, mine).atexit = False

    def _families(self) -> tuple[Any, ...]:
        return (
            *(self._blocks, self._tokens, self._other_blocks, self._other_tokens),
            *(self._sessions, self._waits, self._hints),
        )

    def show(self, labels: Labels, data: Mapping[str, Any]) -> None:
        """`data`: a `snapshot` of the engine that vLLM labels so."""
        named, others, more = labelled(data)
        for name in self._named.get(labels, set()) - named.keys():
            for metric in (self._blocks, self._tokens):
                metric.labels(*labels, name).set(0)
                _remove(metric, (*labels, name))
        self._named[labels] = set(named)
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
            before = self._counted.get((labels, kind), 0)
            self._hints.labels(*labels, kind).inc(total - before if total >= before else total)
            self._counted[labels, kind] = total


def _clear(families: Sequence[Any], size: int, engines: frozenset[Labels]) -> None:
    """Takes the series of these engines away: those whose first `size` labels are theirs."""
    for family in families:
        if not hasattr(family, "collect"):  # Ray's, which it takes away itself
            continue
        (found,) = family.collect()
        for labels in {tuple(sample.labels.values()) for sample in found.samples}:
            if labels[:size] in engines:
                _remove(family, labels)


def _remove(metric: Any, labels: Labels) -> None:
    with warnings.catch_warnings():  # with several API servers prometheus_client cannot: then it stays as it is
        warnings.simplefilter("ignore")
        if hasattr(metric, "remove"):
            metric.remove(*labels)

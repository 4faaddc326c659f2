"""From an engine's Prometheus text to `EngineLoad`: one table of metric names per dialect, and two pure functions.

It knows no HTTP and no engine object. Invariant: a figure that is missing, NaN or infinite is None, never 0. To follow
a renamed metric, add its new name in front of the old one; nothing else changes.

Sources of the names: vLLM `v1/metrics/loggers.py` (0.6 to 0.32), SGLang `srt/metrics/collector.py`, llama.cpp
`tools/server/server-context.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvsteward.engines.base import EngineLoad

Names = tuple[str, ...]
"""Sample names whose values are added: all must be there."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where each figure of `EngineLoad` is found: alternatives, the newest first."""

    running: tuple[Names, ...] = ()
    waiting: tuple[Names, ...] = ()
    kv_usage_ratio: tuple[Names, ...] = ()
    preemptions_total: tuple[Names, ...] = ()
    prefix_queried_tokens_total: tuple[Names, ...] = ()
    prefix_hit_tokens_total: tuple[Names, ...] = ()


VLLM = Dialect(
    running=(("vllm:num_requests_running",),),
    waiting=(("vllm:num_requests_waiting",),),
    kv_usage_ratio=(("vllm:kv_cache_usage_perc",), ("vllm:gpu_cache_usage_perc",)),
    preemptions_total=(("vllm:num_preemptions_total",), ("vllm:num_preemptions",)),
    prefix_queried_tokens_total=(
        ("vllm:prefix_cache_queries_total",),
        ("vllm:prefix_cache_queries",),
        ("vllm:gpu_prefix_cache_queries_total",),
        ("vllm:gpu_prefix_cache_queries",),
    ),
    prefix_hit_tokens_total=(
        ("vllm:prefix_cache_hits_total",),
        ("vllm:prefix_cache_hits",),
        ("vllm:gpu_prefix_cache_hits_total",),
        ("vllm:gpu_prefix_cache_hits",),
    ),
)

SGLANG = Dialect(
    running=(("sglang:num_running_reqs",),),
    waiting=(("sglang:num_queue_reqs",),),
    kv_usage_ratio=(("sglang:full_token_usage",), ("sglang:token_usage",)),
    preemptions_total=(("sglang:num_retracted_requests_total",), ("sglang:num_retracted_reqs_total",)),
    prefix_queried_tokens_total=(("sglang:prompt_tokens_total",),),
    prefix_hit_tokens_total=(("sglang:cached_tokens_total",),),
)

LLAMA_SERVER = Dialect(
    running=(("llamacpp:requests_processing",),),
    waiting=(("llamacpp:requests_deferred",),),
    # Builds before mid-2025 reported the pool's use; today's do not.
    kv_usage_ratio=(("llamacpp:kv_cache_usage_ratio",),),
    prefix_queried_tokens_total=(("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),),
    prefix_hit_tokens_total=(("llamacpp:prompt_tokens_cached_total",),),
)

_VLLM_CACHE_INFO = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """vLLM's `cache_config_info`. `None`: not reported."""

    block_tokens: int | None = None
    blocks: int | None = None
    dtype: str | None = None
    size_tokens: int | None = None
    """What vLLM itself says that the pool holds; for a hybrid model it is not blocks x block size."""

    @property
    def capacity_tokens(self) -> int | None:
        """The whole pool, in tokens."""
        if self.size_tokens is not None:
            return self.size_tokens
        return self.blocks * self.block_tokens if self.blocks and self.block_tokens else None


def parse_load(text: str, dialect: Dialect) -> EngineLoad:
    """Reads the live figures. Several series of one name (data-parallel ranks) are added; of ratios the fullest counts.

    Raises ValueError if a wanted line is not in the Prometheus text format.
    """
    wanted = {name for figure in _FIGURES for names in getattr(dialect, figure) for name in names}
    values: dict[str, list[float]] = {}
    for sample in _samples(text, wanted):
        values.setdefault(sample.name, []).append(sample.value)

    def whole(figure: str) -> int | None:
        value = _first(getattr(dialect, figure), values, sum)
        return None if value is None else round(value)

    return EngineLoad(
        running=whole("running"),
        waiting=whole("waiting"),
        kv_usage_ratio=_first(dialect.kv_usage_ratio, values, max),
        preemptions_total=whole("preemptions_total"),
        prefix_queried_tokens_total=whole("prefix_queried_tokens_total"),
        prefix_hit_tokens_total=whole("prefix_hit_tokens_total"),
    )


def parse_vllm_cache_config(text: str) -> CacheConfig:
    """Reads block size, block count and cache type from vLLM's metrics. Data-parallel ranks: their blocks are added."""
    labels = [sample.labels for sample in _samples(text, {_VLLM_CACHE_INFO})]
    if not labels:
        return CacheConfig()
    counts = [_natural(rank.get("num_gpu_blocks")) for rank in labels]
    sizes = [_natural(rank.get("kv_cache_size_tokens")) for rank in labels]
    return CacheConfig(
        block_tokens=_natural(labels[0].get("block_size")),
        blocks=sum(count for count in counts if count) or None,
        dtype=labels[0].get("cache_dtype"),
        size_tokens=sum(size for size in sizes if size) or None,
    )


_FIGURES = tuple(Dialect.__dataclass_fields__)


def _samples(text: str, wanted: Iterable[str]) -> Iterator[Sample]:
    # A full vLLM page is hundreds of histogram lines; only the wanted ones go to the parser.
    starts = tuple(sorted(wanted))
    lines = [line for line in text.splitlines() if line.startswith(starts)]
    names = set(starts)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        yield from (sample for sample in family.samples if sample.name in names)


def _first(
    alternatives: tuple[Names, ...], values: dict[str, list[float]], merge: Callable[[list[float]], float]
) -> float | None:
    for names in alternatives:
        if all(name in values for name in names):
            total = math.fsum(merge(values[name]) for name in names)
            return total if math.isfinite(total) else None
    return None


def _natural(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None

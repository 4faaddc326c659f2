"""Metrics pages in each engine's own shape, from figures, and observations made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvsteward.engines.metrics import parse_load
from kvsteward.lab.doctor.knobs import read_flags
from kvsteward.lab.doctor.observation import Gpu, Observation, Reading, Setup, Slot
from kvsteward.lab.doctor.page import read_page
from kvsteward.lab.doctor.probe import DIALECTS
from kvsteward.lab.doctor.setup import llama_setup, sglang_setup, vllm_setup, with_flags

LENGTHS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
SECONDS = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 80.0)


def histogram(name: str, values: Sequence[float], bounds: Sequence[float] = LENGTHS, labels: str = "") -> list[str]:
    """Prometheus lines of a histogram of `values`."""
    lines = [f'{name}_bucket{{{labels}le="{b}"}} {sum(v <= b for v in values)}.0' for b in (*bounds, math.inf)]
    lines = [line.replace('le="inf"', 'le="+Inf"') for line in lines]
    return [*lines, f"{name}_count {len(values)}.0", f"{name}_sum {math.fsum(values)}"]


@dataclass(frozen=True)
class Vllm:
    """One page of vLLM 0.32. Counters are totals."""

    running: float | str = 0
    waiting: float | str = 0
    usage: float | str | None = 0.0
    preempted: float | None = 0
    queried: float | None = 0
    hits: float | None = 0
    prompt_tokens: float = 0
    generated: float = 0
    ended: Mapping[str, float] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    prompts: Sequence[float] | None = ()
    answers: Sequence[float] = ()
    first_s: Sequence[float] = ()
    gaps_s: Sequence[float] = ()
    offload: tuple[float, float] | None = None
    """Tokens loaded and seconds."""
    computed: tuple[float, float] = (0, 0)
    """Tokens prefilled and seconds."""
    info: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        gauges = {
            "num_requests_running": self.running,
            "num_requests_waiting": self.waiting,
            "kv_cache_usage_perc": self.usage,
            "num_preemptions_total": self.preempted,
            "prefix_cache_queries_total": self.queried,
            "prefix_cache_hits_total": self.hits,
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generated,
            "request_prefill_kv_computed_tokens_sum": self.computed[0],
            "request_prefill_time_seconds_sum": self.computed[1],
        }
        if self.offload is not None:
            gauges |= {
                "external_prefix_cache_hits_total": self.offload[0],
                "kv_offload_load_time_total": self.offload[1],
            }
        lines = [f'vllm:{name}{{engine="0"}} {value}' for name, value in gauges.items() if value is not None]
        lines += [f'vllm:request_success_total{{finished_reason="{k}"}} {v}' for k, v in self.ended.items()]
        lines += histogram("vllm:request_prompt_tokens", self.prompts) if self.prompts is not None else []
        lines += histogram("vllm:request_generation_tokens", self.answers)
        lines += histogram("vllm:time_to_first_token_seconds", self.first_s, SECONDS)
        lines += histogram("vllm:inter_token_latency_seconds", self.gaps_s, SECONDS)
        info = {
            "block_size": "16", "cache_dtype": "auto", "enable_prefix_caching": "True", "num_gpu_blocks": "1000",
            "mamba_block_size": "None", "mamba_cache_mode": "none",
        } | dict(self.info)  # fmt: skip
        labels = ",".join(f'{k}="{v}"' for k, v in info.items())
        return "\n".join([*lines, f"vllm:cache_config_info{{{labels}}} 1.0"]) + "\n"


def plain(prefix: str, figures: Mapping[str, float | str]) -> str:
    """A page of plain lines: `plain("sglang:", {"num_running_reqs": 3})`."""
    return "".join(f"{prefix}{name} {value}\n" for name, value in figures.items())


def sglang(**figures: float | str) -> str:
    return plain("sglang:", {"num_running_reqs": 0, "num_queue_reqs": 0, "token_usage": 0.0, **figures})


def llama(**figures: float | str) -> str:
    base = {"requests_processing": 0, "requests_deferred": 0, "prompt_tokens_total": 0, "prompt_tokens_cached_total": 0}
    return plain("llamacpp:", {**base, "tokens_predicted_total": 0, "n_tokens_max": 0, **figures})


def look(
    dialect: str,
    *pages: str | Vllm,
    window_s: float = 10.0,
    flags: str | None = None,
    said: Mapping[str, Any] | None = None,
    clients: Iterable[int | None] | None = None,
    slots: tuple[Slot, ...] | None = None,
    gpus: tuple[Gpu, ...] = (),
    setup: Mapping[str, Any] | None = None,
    **more: Any,
) -> Observation:
    """An observation of these pages, evenly spaced. `said`: the answer of /server_info or /props, or a model card."""
    texts = [page.text() if isinstance(page, Vllm) else page for page in pages]
    step = window_s / max(1, len(texts) - 1)
    counts = list(clients) if clients is not None else [None] * len(texts)
    readings = tuple(
        Reading(index * step, read_page(text, parse_load(text, DIALECTS[dialect]), "test"), count, slots, gpus)
        for index, (text, count) in enumerate(zip(texts, counts, strict=True))
    )
    last = readings[-1].page
    if dialect == "vllm":
        told: Setup = vllm_setup(texts[-1], last, [said] if said else [])
    else:
        told = sglang_setup(last, said or {}) if dialect == "sglang" else llama_setup(said or {})
    told = replace(told, **(setup or {}))
    given = read_flags(flags or "", dialect)
    return Observation(with_flags(told, given), readings, given, flags is not None, **more)

"""Where each dialect reports what the doctor looks at beyond `EngineLoad`: alternatives, the newest first.

Sources: vLLM 0.32 `v1/metrics/loggers.py` and `kv_connector/v1/offloading/metrics.py`, SGLang 0.5.23
`srt/observability/metrics_collector.py`, llama.cpp `tools/server/server-context.cpp`, and our own gateway.
"""

from __future__ import annotations

from dataclasses import dataclass

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Sample names by figure; of histograms the base name. Empty: this engine does not report it."""

    generation_tokens: Names = ()
    prompt_tokens: Names = ()
    computed_tokens: Names = ()
    """Prompt tokens that were not found in a cache."""
    finished: Names = ()
    aborted: Names = ()
    aborted_label: tuple[str, str] | None = None
    evicted_tokens: Names = ()
    evictable_tokens: Names = ()
    used_tokens: Names = ()
    capacity_tokens: Names = ()
    context_tokens: Names = ()
    clients: Names = ()
    """Open client requests, as the HTTP server counts them."""
    longest_tokens: Names = ()
    state_usage: Names = ()
    weights_gb: Names = ()
    pool_gb: Names = ()
    compute_seconds: Names = ()
    """Seconds spent in prefill."""
    offload_tokens: Names = ()
    offload_bytes: Names = ()
    offload_seconds: Names = ()
    prompt_lengths: Names = ()
    answer_lengths: Names = ()
    first_token_s: Names = ()
    token_gap_s: Names = ()


VLLM = Metrics(
    generation_tokens=("vllm:generation_tokens_total",),
    prompt_tokens=("vllm:prompt_tokens_total",),
    finished=("vllm:request_success_total",),
    aborted=("vllm:request_success_total",),
    aborted_label=("finished_reason", "abort"),
    computed_tokens=("vllm:request_prefill_kv_computed_tokens_sum",),
    compute_seconds=("vllm:request_prefill_time_seconds_sum",),
    offload_bytes=("vllm:kv_offload_load_bytes_total", "vllm:kv_offload_load_bytes"),
    offload_seconds=("vllm:kv_offload_load_time_total", "vllm:kv_offload_load_time"),
    offload_tokens=("vllm:external_prefix_cache_hits_total",),
    prompt_lengths=("vllm:request_prompt_tokens",),
    answer_lengths=("vllm:request_generation_tokens",),
    first_token_s=("vllm:time_to_first_token_seconds",),
    token_gap_s=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
)
SGLANG = Metrics(
    generation_tokens=("sglang:generation_tokens_total",),
    prompt_tokens=("sglang:prompt_tokens_total",),
    finished=("sglang:num_requests_total",),
    aborted=("sglang:num_aborted_requests_total",),
    evicted_tokens=("sglang:evicted_tokens_total",),
    evictable_tokens=("sglang:kv_evictable_tokens",),
    used_tokens=("sglang:kv_used_tokens", "sglang:num_used_tokens"),
    capacity_tokens=("sglang:max_total_num_tokens",),
    context_tokens=("sglang:context_len",),
    clients=("sglang:http_requests_active",),
    state_usage=("sglang:mamba_usage",),
    weights_gb=("sglang:weight_memory_usage_gb",),
    pool_gb=("sglang:kv_cache_memory_usage_gb",),
    offload_tokens=("sglang:load_back_tokens_total",),
    offload_seconds=("sglang:load_back_duration_seconds_sum",),
    prompt_lengths=("sglang:prompt_tokens_histogram",),
    answer_lengths=("sglang:generation_tokens_histogram",),
    first_token_s=("sglang:time_to_first_token_seconds",),
    token_gap_s=("sglang:inter_token_latency_seconds",),
)
LLAMA_SERVER = Metrics(
    generation_tokens=("llamacpp:tokens_predicted_total",),
    prompt_tokens=("llamacpp:prompt_tokens_total",),
    computed_tokens=("llamacpp:prompt_tokens_total",),
    compute_seconds=("llamacpp:prompt_seconds_total",),
    longest_tokens=("llamacpp:n_tokens_max",),
)
GATEWAY = Metrics(
    generation_tokens=("kvsteward:output_tokens_total",),
    prompt_tokens=("kvsteward:prompt_tokens_total",),
    finished=("kvsteward:turns_total",),
    used_tokens=("kvsteward:resident_tokens",),
    capacity_tokens=("kvsteward:kv_capacity_tokens",),
    prompt_lengths=("kvsteward:session_tokens",),
    first_token_s=("kvsteward:ttft_seconds",),
)
METRICS = {"vllm": VLLM, "sglang": SGLANG, "llama-server": LLAMA_SERVER}
PREFIXES = {"vllm:": "vllm", "sglang:": "sglang", "llamacpp:": "llama-server"}

"""Prometheus text to figures: exact values, old and new names, and what is missing stays None."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.engines.base import EngineLoad
from kvsteward.engines.metrics import LLAMA_SERVER, SGLANG, VLLM, Dialect, parse_load, parse_vllm_cache_config

# The lines of vLLM 0.32's own /metrics, with other numbers.
VLLM_032 = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smol"} 3.0
vllm:num_requests_waiting{engine="0",model_name="smol"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="smol"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="smol"} 1304.0
vllm:prefix_cache_queries_created{engine="0",model_name="smol"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0",model_name="smol"} 256.0
vllm:num_preemptions_total{engine="0",model_name="smol"} 1.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="364"} 1.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="smol"} 1.0
"""
VLLM_OLD = """
vllm:num_requests_running{model_name="m"} 1
vllm:num_requests_waiting{model_name="m"} 0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 100
vllm:gpu_prefix_cache_hits_total{model_name="m"} 40
"""
SGLANG_TEXT = """
sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:token_usage{model_name="m"} 0.28
sglang:full_token_usage{model_name="m"} 0.30
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:cached_tokens_total{model_name="m"} 1000.0
sglang:num_retracted_reqs{model_name="m"} 7.0
"""
LLAMA_TEXT = """
llamacpp:prompt_tokens_total 70
llamacpp:prompt_tokens_cached_total 30
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
"""


def test_vllm_today() -> None:
    assert parse_load(VLLM_032, VLLM) == EngineLoad(3, 2, 0.25, 1, 1304, 256)


def test_vllm_with_the_names_of_old() -> None:
    assert parse_load(VLLM_OLD, VLLM) == EngineLoad(1, 0, 0.5, None, 100, 40)


def test_the_new_name_wins_where_both_are_there() -> None:
    text = "vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.1\n"
    assert parse_load(text, VLLM).kv_usage_ratio == 0.1


def test_sglang() -> None:
    assert parse_load(SGLANG_TEXT, SGLANG) == EngineLoad(4, 1, 0.30, None, 8_128_902, 1000)


def test_llama_server_counts_cached_tokens_apart() -> None:
    assert parse_load(LLAMA_TEXT, LLAMA_SERVER) == EngineLoad(1, 2, None, None, 100, 30)


def test_an_older_llama_server_without_the_cached_counter_reports_neither() -> None:
    load = parse_load("llamacpp:prompt_tokens_total 70\n", LLAMA_SERVER)
    assert (load.prefix_queried_tokens_total, load.prefix_hit_tokens_total) == (None, None)


def test_data_parallel_ranks_add_up_and_the_fullest_pool_counts() -> None:
    text = 'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 2\n'
    text += 'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.7\n'
    load = parse_load(text, VLLM)
    assert (load.running, load.kv_usage_ratio) == (3, 0.7)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
@pytest.mark.parametrize("name", ["vllm:kv_cache_usage_perc", "vllm:num_requests_running"])
def test_what_is_not_a_number_is_none(name: str, value: str) -> None:
    assert parse_load(f"{name} {value}\n", VLLM) == EngineLoad()


@pytest.mark.parametrize("dialect", [VLLM, SGLANG, LLAMA_SERVER])
def test_an_empty_page_is_all_none(dialect: Dialect) -> None:
    assert parse_load("", dialect) == EngineLoad()


def test_vllm_capacity_is_blocks_times_block_size() -> None:
    """The figure that vLLM 0.32 itself printed for 1 GiB of SmolLM2's cache: 46,592 tokens."""
    config = parse_vllm_cache_config(VLLM_032)
    assert (config.block_tokens, config.blocks, config.dtype) == (128, 364, "auto")
    assert config.capacity_tokens == 46_592


def test_vllm_says_itself_what_a_hybrid_pool_holds() -> None:
    text = 'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="5000",num_gpu_blocks="100"} 1.0\n'
    assert parse_vllm_cache_config(text).capacity_tokens == 5000


@pytest.mark.parametrize("blocks", ["None", "", "-3", "0"])
def test_vllm_capacity_unknown(blocks: str) -> None:
    text = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'
    assert parse_vllm_cache_config(text).capacity_tokens is None


def test_vllm_ranks_add_their_blocks() -> None:
    rank = 'vllm:cache_config_info{{block_size="16",engine="{}",num_gpu_blocks="100"}} 1.0\n'
    assert parse_vllm_cache_config(rank.format(0) + rank.format(1)).capacity_tokens == 3200


@given(running=st.integers(0, 10**6), usage=st.floats(0, 1), junk=st.text("abc{}_# \n", max_size=60))
def test_other_lines_never_matter(running: int, usage: float, junk: str) -> None:
    noise = "\n".join(f"other_{line}" for line in junk.splitlines())
    text = f"{noise}\nvllm:num_requests_running {running}\n{noise}\nvllm:kv_cache_usage_perc {usage!r}\n"
    load = parse_load(text, VLLM)
    assert (load.running, load.kv_usage_ratio) == (running, usage)

"""Runs inside vLLM's environment: its own grouping code on layers given as JSON, one answer a case.

Reads a list of cases on standard input: layers (kind, heads, dims, window, state bytes), sizes and lengths. Prints for
each what vLLM makes of them: groups, bytes of a block, blocks a request of the longest length needs, blocks of a pool.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core import kv_cache_utils as utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

DTYPES = {2: torch.bfloat16, 1: torch.uint8, 4: torch.float32}


def spec_of(layer: dict[str, Any], case: dict[str, Any]) -> Any:
    kind, block = layer["kind"], case["block_tokens"]
    if kind == "state":
        return MambaSpec(
            block_size=case["max_model_len"] if not case["state_page"] else block,
            shapes=((layer["state_bytes"],),),
            dtypes=(torch.uint8,),
            page_size_padded=case["state_page"],
            mamba_cache_mode=case["state_mode"],
            num_speculative_blocks=case["draft_tokens"],
        )
    common = {
        "block_size": block,
        "num_kv_heads": layer["heads"],
        "head_size": layer["k_dim"],
        "dtype": DTYPES[case["bytes"]],
    }
    if kind == "latent":
        packed = {"head_size": 656, "dtype": torch.uint8} if layer["index_dim"] and case["bytes"] == 1 else {}
        return MLAAttentionSpec(**common | packed)
    common["head_size_v"] = layer["v_dim"]
    if kind == "sliding":
        return SlidingWindowSpec(**common, sliding_window=layer["span"])
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=layer["span"])
    return FullAttentionSpec(**common)


def compressed_specs(case: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-V4's caches, layer by layer, as vllm/models/deepseek_v4 declares them."""
    eight_bit = case["bytes"] == 1
    align, content = (576, 584) if eight_bit else (512, None)
    dtype = torch.uint8 if eight_bit else torch.bfloat16
    name = "fp8_ds_mla" if eight_bit else "auto"
    found: dict[str, Any] = {}
    for index, ratio in enumerate(case["ratios"]):
        latent = {"num_kv_heads": 1, "max_tp_shards": 1, "head_size": 512, "dtype": dtype, "alignment": align}
        latent |= {"cache_dtype_str": name, "state_content_bytes": content, "model_version": "deepseek_v4"}
        found[f"{index}.swa"] = SlidingWindowMLASpec(block_size=64, sliding_window=128, **latent)
        if not ratio:
            continue
        found[f"{index}.mla"] = MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **latent)
        found[f"{index}.state"] = state_spec(ratio, 512, align)
        if ratio == 4:
            key = {"num_kv_heads": 1, "max_tp_shards": 1, "head_size": 132, "dtype": torch.uint8, "alignment": align}
            found[f"{index}.index"] = MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **key)
            found[f"{index}.index.state"] = state_spec(ratio, 128, align)
    return found


def state_spec(ratio: int, dim: int, align: int) -> Any:
    overlap = 2 if ratio == 4 else 1
    return SlidingWindowMLASpec(
        block_size=4 if ratio == 4 else 8,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=2 * overlap * dim,
        dtype=torch.float32,
        sliding_window=overlap * ratio,
        alignment=align,
    )


def config_of(case: dict[str, Any]) -> Any:
    layout = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLNHC if case.get("ratios") else KVCacheLayout.LBNHC,
        mamba_cache_mode=case["state_mode"],
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
    )
    return SimpleNamespace(
        cache_config=layout,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not case["hybrid_manager"]),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=case["max_model_len"]),
        speculative_config=None,
        max_in_flight_tokens=case["in_flight_tokens"],
    )


def answer(case: dict[str, Any]) -> dict[str, Any]:
    config = config_of(case)
    specs = {f"layer.{index}": spec_of(layer, case) for index, layer in enumerate(case["layers"])}
    for index, layer in enumerate(case["layers"]):
        if layer["kind"] == "latent" and layer["index_dim"]:
            key = {"block_size": case["block_tokens"], "num_kv_heads": 1, "head_size": layer["index_dim"] + 4}
            specs[f"layer.{index}.index"] = MLAAttentionSpec(**key, dtype=torch.uint8)
    if case.get("ratios"):
        specs = compressed_specs(case)
    groups = utils.get_kv_cache_groups(config, specs)
    made = utils.get_kv_cache_config_from_groups(config, groups, case["pool_bytes"])
    tokens, concurrency = utils.get_kv_cache_capacity(config, made)
    return {
        "groups": len(groups),
        "block_bytes": utils._pool_bytes_per_block(config, groups),
        "blocks": made.num_blocks,
        "tokens": tokens,
        "pages": round(made.num_blocks / concurrency),
    }


def main() -> None:
    print(json.dumps([answer(case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()

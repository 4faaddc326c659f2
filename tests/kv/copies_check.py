"""Run by vLLM's Python: blocks of real KV tensors, in every layout that vLLM has, survive the way to a slot and back.

Prints one JSON object: for each case the layers that did not come back bit for bit (none is right), and what the
shapes say. No engine is started.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, MLAAttentionSpec
from vllm.v1.request import Request

from kvsteward.errors import ConfigError
from kvsteward.kv.vllm import compat
from kvsteward.kv.vllm.copies import Copies, Place
from kvsteward.kv.vllm.segment import Segment

BLOCKS, LAYERS = 12, 5
PAIRS = [(0, 3), (4, 1), (2, 11), (5, 5)]
SLOTS, SLOT_BYTES, OFFSET = 8, 1 << 20, 128
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.float8_e4m3fn, "uint8": torch.uint8}


def layers(kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Per-layer views [block, head, token, channel] of one allocation, as vLLM makes them."""
    heads, tokens, channels = (1, 16, 40) if kind == "mla" else (3, 32, 128)
    order = {  # of the memory, outermost first
        "LBHNC": (0, 1, 2, 3, 4),
        "mla": (0, 1, 2, 3, 4),
        "LBNHC": (0, 1, 3, 2, 4),
        "BLHNC": (1, 0, 2, 3, 4),
        "BHLNC": (1, 2, 0, 3, 4),
        "BLNHC": (1, 0, 3, 2, 4),
        "LHBNC": (0, 2, 1, 3, 4),
        "kernel": (0, 1, 2, 3, 4),
    }[kind]
    shape = [LAYERS, BLOCKS * (4 if kind == "kernel" else 1), heads, tokens, channels]
    memory = torch.zeros([shape[axis] for axis in order], dtype=dtype)
    logical = memory.permute([order.index(axis) for axis in range(5)])
    return {f"layer.{n}": logical[n] for n in range(LAYERS)}


def fill(caches: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for cache in caches.values():
        noise = torch.randint(0, 256, (*cache.shape[:-1], cache.shape[-1] * cache.element_size()), generator=generator)
        cache.copy_(noise.to(torch.uint8).view(cache.dtype))


def raw(cache: torch.Tensor, block: int) -> bytes:
    rows = cache.shape[0] // BLOCKS
    part = cache[block * rows : (block + 1) * rows].contiguous()
    return part.view(torch.uint8).numpy().tobytes()


def case(kind: str, back: str, dtype: torch.dtype, *, staged: bool = False) -> list[str]:
    """Saved from tensors of one layout, loaded into those of another."""
    source, target = layers(kind, dtype), layers(back, dtype)
    fill(source, 1)
    fill(target, 2)
    before = {name: [raw(cache, block) for block in range(BLOCKS)] for name, cache in target.items()}
    segment = Segment.create(SLOTS * SLOT_BYTES)
    place = Place(segment.name, SLOTS, SLOT_BYTES, OFFSET)
    for caches, act in ((source, "save"), (target, "load")):
        copies = Copies(torch, caches, BLOCKS, staged=staged)
        copies.attach(place)
        getattr(copies, act)(PAIRS)
    wrong = []
    touched = {block for _, block in PAIRS}
    for name in source:
        for block in range(BLOCKS):
            right = raw(source[name], block) if block in touched else before[name][block]
            if raw(target[name], block) != right:
                wrong.append(f"{name}[{block}]")
    segment.close()
    return wrong


def refused(caches: dict[str, Any], blocks: int) -> str:
    try:
        Copies(torch, caches, blocks)
    except ConfigError as error:
        return error.message
    return ""


def engine(**changed: Any) -> str:
    """What `check_tiers` says of an engine that differs in one thing from one that is all right."""
    full = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    windowed = replace(full, sliding_window=64)
    groups = {"one": [full], "two": [full, full], "windowed": [windowed]}[changed.get("groups", "one")]
    parallel = {"nnodes": 1, "distributed_executor_backend": "mp", "decode_context_parallel_size": 1}
    parallel |= {"prefill_context_parallel_size": 1, **{k: v for k, v in changed.items() if k in parallel}}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=SimpleNamespace(method=changed["draft"]) if "draft" in changed else None,
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=changed.get("hashing", "sha256"), calculate_kv_scales=changed.get("scales", False)
        ),
    )
    cache = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in groups],
        hash_block_size=changed.get("hashed", 32),
    )
    try:
        compat.check_tiers(config, cache)
    except ConfigError as error:
        return error.message
    return ""


def hashes(salt: str | None) -> list[str]:
    """vLLM's own block hashes of one prompt under a `cache_salt`."""
    init_none_hash(sha256)
    request = Request(
        request_id="r",
        prompt_token_ids=list(range(70)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(32, sha256),
    )
    return [block_hash.hex() for block_hash in request.block_hashes]


def main() -> None:
    report: dict[str, Any] = {"wrong": {}, "layouts": sorted(layout.name for layout in KVCacheLayout)}
    for name, dtype in DTYPES.items():
        for kind in (*(layout.name for layout in KVCacheLayout), "kernel", "mla"):
            report["wrong"][f"{name} {kind}"] = case(kind, kind, dtype)
        report["wrong"][f"{name} LBNHC to BLHNC"] = case("LBNHC", "BLHNC", dtype)
        report["wrong"][f"{name} staged"] = case("LBNHC", "BLHNC", dtype, staged=True)
    one = layers("LBHNC", torch.bfloat16)
    shape = Copies(torch, one, BLOCKS).shape
    shared = Copies(torch, {**one, "layer.again": one["layer.0"]}, BLOCKS).shape
    report["part_bytes"] = shape.part_bytes
    report["shared_is_counted_once"] = shared.part_bytes == shape.part_bytes
    kinds = {
        kind: Copies(torch, layers(kind, torch.bfloat16), BLOCKS).shape.digest for kind in ("LBHNC", "kernel", "mla")
    }
    report["digests_differ"] = len(set(kinds.values())) == len(kinds)
    report["refused"] = [refused(one, 5), refused({}, 5)]
    full = {"block_size": 32, "num_kv_heads": 3, "head_size": 64, "dtype": torch.bfloat16}
    report["kinds"] = {
        "full": compat._kind(FullAttentionSpec(**full)),
        "windowed": compat._kind(FullAttentionSpec(**full, sliding_window=64)),
        "mla": compat._kind(MLAAttentionSpec(**{**full, "num_kv_heads": 1})),
    }
    report["engines"] = {
        name: engine(**changed)
        for name, changed in {
            "right": {},
            "ngram": {"draft": "ngram"},
            "two groups": {"groups": "two"},
            "windowed": {"groups": "windowed"},
            "nodes": {"nnodes": 2},
            "ray": {"distributed_executor_backend": "ray"},
            "context": {"decode_context_parallel_size": 2},
            "draft": {"draft": "eagle"},
            "hashing": {"hashing": "xxhash"},
            "scales": {"scales": True},
            "finer hashes": {"hashed": 16},
        }.items()
    }
    report["hashes"] = [hashes(None), hashes("a"), hashes("b"), hashes("a")]
    config = SimpleNamespace(kv_transfer_config=KVTransferConfig(kv_connector="X", kv_role="kv_both"))
    compat.recompute_bad_loads(config)
    report["policy"] = config.kv_transfer_config.kv_load_failure_policy
    report["weights"] = [compat.weights_identity(sys.argv[1]), compat.weights_identity("org/name")]
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""What kvsteward touches of vLLM's offloading (`vllm/v1/kv_offload`), apart from `compat` so that the connector does
not need it. Written against vLLM 0.32; `compat.check` refuses other versions.
"""

from __future__ import annotations

import json
from typing import Any

import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvsteward.kv.blocks import Fingerprint, key
from kvsteward.kv.vllm import compat

__all__ = [
    "AsyncLookupManager",
    "CachePolicy",
    "JobResult",
    "Locality",
    "LookupResult",
    "Medium",
    "RequestOffloadingContext",
    "SecondaryTierManager",
    "order_request_keys",
]


def fingerprint(spec: Any, chunk_bytes: int, *, revision: str, salt: str, codec: str) -> Fingerprint:
    """Of the chunks of one engine. Where vLLM says that their bytes do not depend on how the engine is split (as for
    its own file tier), neither does the fingerprint."""
    config = spec.config
    parallel = config.parallel
    alike = parallel.is_parallelism_agnostic or config.replicated_layout
    sizes = [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.rank]
    groups = [(group.tokens_per_block, list(group.layer_names)) for group in config.groups]
    return Fingerprint(
        model=config.model.name,
        revision=revision or compat.weights_identity(config.model.name),
        dtype=config.model.dtype,
        layout=f"offload {config.kv_cache_layout} canonical={config.canonical_layout}",
        block_tokens=config.cache.tokens_per_hash * config.cache.blocks_per_chunk,
        block_bytes=chunk_bytes,
        codec=codec,
        engine="vllm",
        engine_version=str(vllm.__version__),
        tenant_salt=salt,
        extra=json.dumps([groups, config.replicated_layout, None if alike else sizes]),
    )


def store_key(digest: bytes, offload_key: bytes) -> bytes:
    """The block store's key of an offload key. Raises ValueError on a block hash that is too long."""
    return key(digest, get_offload_block_hash(offload_key), get_offload_group_idx(offload_key))

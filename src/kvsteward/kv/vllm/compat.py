"""All that kvsteward touches of vLLM's internals, checked at start.

Written against vLLM 0.32 (`v1/core/block_pool.py`, `v1/core/kv_cache_utils.py`, `v1/core/sched/scheduler.py`,
`distributed/kv_transfer/kv_connector/v1/base.py`). An unknown version is refused with a ConfigError unless it is named
in `kv_connector_extra_config`: {"allow_version": "0.33.0"}; what is missing in it is refused all the same.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import vllm
from prometheus_client import REGISTRY
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from kvsteward.errors import ConfigError, InvariantError
from kvsteward.kv.blocks import Fingerprint
from kvsteward.kv.vllm.copies import Copies, Shape
from kvsteward.kv.vllm.free_list import FreeList
from kvsteward.policy.returns import Size

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
]

KNOWN = ("0.32",)
_QUEUE_CALLS = {
    "popleft": 0,
    "popleft_n": 1,
    "remove": 1,
    "append": 1,
    "prepend_n": 1,
    "append_n": 1,
    "get_all_free_blocks": 0,
    "iter_blocks_after": 1,
}


def check(allow_version: str | None = None) -> None:
    """Raises ConfigError where this vLLM is not one that kvsteward knows."""
    version = str(vllm.__version__)
    if ".".join(version.split(".")[:2]) not in KNOWN and version != allow_version:
        raise ConfigError(
            f"vLLM {version} is unknown to this kvsteward (it knows {', '.join(KNOWN)})",
            hint='Use a known vLLM, leave the connector out, or set kv_connector_extra_config {"allow_version": ...}.',
        )
    public = {n for n, f in inspect.getmembers(FreeKVCacheBlockQueue, inspect.isfunction) if not n.startswith("_")}
    if public != set(_QUEUE_CALLS):
        raise ConfigError(f"vLLM {version}: the free list has other calls: {sorted(public ^ set(_QUEUE_CALLS))}")
    for name, arguments in _QUEUE_CALLS.items():
        wanted = len(inspect.signature(getattr(FreeKVCacheBlockQueue, name)).parameters) - 1
        if wanted != arguments:
            raise ConfigError(f"vLLM {version}: {name}() of the free list takes {wanted} arguments, not {arguments}")


def free_blocks(pool: Any) -> Sequence[Any]:
    """The pool's free blocks in its own order. Raises ConfigError if the pool is not as expected."""
    if type(pool) is not BlockPool or type(pool.free_block_queue) is not FreeKVCacheBlockQueue:
        raise ConfigError(f"the block pool is a {type(pool).__name__}, not vLLM's own")
    return list(pool.free_block_queue.get_all_free_blocks())


def replace(pool: Any, free: FreeList) -> None:
    """Puts our free list in the place of the pool's. Raises ConfigError if their totals differ."""
    if free.num_free_blocks != pool.get_num_free_blocks():
        raise ConfigError(f"{free.num_free_blocks} blocks in the new free list, {pool.get_num_free_blocks()} in vLLM's")
    pool.free_block_queue = free


def check_totals(pool: Any, free: FreeList) -> None:
    """Raises InvariantError unless free + held = all blocks but the null block."""
    free.check()
    held = sum(1 for block in pool.blocks if block.ref_cnt > 0 and not block.is_null)
    if held + free.num_free_blocks != pool.num_gpu_blocks - 1:
        raise InvariantError(f"{held} held + {free.num_free_blocks} free of {pool.num_gpu_blocks - 1} blocks")


def caching(pool: Any) -> bool:
    return bool(pool.enable_caching)


def is_word(request: Any) -> bool:
    """A request that is over before it runs: what the endpoint plug-in says to the connector."""
    return bool(request.abort_immediately)


# in the API server's process


async def tell(client: Any, params: Mapping[str, Any]) -> None:
    """Each rank's connector gets `params` as the `kv_transfer_params` of a request that is over before it runs."""
    ranks = client.vllm_config.parallel_config.data_parallel_size
    for rank in range(ranks) if ranks > 1 else (None,):
        name = f"kvsteward-{uuid4().hex}"
        await client.notify_kv_transfer_request_rejected(name, dict(params), data_parallel_rank=rank)


def connector_metrics(client: Any) -> Any:
    """The object that the connector's `build_prom_metrics` made, or None: no connector, or no statistics."""
    loggers = getattr(getattr(client, "logger_manager", None), "stat_loggers", ())
    proms = [prom for logger in loggers if (prom := getattr(logger, "kv_connector_prom", None)) is not None]
    return next((prom.prom_metrics for prom in proms if prom.prom_metrics is not None), None)


def metric_named(name: str) -> Any:
    """The metric of this name that is in the registry of vLLM's page, or None."""
    return REGISTRY._names_to_collectors.get(name)


def api_keys(args: Any) -> list[str]:
    """The keys that vLLM's own middleware asks for on its guarded paths."""
    return [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]


def stop_reason(request: Any) -> str:
    """Why the turn ended, in vLLM's words: "stopped", "length_capped", "aborted"..."""
    return str(request.status.name).removeprefix("FINISHED_").lower()


# moving KV


def same_weights(request: Any) -> bool:
    """No adapter: vLLM's hashes name one by its path, and another one may lie there tomorrow."""
    return request.lora_request is None


def tenant_session(request: Any) -> str:
    """The session's name in the store: the same id under another `cache_salt` is another session. "" for none."""
    session = str(request.session_id or "")
    return f"{scope_of(request.cache_salt)}:{session}" if session and request.cache_salt else session


def scope_of(cache_salt: str) -> str:
    """What a salt is called in names; it does not tell the salt."""
    return hashlib.sha256(cache_salt.encode()).hexdigest()[:16]


def check_tiers(config: Any, cache: Any) -> None:
    """Raises ConfigError where KV blocks of this engine cannot be moved as whole blocks of one group."""
    parallel, groups = config.parallel_config, cache.kv_cache_groups
    kinds = sorted({_kind(group.kv_cache_spec) for group in groups})
    if len(groups) != 1 or kinds != ["full attention"]:
        raise ConfigError(
            f"tiers keep full attention in one KV group; this model has {len(groups)} groups: {', '.join(kinds)}",
            hint="Leave host_gib out: idle sessions are still kept in the engine's own pool.",
        )
    if parallel.nnodes > 1 or str(parallel.distributed_executor_backend) not in ("uni", "mp"):
        raise ConfigError("tiers need all workers of an engine on one machine (executor uni or mp, one node)")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("tiers do not know context parallelism, which splits blocks over ranks")
    draft = getattr(config.speculative_config, "method", None)
    if draft not in (None, "ngram", "suffix"):
        raise ConfigError(
            f"tiers do not know speculative decoding by {draft}: its KV may lag behind",
            hint="Use ngram speculation, or leave host_gib out.",
        )
    if not config.cache_config.prefix_caching_hash_algo.startswith("sha256"):
        raise ConfigError(
            f"tiers find blocks by their hash, and {config.cache_config.prefix_caching_hash_algo} can collide",
            hint="Use --prefix-caching-hash-algo sha256 (or sha256_cbor).",
        )
    if cache.hash_block_size not in (None, groups[0].kv_cache_spec.block_size):
        raise ConfigError("tiers need one hash for each block")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ConfigError("tiers need KV scales that are the same in every process, not calculated ones")


def _kind(spec: Any) -> str:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = {_kind(layer) for layer in spec.kv_cache_specs.values()}
        return " and ".join(sorted(kinds))
    windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if isinstance(spec, FullAttentionSpec) and not windowed:
        return "full attention"
    return type(spec).__name__


def recompute_bad_loads(config: Any) -> None:
    """A block that cannot be loaded is computed; vLLM's default would fail the request. Read by the scheduler after
    it has made its connector."""
    config.kv_transfer_config.kv_load_failure_policy = "recompute"


def copies(config: Any, cache: Any, tensors: Mapping[str, Any]) -> Copies:
    """The worker's copier. Raises ConfigError where the tensors are not blocks of layers."""
    layers = config.compilation_config.static_forward_context
    names = [name for name in tensors if name in layers]
    backends = sorted({_packing(layers[name]) for name in names})
    return Copies(torch, tensors, cache.num_blocks, backends=",".join(backends))


def _packing(layer: Any) -> str:
    """What decides how an attention backend packs a block: its name, and on the CPU the instruction set."""
    backend = getattr(layer, "attn_backend", None)
    name = backend.get_name() if backend is not None else type(layer).__name__
    return f"{name}/{getattr(layer, 'isa', '')}"


def data_parallel_rank(config: Any) -> int:
    """The engine's among its data-parallel ones; for dense models, too, whose rank vLLM sets to 0."""
    return int(config.parallel_config.data_parallel_index)


def rank() -> tuple[int, int]:
    """This worker's, as vLLM names it in the handshake: (pp, tp)."""
    return get_pp_group().rank_in_group, get_tp_group().rank_in_group


def fingerprint(config: Any, cache: Any, shapes: Sequence[Shape], salt: str) -> Fingerprint:
    """Whose KV this engine's blocks are. `shapes`: of all ranks, in the order of their parts."""
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    rope = {
        n: getattr(text, n, None) for n in ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
    }
    parts = ";".join(f"{shape.digest}:{shape.part_bytes}:{shape.backends}" for shape in shapes)
    return Fingerprint(
        model=weights_identity(model.model) or str(model.model),
        revision=str(model.revision or ""),
        dtype=f"{model.dtype} {config.cache_config.cache_dtype} {shapes[0].dtype}",
        layout=f"{cache.kv_cache_layout} {parts}",
        block_tokens=cache.kv_cache_groups[0].kv_cache_spec.block_size,
        block_bytes=sum(shape.part_bytes for shape in shapes),
        layers=sum(shape.layers for shape in shapes),
        kv_heads=shapes[0].heads,
        head_size=model.get_head_size(),
        rope=json.dumps(rope, sort_keys=True, default=str),
        hashing=f"{config.cache_config.prefix_caching_hash_algo} {os.environ.get('PYTHONHASHSEED', '')}",
        engine="vllm",
        engine_version=str(vllm.__version__),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        tenant_salt=salt,
        extra=str(model.quantization or ""),
    )


_SAMPLES, _SAMPLE_BYTES = 64, 4096


def weights_identity(model: str) -> str:
    """A model in a directory may be another one tomorrow under the same name: its configuration, and 64 samples of
    4 KiB of each weight file. "" for a name of a hub, which has revisions."""
    folder = Path(model)
    if not folder.is_dir():
        return ""
    hasher = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".bin", ".pt", ".gguf") or path.name.startswith("tokenizer"):
            continue
        size = path.stat().st_size
        hasher.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES if size > _SAMPLES * _SAMPLE_BYTES else 1):
                file.seek(size * sample // _SAMPLES)
                hasher.update(file.read(_SAMPLE_BYTES if size > _SAMPLES * _SAMPLE_BYTES else -1))
    return hasher.hexdigest()[:32]


def blocks_of(step: Any, request_id: str) -> Sequence[int]:
    """The request's block ids in a step's plan."""
    found = step.kv_connector_block_state.get_block_ids(request_id)
    if found is None:
        raise InvariantError(f"vLLM has no blocks for the scheduled request {request_id}")
    ids: Sequence[int] = found[0]
    return ids


def scheduled(step: Any) -> Mapping[str, int]:
    tokens: Mapping[str, int] = step.num_scheduled_tokens
    return tokens


def allocated(blocks: Any) -> Sequence[int]:
    ids: Sequence[int] = blocks.get_block_ids()[0]
    return ids


def uncache(manager: Any, pool: Any, request_ids: Iterable[str], bad: set[int]) -> None:
    """Nobody finds the bad blocks any more, nor those of the requests that come after one: whoever holds them computes
    them anew, but a request that is aborted first must not leave them behind as good ones."""
    for request_id in request_ids:
        ids = manager.get_block_ids(request_id)[0]
        first = next((n for n, block in enumerate(ids) if block in bad), len(ids))
        pool.evict_blocks(set(ids[first:]))
    pool.evict_blocks(bad)


def size(request: Any) -> Size:
    return Size(int(request.num_prompt_tokens), int(request.num_output_tokens))


def followed(request: Any, pool: Any, cached_tokens: int, follows: Callable[[int], bool]) -> tuple[list[bytes], int]:
    """Hashes of those of the prompt's blocks that `follows` takes, and how many of them lie in its first
    `cached_tokens`. A last block that ends with the prompt is left out: vLLM computes it in any case."""
    hash_tokens = int(pool.hash_block_size)
    whole = (request.num_prompt_tokens - 1) // hash_tokens
    numbered = [
        (at, block_hash)
        for at, block_hash in enumerate(request.block_hashes[:whole])
        if follows(int.from_bytes(block_hash[:8], "little"))
    ]
    cached = cached_tokens // hash_tokens
    return [block_hash for _, block_hash in numbered], sum(1 for at, _ in numbered if at < cached)

"""All that kvsteward touches of vLLM's internals, checked at start.

Written against vLLM 0.32 (`v1/core/block_pool.py`, `v1/core/kv_cache_utils.py`, `v1/core/sched/scheduler.py`,
`distributed/kv_transfer/kv_connector/v1/base.py`). An unknown version is refused with a ConfigError unless it is named
in `kv_connector_extra_config`: {"allow_version": "0.33.0"}; what is missing in it is refused all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from kvsteward.errors import ConfigError, InvariantError
from kvsteward.kv.vllm.free_list import FreeList

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
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


def api_keys(args: Any) -> list[str]:
    """The keys that vLLM's own middleware asks for on its guarded paths."""
    return [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]


def stop_reason(request: Any) -> str:
    """Why the turn ended, in vLLM's words: "stopped", "length_capped", "aborted"..."""
    return str(request.status.name).removeprefix("FINISHED_").lower()

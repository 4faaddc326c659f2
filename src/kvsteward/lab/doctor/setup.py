"""From what an engine says of itself to `Setup`: pure functions, one for each dialect.

Knows the shapes of the answers, no HTTP. Invariant: what is not said is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvsteward.engines.metrics import parse_vllm_cache_config
from kvsteward.engines.openai import context_of_card
from kvsteward.lab.doctor.knobs import Flags, Knob, given
from kvsteward.lab.doctor.names import PREFIXES, SGLANG
from kvsteward.lab.doctor.observation import Setup, Slot
from kvsteward.lab.doctor.page import Page

_CACHE_INFO = "vllm:cache_config_info"


def dialect_of(page: Page) -> str | None:
    """The dialect whose names are on a page."""
    return next((kind for prefix, kind in PREFIXES.items() if any(n.startswith(prefix) for n in page.series)), None)


def vllm_setup(text: str, page: Page, cards: Sequence[Mapping[str, Any]] = (), version: Any = None) -> Setup:
    """From vLLM's metrics, and its model card and version where they were asked for."""
    cache, labels = parse_vllm_cache_config(text), page.labels(_CACHE_INFO)
    caching = {"True": True, "False": False}.get(labels.get("enable_prefix_caching", ""))
    stateful = any(labels.get(key, "None") != "None" for key in ("mamba_block_size", "mamba_page_size_padded"))
    overridden = labels.get("num_gpu_blocks_override", "None") != "None"
    said = labels.get("kv_cache_memory_bytes", "")
    return Setup(
        "vllm",
        version=version.get("version") if isinstance(version, dict) else None,
        context_limit_tokens=next((limit for card in cards if (limit := context_of_card(card))), None),
        kv_capacity_tokens=cache.capacity_tokens,
        block_tokens=cache.block_tokens,
        kv_dtype=cache.dtype,
        prefix_caching=caching,
        pool_bytes=int(said) if said.isdigit() and not overridden else None,
        state_mode=labels.get("mamba_cache_mode") if stateful else None,
    )


def sglang_setup(page: Page, info: Mapping[str, Any]) -> Setup:
    """From `/server_info`, which holds all of SGLang's arguments, and from its metrics."""
    chunk, off = info.get("chunked_prefill_size"), info.get("disable_radix_cache")
    dtype = info.get("kv_cache_dtype")
    return Setup(
        "sglang",
        version=str(info["version"]) if "version" in info else None,
        context_limit_tokens=_natural(info.get("context_length")) or _natural(page.largest(SGLANG.context_tokens)),
        kv_capacity_tokens=_natural(info.get("max_total_num_tokens")) or _natural(page.largest(SGLANG.capacity_tokens)),
        block_tokens=_natural(info.get("page_size")) or _natural(page.largest(("sglang:page_size",))),
        max_running=_natural(info.get("max_running_requests")),
        kv_dtype=dtype if isinstance(dtype, str) else None,
        prefix_caching=not off if isinstance(off, bool) else None,
        chunked_prefill=chunk > 0 if isinstance(chunk, int) else None,
        tensor_parallel=_natural(info.get("tp_size")),
        data_parallel=_natural(info.get("dp_size")),
    )


def llama_setup(props: Mapping[str, Any]) -> Setup:
    """From `/props`. Whether the slots share one pool is not said."""
    settings = props.get("default_generation_settings")
    limit = _natural(settings.get("n_ctx")) if isinstance(settings, dict) else None
    return Setup(
        "llama-server",
        version=str(props["build_info"]) if "build_info" in props else None,
        context_limit_tokens=limit,
        max_running=_natural(props.get("total_slots")),
    )


def gateway_setup(memory: Mapping[str, Any], health: Mapping[str, Any]) -> Setup:
    """From the account of a kvsteward gateway."""
    engine = health.get("engine")
    engine = engine if isinstance(engine, dict) else {}
    return Setup(
        str(engine.get("dialect") or "openai"),
        version=engine.get("version"),
        kv_capacity_tokens=_natural(memory.get("kv_capacity_tokens")),
        block_tokens=_natural(memory.get("block_size")),
        kv_dtype=memory.get("k_dtype"),
        gateway=True,
    )


def with_flags(setup: Setup, flags: Flags) -> Setup:
    """What the engine did not say and the user's command line does."""

    def number(knob: Knob) -> int | None:
        text = given(flags, setup.dialect, knob)
        return int(text) if text is not None and text.isdigit() and int(text) > 0 else None

    limit = number(Knob.CONTEXT)
    if setup.dialect == "llama-server" and limit is not None:
        limit //= number(Knob.MAX_RUNNING) or setup.max_running or 1
    return replace(
        setup,
        context_limit_tokens=setup.context_limit_tokens or limit,
        max_running=setup.max_running or number(Knob.MAX_RUNNING),
        block_tokens=setup.block_tokens or number(Knob.BLOCK),
        tensor_parallel=setup.tensor_parallel or number(Knob.TENSOR_PARALLEL),
        kv_dtype=setup.kv_dtype or given(flags, setup.dialect, Knob.KV_DTYPE),
    )


def read_slots(answer: Any) -> tuple[Slot, ...] | None:
    """llama-server's `/slots`; None if they are switched off."""
    if not isinstance(answer, list):
        return None
    return tuple(_slot(entry) for entry in answer if isinstance(entry, dict))


def _slot(entry: Mapping[str, Any]) -> Slot:
    following = entry.get("next_token")
    following = following[0] if isinstance(following, list) and following else following
    params = entry.get("params")
    streamed = params.get("stream") if isinstance(params, dict) else None
    return Slot(
        int(entry.get("id", 0)),
        entry.get("id_task") if isinstance(entry.get("id_task"), int) else None,
        bool(entry.get("is_processing")),
        _natural(entry.get("n_ctx")) or 0,
        _natural(entry.get("n_prompt_tokens")) or 0,
        _natural(entry.get("n_prompt_tokens_cache")) or 0,
        (_natural(following.get("n_decoded")) or 0) if isinstance(following, dict) else 0,
        streamed if isinstance(streamed, bool) else None,
    )


def _natural(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        return None
    return int(value)

"""From a description of an engine to its adapter: the one place that knows every kind.

Invariant: `create_engine` touches no network and starts nothing; only `detect` and `start` do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from kvsteward.engines.base import Engine
from kvsteward.engines.embedded import EmbeddedEngine, EmbeddedOptions
from kvsteward.engines.http import HttpClient, HttpOptions
from kvsteward.engines.llama import LlamaServerEngine
from kvsteward.engines.openai import OpenAIEngine, Overrides
from kvsteward.engines.scripted import ScriptedEngine, ScriptedOptions
from kvsteward.engines.sglang import SglangEngine
from kvsteward.engines.vllm import Hints, VllmEngine
from kvsteward.errors import ConfigError, EngineError, EngineUnavailableError

Kind = Literal["embedded", "llama-server", "vllm", "sglang", "openai", "scripted", "auto"]

_DETECT_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the user says about an engine. `None` means: ask the engine, or take the kind's default."""

    kind: Kind = "embedded"
    url: str | None = None
    api_key: str | None = None
    model: Path | None = None
    """Embedded: a GGUF file."""
    slots: int | None = None
    """Embedded: resident sessions. Elsewhere: requests that may run at the same time."""
    context_tokens: int | None = None
    kv_tokens: int | None = None
    """The size of the KV pool, over all requests."""
    kv_unified: bool | None = None
    k_type: str = "f16"
    v_type: str = "f16"
    threads: int | None = None
    host_cache_mib: int = 0
    connect_timeout_s: float = 5.0
    idle_read_timeout_s: float = 600.0
    hints: Hints = "auto"
    """vLLM: whether its connector is told of sessions."""


def create_engine(spec: EngineSpec) -> Engine:
    """The adapter for a spec, not yet started. Raises ConfigError; "auto" must go through `resolve` first."""
    if spec.kind == "embedded":
        return _embedded(spec)
    if spec.kind == "scripted":
        return ScriptedEngine(_scripted_options(spec))
    if spec.kind == "auto":
        raise ConfigError("the engine's kind is not known yet", hint="Name it, or let 'resolve' ask the URL.")
    makers: dict[str, Callable[[HttpOptions, Overrides], Engine]] = {
        "openai": OpenAIEngine,
        "vllm": lambda http, said: VllmEngine(http, said, hints=spec.hints),
        "sglang": SglangEngine,
        "llama-server": lambda http, said: LlamaServerEngine(http, said, kv_unified=spec.kv_unified),
    }
    if spec.kind not in makers:
        raise ConfigError(f"no such kind of engine: {spec.kind!r}", hint=f"One of {', '.join(get_args(Kind))}.")
    return makers[spec.kind](_http_options(spec), _overrides(spec))


async def resolve(spec: EngineSpec) -> Engine:
    """`create_engine`, but a spec of kind "auto" is first asked what it is. Raises ConfigError or EngineError."""
    if spec.kind != "auto":
        return create_engine(spec)
    if spec.url is None:
        return _embedded(spec)
    options = _http_options(spec)
    return create_engine(replace(spec, kind=await detect(options)))


async def detect(options: HttpOptions, *, within_s: float = _DETECT_LIMIT_S) -> Kind:
    """What answers at a URL: asks `/props`, `/version`, `/server_info` and `/v1/models`, in this order.

    Raises EngineUnavailableError if nothing answers within the time, EngineError if it is no engine that we know.
    """
    client = HttpClient(options).open()
    try:
        async with asyncio.timeout(within_s):
            return await _probe(client)
    except TimeoutError as error:
        raise EngineUnavailableError(f"nothing at {options.url} answered within {within_s:.0f} s") from error
    finally:
        await client.close()


async def _probe(client: HttpClient) -> Kind:
    signs: tuple[tuple[str, str, Kind], ...] = (
        ("/props", "total_slots", "llama-server"),
        ("/version", "version", "vllm"),
        ("/server_info", "max_total_num_tokens", "sglang"),
        ("/get_server_info", "max_total_num_tokens", "sglang"),
        ("/v1/models", "data", "openai"),
    )
    seen = []
    for path, key, kind in signs:
        status, body = await client.get_json(path)
        if status == 200 and isinstance(body, dict) and key in body:
            return kind
        seen.append(f"{path}: {status}")
    raise EngineError(f"{client.url} is no engine that kvsteward knows ({', '.join(seen)})", hint="Check the URL.")


def _embedded(spec: EngineSpec) -> EmbeddedEngine:
    defaults = EmbeddedOptions()
    options = EmbeddedOptions(
        model=spec.model,
        slots=spec.slots or defaults.slots,
        context_tokens=spec.context_tokens,
        kv_unified=bool(spec.kv_unified),
        kv_tokens=spec.kv_tokens,
        k_type=spec.k_type,
        v_type=spec.v_type,
        threads=spec.threads,
        host_cache_mib=spec.host_cache_mib,
    )
    return EmbeddedEngine(options)


def _scripted_options(spec: EngineSpec) -> ScriptedOptions:
    defaults = ScriptedOptions()
    capacity = spec.kv_tokens or defaults.kv_capacity_tokens
    return ScriptedOptions(
        kv_capacity_tokens=capacity,
        context_limit_tokens=spec.context_tokens or min(defaults.context_limit_tokens, capacity),
        max_running=spec.slots or defaults.max_running,
    )


def _http_options(spec: EngineSpec) -> HttpOptions:
    if spec.url is None:
        raise ConfigError(f"an engine of kind {spec.kind!r} needs a URL", param="url")
    return HttpOptions(
        url=spec.url.rstrip("/").removesuffix("/v1"),
        api_key=spec.api_key,
        connect_timeout_s=spec.connect_timeout_s,
        idle_read_timeout_s=spec.idle_read_timeout_s,
    )


def _overrides(spec: EngineSpec) -> Overrides:
    return Overrides(
        context_limit_tokens=spec.context_tokens, kv_capacity_tokens=spec.kv_tokens, max_running=spec.slots
    )

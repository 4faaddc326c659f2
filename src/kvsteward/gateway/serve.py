"""From the command line's words to a running server."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

import uvicorn

from kvsteward.context.marks import Policy
from kvsteward.context.policies import load_policy, with_options
from kvsteward.engines.base import Engine
from kvsteward.engines.embeddings import EmbeddingOptions
from kvsteward.engines.registry import EngineSpec, Kind, create_engine, resolve
from kvsteward.engines.vllm import Hints
from kvsteward.errors import ConfigError, EngineUnavailableError
from kvsteward.gateway.app import create_app
from kvsteward.gateway.cork import CorkedProtocol
from kvsteward.gateway.settings import (
    Mode,
    Settings,
    Tenant,
    check_asks,
    check_isolation,
    check_selective,
    load_tenants,
)
from kvsteward.sessions import open_store

log = logging.getLogger("kvsteward")
_ENGINE_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `kvsteward serve` was told."""

    engines: Sequence[str]
    host: str
    port: int
    model: Path | None
    ctx: int | None
    slots: int
    threads: int | None
    kv: str
    upstream_key: str | None
    store: str
    budget: int | None
    mode: str
    ttl_s: float
    log_days: float
    policy: str | None
    high_water: float | None
    low_water: float | None
    memory_price: float | None
    keep_rounds: int | None
    tool_limit: int | None
    summary: str | None
    selective: float | None
    max_body_mib: int
    recall: bool
    tenants: Path | None
    hints: str = "auto"
    cache_secret: str | None = None
    embeddings: str | None = None
    embeddings_model: str | None = None
    embeddings_key: str | None = None
    embeddings_dimensions: int | None = None
    embeddings_query_prefix: str = ""
    embeddings_text_prefix: str = ""


def settings_of(options: ServeOptions) -> Settings:
    """Checked settings. Raises ConfigError that names the option."""
    return Settings(
        mode=cast("Mode", options.mode),
        budget_tokens=options.budget,
        policy=with_options(
            load_policy(options.policy) if options.policy else Policy(),
            high_water_ratio=options.high_water,
            low_water_ratio=options.low_water,
            memory_price=options.memory_price,
            keep_rounds=options.keep_rounds,
            tool_limit_tokens=options.tool_limit,
            summary=options.summary,
            selective=options.selective,
        ),
        recall=options.recall,
        embeddings=embeddings_of(options),
        ttl_s=options.ttl_s,
        log_retention_s=options.log_days * 86_400,
        max_body_bytes=options.max_body_mib * 2**20,
        keys=keys_of(options),
    )


def keys_of(options: ServeOptions) -> Mapping[str, Tenant]:
    """Raises ConfigError for a secret that nobody needs."""
    if options.tenants is not None:
        return load_tenants(options.tenants, options.cache_secret)
    if options.cache_secret is not None:
        raise ConfigError("--cache-secret says nothing without --tenants", hint="Give --tenants FILE.")
    return {}


def embeddings_of(options: ServeOptions) -> EmbeddingOptions | None:
    """Raises ConfigError where something is said of a model and not where it is."""
    said = {
        "model": options.embeddings_model,
        "dimensions": options.embeddings_dimensions,
        "query-prefix": options.embeddings_query_prefix,
        "text-prefix": options.embeddings_text_prefix,
    }
    if options.embeddings is None:
        idle = next((name for name, value in said.items() if value), None)
        if idle is not None:
            raise ConfigError(f"--embeddings-{idle} says nothing without --embeddings", hint="Give --embeddings URL.")
        return None
    return EmbeddingOptions(
        options.embeddings,
        options.embeddings_model or "",
        options.embeddings_key,
        options.embeddings_dimensions,
        options.embeddings_query_prefix,
        options.embeddings_text_prefix,
    )


def engine_specs(options: ServeOptions) -> list[EngineSpec]:
    """Raises ConfigError for an engine that cannot be, or is given twice."""
    if options.hints not in get_args(Hints):
        raise ConfigError(f"--hints must be one of {', '.join(get_args(Hints))}, not {options.hints!r}")
    specs = [engine_spec(options, engine) for engine in options.engines]
    places = [spec.url.rstrip("/").removesuffix("/v1") if spec.url else spec.kind for spec in specs]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise ConfigError(f"the engine {twice} is given twice", param="engine")
    return specs


def engine_spec(options: ServeOptions, engine: str) -> EngineSpec:
    """`embedded`, `scripted`, a URL, or `KIND=URL`. Raises ConfigError for anything else."""
    k_type, _, v_type = options.kv.partition(":")
    kind, equals, url = engine.partition("=")
    if engine.startswith(("http://", "https://")):
        kind, url = "auto", engine
    elif equals and not url.startswith(("http://", "https://")):
        raise ConfigError(f"the engine's URL must begin with http:// or https://, not {url!r}")
    elif kind not in get_args(Kind) or (not equals and kind not in {"embedded", "scripted"}):
        raise ConfigError(
            f"no such engine: {engine!r}",
            hint="Use 'embedded', a URL, or KIND=URL with KIND one of vllm, sglang, llama-server, openai.",
        )
    return EngineSpec(
        kind=cast("Kind", kind),
        url=url or None,
        api_key=options.upstream_key,
        model=options.model,
        slots=options.slots if kind in {"embedded", "scripted"} else None,
        context_tokens=options.ctx,
        threads=options.threads,
        k_type=k_type,
        v_type=v_type or k_type,
        hints=cast("Hints", options.hints),
    )


async def reached(specs: Sequence[EngineSpec], wait_s: float = _ENGINE_WAIT_S) -> list[Engine]:
    """The engines' adapters. Waits until one of them is there; those that are not yet are taken for its kind, unless
    theirs is given, and join when they come. Raises EngineError when none comes."""
    deadline = time.monotonic() + wait_s
    while True:
        found = await asyncio.gather(*map(_asked, specs))
        first = next((engine for engine in found if not isinstance(engine, EngineUnavailableError)), None)
        if first is not None:
            break
        error = next(error for error in found if isinstance(error, EngineUnavailableError))
        if time.monotonic() > deadline:
            raise error
        log.warning("waiting for the engine: %s", error.message)
        await asyncio.sleep(2.0)
    kind = cast("Kind", first.info.dialect)
    return [
        create_engine(replace(spec, kind=kind) if spec.kind == "auto" else spec)
        if isinstance(engine, EngineUnavailableError)
        else engine
        for spec, engine in zip(specs, found, strict=True)
    ]


async def _asked(spec: EngineSpec) -> Engine | EngineUnavailableError:
    try:
        engine = await resolve(spec)
        if spec.url is not None:
            try:
                await engine.start()
            finally:
                await engine.close()
        return engine
    except EngineUnavailableError as error:
        return error


def run(options: ServeOptions) -> None:
    """Serves until SIGINT or SIGTERM. The engine is started by the application and stopped with it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings, specs, store = settings_of(options), engine_specs(options), open_store(options.store)
    check_asks(settings)
    if settings.embeddings is not None:
        store.vectors()  # raises what is wrong with it before anybody is waited for
    engines = asyncio.run(reached(specs))
    check_selective(settings, [engine.info for engine in engines])
    check_isolation(settings, engines)
    listener = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}", hint="Choose another --port."
        ) from error
    host, port = listener.getsockname()[:2]
    print(f"kvsteward listens on http://{host}:{port} (OpenAI base URL: http://{host}:{port}/v1)", flush=True)
    config = uvicorn.Config(
        create_app(settings, engines, store),
        http=CorkedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    uvicorn.Server(config).run([listener])

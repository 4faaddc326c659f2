"""From the command line's words to a running server."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvicorn

from kvsteward.context.marks import Policy
from kvsteward.engines.base import Engine
from kvsteward.engines.embedded import EmbeddedEngine, EmbeddedOptions
from kvsteward.errors import ConfigError
from kvsteward.gateway.app import create_app
from kvsteward.gateway.settings import Mode, Settings, load_tenants
from kvsteward.sessions import open_store


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `kvsteward serve` was told."""

    engine: str
    host: str
    port: int
    model: Path | None
    ctx: int | None
    slots: int
    kv: str
    upstream_key: str | None
    store: str
    budget: int | None
    mode: str
    ttl_s: float
    log_days: float
    high_water: float
    low_water: float
    keep_rounds: int
    tool_limit: int | None
    summary: str
    max_body_mib: int
    tenants: Path | None


def settings_of(options: ServeOptions) -> Settings:
    """Checked settings. Raises ConfigError that names the option."""
    return Settings(
        mode=cast("Mode", options.mode),
        budget_tokens=options.budget,
        policy=Policy(
            high_water_ratio=options.high_water,
            low_water_ratio=options.low_water,
            keep_rounds=options.keep_rounds,
            tool_limit_tokens=options.tool_limit,
            summary=options.summary,
        ),
        ttl_s=options.ttl_s,
        log_retention_s=options.log_days * 86_400,
        max_body_bytes=options.max_body_mib * 2**20,
        keys=load_tenants(options.tenants) if options.tenants else {},
    )


def engine_of(options: ServeOptions) -> Engine:
    k_type, _, v_type = options.kv.partition(":")
    if options.engine != "embedded":
        raise ConfigError(f"unknown engine {options.engine!r}")
    return EmbeddedEngine(
        EmbeddedOptions(
            model=options.model,
            slots=options.slots,
            context_tokens=options.ctx,
            k_type=k_type,
            v_type=v_type or k_type,
        )
    )


def run(options: ServeOptions) -> None:
    """Serves until SIGINT or SIGTERM. The engine is started by the application and stopped with it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings, engine, store = settings_of(options), engine_of(options), open_store(options.store)
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
        create_app(settings, engine, store), log_level="warning", access_log=False, timeout_graceful_shutdown=5
    )
    uvicorn.Server(config).run([listener])

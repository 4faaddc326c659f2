"""Asks a live engine, or a kvsteward gateway in front of one, again and again for one window.

Knows endpoints and their failures, judges nothing. Invariants: it only reads; the number of readings is bounded,
whatever the window; a scrape that fails inside the window is counted and left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Self

from yarl import URL

from kvsteward.engines.base import EngineLoad
from kvsteward.engines.http import HttpClient, HttpOptions
from kvsteward.engines.metrics import LLAMA_SERVER, SGLANG, VLLM, parse_load
from kvsteward.engines.registry import detect
from kvsteward.errors import ConfigError, EngineError, EngineUnavailableError
from kvsteward.lab.doctor.clients import count_clients
from kvsteward.lab.doctor.gpu import read_gpus
from kvsteward.lab.doctor.observation import Gpu, Reading, Setup, Slot
from kvsteward.lab.doctor.page import Page, read_page
from kvsteward.lab.doctor.setup import gateway_setup, llama_setup, read_slots, sglang_setup, vllm_setup

DIALECTS = {"vllm": VLLM, "sglang": SGLANG, "llama-server": LLAMA_SERVER}
_MEMORY = "/v1/internal/memory?limit=1000"
_HINTS = {
    "llama-server": "Start llama-server with --metrics (and --slots).",
    "sglang": "Start SGLang with --enable-metrics.",
}
_LOCAL = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})
_INTERVALS = 24
_LEAST_S = 0.5
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a window gave. `missed` scrapes failed; `sessions_tokens` is what a gateway says of each session."""

    setup: Setup
    readings: tuple[Reading, ...]
    missed: int = 0
    sessions_tokens: tuple[int, ...] = ()
    model_path: str | None = None
    """Where the engine says that its model lies."""


class Probe:
    """One engine by URL. Use as an async context; raises only EngineError and ConfigError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        url = url if "://" in url else f"http://{url}"
        url = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
        try:
            parsed = URL(url)
        except ValueError as error:
            raise ConfigError(f"not a URL: {url!r} ({error})", hint="Give it as http://HOST:PORT.") from error
        self._options = HttpOptions(url=url, api_key=api_key, probe_timeout_s=_TIMEOUT_S)
        self._client = HttpClient(self._options)
        self._setup = Setup("openai")
        self._sessions: tuple[int, ...] = ()
        self._model_path: str | None = None
        self._local = parsed.host in _LOCAL
        self._port = parsed.port

    async def __aenter__(self) -> Self:
        self._client.open()
        try:
            self._setup = replace(await self._discover(), source=self._options.url)
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def watch(self, window_s: float, progress: Callable[[float], None] = lambda _: None) -> Seen:
        """Reads for `window_s` seconds, at least twice. `progress` gets the seconds that have passed."""
        started, readings, missed = monotonic(), [await self.read()], 0
        step = max(_LEAST_S, window_s / _INTERVALS)
        while (left := started + window_s - monotonic()) > 0 or len(readings) + missed < 2:
            await asyncio.sleep(min(step, max(left, _LEAST_S)))
            progress(min(window_s, monotonic() - started))
            try:
                readings.append(await self.read())
            except EngineError:
                missed += 1
        if len(readings) < 2:
            raise EngineUnavailableError(f"the engine at {self._options.url} stopped answering inside the window")
        return Seen(self._setup, tuple(readings), missed, self._sessions, self._model_path)

    async def read(self) -> Reading:
        """One reading. Raises EngineError if the engine does not give its figures."""
        if self._setup.gateway:
            return await self._read_gateway()
        page = await self._page()
        slots = await self._slots() if self._setup.dialect == "llama-server" else None
        counted = page.value(("sglang:http_requests_active",))
        clients = int(counted) if counted is not None else await self._clients()
        return Reading(monotonic(), page, clients, slots, await self._gpus())

    async def _read_gateway(self) -> Reading:
        memory = await self._memory()
        if memory is None:
            raise EngineError(f"the gateway at {self._options.url} does not give its account any more")
        self._sessions = tuple(int(s["tokens_resident"]) for s in memory["sessions"] if s.get("tokens_resident"))
        load = EngineLoad(**{k: v for k, v in memory["engine"].items() if k in EngineLoad.__dataclass_fields__})
        text = await self._client.get_text("/metrics")
        page = read_page(text or "", load, f"{self._options.url}/metrics")
        return Reading(monotonic(), page, int(memory["running"]) + int(memory["waiting"]), None, await self._gpus())

    # -- what it is ------------------------------------------------------------------------------------------------

    async def _discover(self) -> Setup:
        memory = await self._memory()
        if memory is not None:
            _, health = await self._client.get_json("/health")
            return gateway_setup(memory, health if isinstance(health, dict) else {})
        kind = await detect(self._options)
        if kind not in DIALECTS:
            raise EngineError(
                f"the server at {self._options.url} speaks the OpenAI API, but is no engine whose metrics are known",
                hint="Give the URL of vLLM, SGLang, llama-server or a kvsteward gateway.",
            )
        self._setup = Setup(kind)
        return await self._ask_setup(kind)

    async def _ask_setup(self, kind: str) -> Setup:
        text = await self._text()
        page = _page_of(text, kind, self._options.url)
        if kind == "vllm":
            _, cards = await self._client.get_json("/v1/models")
            cards = [c for c in cards.get("data", []) if isinstance(c, dict)] if isinstance(cards, dict) else []
            self._model_path = next((c["root"] for c in cards if isinstance(c.get("root"), str)), None)
            return vllm_setup(text, page, cards, (await self._client.get_json("/version"))[1])
        if kind == "sglang":
            info = await self._first_json("/server_info", "/get_server_info")
            path = info.get("model_path")
            self._model_path = path if isinstance(path, str) else None
            return sglang_setup(page, info)
        props = await self._first_json("/props")
        path = props.get("model_path")
        self._model_path = path if isinstance(path, str) else None
        return llama_setup(props)

    async def _first_json(self, *paths: str) -> Mapping[str, Any]:
        for path in paths:
            status, body = await self._client.get_json(path)
            if status == 200 and isinstance(body, dict):
                return body
        return {}

    async def _memory(self) -> dict[str, Any] | None:
        status, body = await self._client.get_json(_MEMORY)
        if status == 401:
            raise EngineError(f"{self._options.url} asks for an API key", hint="Give it with --key.")
        known = isinstance(body, dict) and {"engine", "sessions", "num_blocks_total"} <= body.keys()
        return body if status == 200 and known else None

    # -- one scrape ------------------------------------------------------------------------------------------------

    async def _text(self) -> str:
        status, text = await self._client.ask("GET", "/metrics")
        if status == 401:
            raise EngineError(f"{self._options.url} asks for an API key", hint="Give it with --key.")
        if status != 200:
            kind = self._setup.dialect
            raise EngineError(
                f"the {kind} at {self._options.url} does not export metrics (/metrics: {status})",
                hint=_HINTS.get(kind, "Start it without --disable-log-stats, and give its own URL."),
            )
        return text.decode("utf-8", "replace")

    async def _page(self) -> Page:
        return _page_of(await self._text(), self._setup.dialect, self._options.url)

    async def _slots(self) -> tuple[Slot, ...] | None:
        status, answer = await self._client.get_json("/slots")
        return read_slots(answer) if status == 200 else None

    async def _clients(self) -> int | None:
        if not self._local or self._port is None:
            return None
        return await asyncio.to_thread(count_clients, self._port)

    async def _gpus(self) -> tuple[Gpu, ...]:
        return await asyncio.to_thread(read_gpus) if self._local else ()


def _page_of(text: str, dialect: str, source: str) -> Page:
    try:
        load = parse_load(text, DIALECTS[dialect])
    except ValueError as error:
        raise EngineError(f"{source}/metrics cannot be read: {error}") from error
    page = read_page(text, load, f"{source}/metrics")
    check_readable(page, dialect, source)
    return page


def check_readable(page: Page, dialect: str, source: str) -> None:
    """EngineError if a page has not one of the figures that say how the engine is."""
    if page.load.running is not None or page.load.kv_usage_ratio is not None:
        return
    if page.broken:
        listed = ", ".join(sorted(page.broken)[:4])
        raise EngineError(
            f"the metrics of {source} hold no figure that can be used: {listed} are not numbers",
            hint="Restart the engine; if it goes on, its metrics are broken.",
        )
    raise EngineError(
        f"the metrics of {source} are not those of {dialect}: the number of running requests is not among them",
        hint="Give the engine's own URL, not that of a dashboard or another service.",
    )

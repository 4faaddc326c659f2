"""`kvsteward engines` and `kvsteward sessions move`: steers a running gateway over HTTP, as any program may.

Knows the gateway's endpoints only. Invariant: what the gateway refuses ends with its own words and hint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import orjson
from rich.console import Console
from rich.table import Table

from kvsteward.engines.http import HttpClient, HttpOptions
from kvsteward.errors import EngineResponseError, EngineUnavailableError, KVStewardError
from kvsteward.wire.errors import engine_error

_OVER_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where a gateway listens, and the key to it."""

    url: str
    key: str | None = None


def engines(gateway: Gateway) -> list[dict[str, Any]]:
    """The engines with their state, turns and sessions."""
    listed: list[dict[str, Any]] = _asked(gateway, "GET", "/v1/engines")["data"]
    return listed


def drain(gateway: Gateway, engine: str, *, on: bool) -> dict[str, Any]:
    return _asked(gateway, "POST", f"/v1/engines/{'drain' if on else 'undrain'}", {"engine": engine})


def move(gateway: Gateway, session: str, to: str, wait_s: float, tenant: str | None) -> dict[str, Any]:
    """Moves a session, once its running turn has ended."""
    body = {"to": to, "wait_s": wait_s, **({"tenant": tenant} if tenant is not None else {})}
    return _asked(gateway, "POST", f"/v1/sessions/{quote(session)}/move", body, within_s=wait_s + _OVER_WAIT_S)


def show_engines(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("engine", "state", "kind", "turns", "sessions", "resident", "free", "models"):
        figures = name in {"turns", "sessions", "resident", "free"}
        table.add_column(name, justify="right" if figures else "left", overflow="fold")
    for row in rows:
        free = "?" if row["free_tokens"] is None else f"{row['free_tokens']:,}"
        counts = (str(row["turns"]), f"{row['sessions']:,}", f"{row['resident_tokens']:,}", free)
        table.add_row(row["engine"], row["state"], row["dialect"], *counts, ", ".join(row["models"]))
    Console().print(table)


def _asked(
    gateway: Gateway, method: str, path: str, body: Any = None, within_s: float = _OVER_WAIT_S
) -> dict[str, Any]:
    """The gateway's answer. Raises EngineResponseError with its words, EngineUnavailableError if it is not there."""
    options = HttpOptions(gateway.url.rstrip("/").removesuffix("/v1"), gateway.key, probe_timeout_s=within_s)

    async def ask() -> tuple[int, bytes]:
        client = HttpClient(options).open()
        try:
            return await client.ask(method, path, None if body is None else orjson.dumps(body))
        finally:
            await client.close()

    try:
        status, raw = asyncio.run(ask())
    except EngineUnavailableError as error:
        raise KVStewardError(
            f"no gateway answers at {options.url}", hint="Say where it listens with --gateway, or start it."
        ) from error
    if status >= 400:
        raise _refusal(status, raw)
    answer: dict[str, Any] = orjson.loads(raw)
    return answer


def _refusal(status: int, raw: bytes) -> KVStewardError:
    error = engine_error(status, raw)
    hint = error.body.get("hint") if isinstance(error, EngineResponseError) else None
    return KVStewardError(error.message, hint=str(hint or ""))

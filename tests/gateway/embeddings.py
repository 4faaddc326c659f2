"""A server of `/v1/embeddings` for tests: words that mean the same have the same direction. It fails as it is told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MEANINGS = (
    {"car", "automobile", "vehicle"},
    {"doctor", "physician"},
    {"rent", "lease", "tenancy"},
    {"dog", "puppy", "hound"},
    {"password", "passphrase", "secret"},
)


def vector_of(text: str, dimensions: int = 8) -> list[float]:
    """One direction for each meaning, and a little of a common one, so that no text is 0."""
    found = set(re.findall(r"[a-z]+", text.lower()))
    own = [float(len(found & words)) for words in MEANINGS]
    return [*own, *[0.0] * (dimensions - len(own) - 1), 0.1]


Fault = Callable[[dict[str, Any]], "web.Response | None"]


@dataclass
class Endpoint:
    """`faults` are used up one a request; `always` is asked for each (None: answer well)."""

    url: str = ""
    port: int = 0
    """The same after a restart."""
    dimensions: int = 8
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    faults: list[Any] = field(default_factory=list)
    always: Any = None
    _runner: web.AppRunner | None = None

    async def start(self) -> Endpoint:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/embeddings", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def texts(self) -> list[str]:
        return [text for request in self.requests for text in request["input"]]

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization"))
        fault = self.faults.pop(0) if self.faults else self.always
        if fault is not None:
            answer = await fault(self, body)
            if answer is not None:
                return answer
        return self.well(body["input"])

    def well(self, texts: list[str], dimensions: int | None = None) -> web.Response:
        rows = [
            {"object": "embedding", "index": n, "embedding": vector_of(text, dimensions or self.dimensions)}
            for n, text in enumerate(texts)
        ]
        return web.json_response({"object": "list", "data": rows[::-1], "model": "m", "usage": {}})


def status(code: int) -> Any:
    async def fault(_: Endpoint, __: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "injected"}}, status=code)

    return fault


def hangs(seconds: float) -> Any:
    async def fault(_: Endpoint, __: dict[str, Any]) -> None:
        await asyncio.sleep(seconds)

    return fault


def says(answer: Any) -> Any:
    async def fault(_: Endpoint, __: dict[str, Any]) -> web.Response:
        return web.json_response(answer) if not isinstance(answer, str) else web.Response(text=answer)

    return fault


def refuses(word: str, code: int = 400) -> Any:
    """The whole request, if one of its texts has the word."""

    async def fault(_: Endpoint, body: dict[str, Any]) -> web.Response | None:
        return web.json_response({"error": "too long"}, status=code) if word in str(body["input"]) else None

    return fault


def slow_for_many(most: int) -> Any:
    """A request with more texts takes a minute."""

    async def fault(_: Endpoint, body: dict[str, Any]) -> None:
        if len(body["input"]) > most:
            await asyncio.sleep(60.0)

    return fault


def waits(for_: asyncio.Event) -> Any:
    async def fault(_: Endpoint, __: dict[str, Any]) -> None:
        await for_.wait()

    return fault


def uneven(_: Endpoint, body: dict[str, Any]) -> Any:
    async def answer() -> web.Response:
        rows = [{"index": n, "embedding": [1.0] * (n + 1)} for n in range(len(body["input"]))]
        return web.json_response({"data": rows})

    return answer()

"""A gateway on a real socket in front of the scripted engine. A test that blocks the event loop fails."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from blockbuster import BlockBuster, blockbuster_ctx

from kvsteward.engines.base import Engine
from kvsteward.engines.scripted import ScriptedEngine, ScriptedOptions
from kvsteward.gateway.app import Gateway, Steward, create_app
from kvsteward.gateway.settings import Settings
from kvsteward.sessions import SessionStore, open_store


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    with blockbuster_ctx("kvsteward") as blockbuster:
        yield blockbuster


@dataclass
class Running:
    """A gateway that serves. `http` is a client bound to its URL."""

    url: str
    http: aiohttp.ClientSession
    app: Gateway
    engine: Any
    store: SessionStore

    @property
    def steward(self) -> Steward:
        return self.app.steward

    async def chat(self, *messages: Any, session: str | None = None, headers: Any = None, **fields: Any) -> Any:
        """One turn that is not streamed; the answer's JSON, with `status` and `headers` beside it."""
        sent = {**({"X-Session-ID": session} if session else {}), **(headers or {})}
        async with self.http.post(
            "/v1/chat/completions", json={"messages": list(messages), **fields}, headers=sent
        ) as response:
            return {**await response.json(), "status": response.status, "headers": response.headers}

    async def get(self, path: str, **headers: str) -> Any:
        async with self.http.get(path, headers=headers) as response:
            return await response.json()

    async def verify(self) -> Any:
        return await asyncio.to_thread(self.store.verify)

    async def until(self, condition: Callable[[], bool], within_s: float = 3.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - the condition has no event
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(engines: Sequence[Engine], settings: Settings, store: SessionStore) -> AsyncIterator[Running]:
    app = create_app(settings, engines, store)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        async with aiohttp.ClientSession(url) as http:
            yield Running(url, http, app, engines[0], store)
    finally:
        server.should_exit = True
        await serving
        listener.close()


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts gateways: `await start(answers=[...], settings=Settings(...), context_limit_tokens=...)`."""
    async with AsyncExitStack() as stack:

        async def begin(
            *,
            answers: Any = ("ok",),
            settings: Settings | None = None,
            store: str | None = None,
            engine: Any = None,
            **options: Any,
        ) -> Running:
            engine = engine or ScriptedEngine(ScriptedOptions(**options), answers=answers)
            engines = engine if isinstance(engine, list) else [engine]
            opened = await asyncio.to_thread(open_store, store or str(tmp_path / "sessions.db"))
            return await stack.enter_async_context(running(engines, settings or Settings(), opened))

        yield begin

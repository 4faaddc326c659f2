"""The bare pass-through that the gateway is compared with: Starlette, uvicorn (uvloop, httptools) and aiohttp.

It does what a proxy must do and nothing else: no session, no log, no budget, no error of its own, and a client that
leaves is noticed when the next chunk is written. Run: `python _bare.py UPSTREAM_URL` prints its port.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


def create_app(upstream: str) -> Starlette:
    """POST /v1/chat/completions, handed on as it is."""
    url = f"{upstream}/v1/chat/completions"
    headers = {"content-type": "application/json"}
    session: aiohttp.ClientSession

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        nonlocal session
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            yield

    async def chat(request: Request) -> Response:
        body = await request.body()
        reply = await session.post(url, data=body, headers=headers)
        if not json.loads(body).get("stream"):
            return Response(await reply.read(), reply.status, media_type=reply.content_type)

        async def chunks() -> AsyncIterator[bytes]:
            async for chunk in reply.content.iter_any():
                yield chunk

        return StreamingResponse(chunks(), reply.status, media_type=reply.content_type)

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])], lifespan=lifespan)


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(
        create_app(sys.argv[1]), loop="uvloop", http="httptools", ws="none", log_level="warning", access_log=False
    )
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()

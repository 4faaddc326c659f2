"""The HTTP client under the adapters: what it does when servers are slow, broken, gone or odd. Raw sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvsteward.engines.base import EngineRequest
from kvsteward.engines.http import HttpOptions
from kvsteward.engines.openai import OpenAIEngine, context_of_card, with_fields
from kvsteward.errors import ConfigError, EngineError, EngineTimeoutError, EngineUnavailableError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
REQUEST = EngineRequest("/v1/chat/completions", b"{}", "r1")
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = (
    OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nX-Odd: 1\r\nKeep-Alive: timeout=5\r\n\r\n"
)


class Server:
    """A socket server that notes what it read and which connections ended."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.connections = 0
        self.asked = asyncio.Event()
        self.ended = asyncio.Event()
        self.url = ""


@asynccontextmanager
async def serving(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[Server]:
    server = Server()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                server.heads.append(head)
                server.asked.set()
                length = next((int(h[15:]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length:")), 0)
                await reader.readexactly(length)
                await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            server.ended.set()
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()


@asynccontextmanager
async def client(url: str, **options: float | str) -> AsyncIterator[OpenAIEngine]:
    engine = OpenAIEngine(HttpOptions(url=url, **options))  # type: ignore[arg-type]
    engine._client.open()
    try:
        yield engine
    finally:
        await engine.close()


def sends(*parts: bytes, hang: bool = False, die: bool = False) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if hang:
            await asyncio.sleep(30)
        if die:
            writer.close()

    return answer


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def body_of(engine: OpenAIEngine, request: EngineRequest = REQUEST) -> bytes:
    async with engine.open(request) as reply:
        return b"".join([part async for part in reply.chunks()])


async def test_nobody_listens() -> None:
    async with client("http://127.0.0.1:9") as engine:
        with pytest.raises(EngineUnavailableError, match="cannot be reached"):
            await body_of(engine)
        with pytest.raises(EngineUnavailableError):
            await engine.check()
        with pytest.raises(EngineUnavailableError):
            await engine.start()


async def test_connection_closed_before_an_answer() -> None:
    async with serving(sends(die=True)) as server, client(server.url) as engine:
        with pytest.raises(EngineUnavailableError, match="before it answered"):
            await body_of(engine)
        assert len(server.heads) == 1  # nothing is retried


async def test_death_in_the_middle_is_an_engine_error_after_what_came() -> None:
    seen = []
    async with serving(sends(CHUNKED, chunk(b"data: 1\n\n"), die=True)) as server, client(server.url) as engine:
        with pytest.raises(EngineError):
            async with engine.open(REQUEST) as reply:
                async for part in reply.chunks():
                    seen.append(part)
    assert b"".join(seen) == b"data: 1\n\n"


@pytest.mark.parametrize("parts", [(), (CHUNKED, chunk(b"x"))], ids=["no head", "no more body"])
async def test_silence_ends_in_a_timeout(parts: tuple[bytes, ...]) -> None:
    async with serving(sends(*parts, hang=True)) as server, client(server.url, idle_read_timeout_s=0.1) as engine:
        with pytest.raises(EngineTimeoutError):
            await body_of(engine)


async def test_a_question_has_a_limit_of_its_own() -> None:
    async with serving(sends(hang=True)) as server, client(server.url, probe_timeout_s=0.1) as engine:
        with pytest.raises(EngineTimeoutError):
            await engine.check()


async def test_garbage_instead_of_http_is_an_engine_error() -> None:
    async with serving(sends(b"hello?\r\n\r\n")) as server, client(server.url) as engine:
        with pytest.raises(EngineError):
            await body_of(engine)


async def test_leaving_early_closes_the_socket() -> None:
    async with serving(sends(CHUNKED, chunk(b"data: 1\n\n"))) as server, client(server.url) as engine:
        async with engine.open(REQUEST) as reply:
            async for _ in reply.chunks():
                break
        async with asyncio.timeout(1):
            await server.ended.wait()


async def test_leaving_unread_closes_the_socket_even_when_the_caller_fails() -> None:
    async with serving(sends(CHUNKED, chunk(b"x"))) as server, client(server.url) as engine:
        with pytest.raises(KeyError):
            async with engine.open(REQUEST):
                raise KeyError
        async with asyncio.timeout(1):
            await server.ended.wait()


async def test_cancelling_a_wait_for_the_head_closes_the_socket() -> None:
    async with serving(sends()) as server, client(server.url) as engine:
        task = asyncio.create_task(body_of(engine))
        await server.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(1):
            await server.ended.wait()


async def test_a_body_read_to_its_end_keeps_the_connection() -> None:
    async with serving(sends(CHUNKED, chunk(b"x"), b"0\r\n\r\n")) as server, client(server.url) as engine:
        assert [await body_of(engine) for _ in range(3)] == [b"x"] * 3
        assert server.connections == 1


async def test_bytes_and_end_to_end_headers_pass_unchanged() -> None:
    packed = b"\x1f\x8b not really gzip"
    head = OK + b"Content-Encoding: gzip\r\nX-Odd: 1\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with serving(sends(head + packed)) as server, client(server.url) as engine:
        async with engine.open(REQUEST) as reply:
            assert b"".join([part async for part in reply.chunks()]) == packed
        assert (reply.headers["x-odd"], reply.headers["content-encoding"]) == ("1", "gzip")


async def test_a_redirect_is_not_followed() -> None:
    head = b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"
    async with serving(sends(head)) as server, client(server.url) as engine, engine.open(REQUEST) as reply:
        assert reply.status == 307


async def test_headers_to_the_engine() -> None:
    """Hop-by-hop headers, the client's length, host and encodings stay here; the engine's key replaces the client's."""
    headers = {"Authorization": "Bearer client", "Connection": "close, x", "Content-Length": "999", "Host": "evil"}
    headers |= {"Accept-Encoding": "gzip", "Transfer-Encoding": "chunked", "X-Mine": "1", "Cookie": "a=b"}
    request = EngineRequest("/v1/chat/completions", b"{}", "r1", None, headers)
    async with serving(sends(CHUNKED, b"0\r\n\r\n")) as server, client(server.url, api_key="secret") as engine:
        await body_of(engine, request)
        await body_of(engine, request)
    lines = [line.lower() for line in server.heads[0].decode().split("\r\n")]
    assert "authorization: bearer secret" in lines
    assert "accept-encoding: identity" in lines
    assert "content-length: 2" in lines
    assert "x-mine: 1" in lines
    assert not [line for line in lines if "client" in line or "evil" in line or "999" in line or "chunked" in line]


async def test_cookies_of_an_engine_are_not_kept() -> None:
    head = OK + b"Set-Cookie: id=secret\r\nContent-Length: 0\r\n\r\n"
    async with serving(sends(head)) as server, client(server.url) as engine:
        await body_of(engine)
        await body_of(engine)
    assert b"secret" not in server.heads[1]


async def test_before_start_and_after_close_it_is_unavailable() -> None:
    engine = OpenAIEngine(HttpOptions(url="http://127.0.0.1:9"))
    with pytest.raises(EngineUnavailableError, match="not started"):
        await body_of(engine)
    await engine.close()


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://"])
def test_what_is_no_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError):
        OpenAIEngine(HttpOptions(url=url))


@pytest.mark.parametrize(
    ("card", "limit"),
    [
        ({"max_model_len": 8192}, 8192),
        ({"context_length": 4096, "meta": {"n_ctx_train": 1}}, 4096),
        ({"meta": {"n_ctx": 2048, "n_ctx_train": 8192}}, 2048),
        ({"meta": {"n_ctx_train": 8192}}, 8192),
        ({"max_model_len": None}, None),
        ({"max_model_len": "8k", "meta": 3}, None),
    ],
)
def test_context_limit_of_a_model_card(card: dict[str, object], limit: int | None) -> None:
    assert context_of_card(card) == limit


@pytest.mark.parametrize(
    ("body", "spliced"),
    [
        (b'{"a":1.10,"b":[1e400]}', b'{"id_slot":3,"a":1.10,"b":[1e400]}'),
        (b"{}", b'{"id_slot":3}'),
        (b" \n{ }", b'{"id_slot":3 }'),
        (b"[1]", b"[1]"),
        (b"", b""),
    ],
)
def test_a_field_is_put_in_front_and_the_rest_stays_byte_for_byte(body: bytes, spliced: bytes) -> None:
    assert with_fields(body, b'"id_slot":3') == spliced

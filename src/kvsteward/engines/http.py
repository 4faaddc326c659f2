"""The HTTP client under every adapter: raw bytes in, raw bytes out, errors in our own tree.

It knows no dialect, no JSON schema and no session. Invariant: leaving a reply closes its socket unless the body was
read to its end, because a connection that goes back to the pool tells the engine nothing of the client that left.

The path of one chunk is one `readany` of aiohttp and one `yield`: this is the hot path of the proxy.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import orjson
from yarl import URL

from kvsteward.engines.base import EngineReply
from kvsteward.errors import ConfigError, EngineError, EngineTimeoutError, EngineUnavailableError

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110, section 7.6.1: these belong to one connection and are never passed on."""

_NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect"}
_LARGE_BODY_BYTES = 1 << 20
_CONNECTIONS = 4096
# Uvicorn and cpp-httplib drop an idle connection after 5 s. To let go first is what avoids the race.
_KEEPALIVE_S = 4.0


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How to reach one engine. Times are in seconds; a stream has no total limit, only a limit on silence."""

    url: str
    api_key: str | None = None
    connect_timeout_s: float = 5.0
    idle_read_timeout_s: float = 600.0
    """The longest silence of an engine: covers its queue and a long prefill before the first byte."""
    probe_timeout_s: float = 5.0
    """The limit of one question about the engine itself (models, metrics, tokenize)."""
    reuse_streams: bool = True
    """False for a server that closes the connection after a streamed reply although it promises to keep it."""


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turns what aiohttp raises into `EngineUnavailableError`, `EngineTimeoutError` or `EngineError`."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise as_engine_error(error, url) from error


def as_engine_error(error: Exception, url: str) -> EngineError:
    """The one table from aiohttp's errors to ours."""
    if isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
        return EngineUnavailableError(f"the engine at {url} cannot be reached: {error}")
    if isinstance(error, TimeoutError):
        return EngineTimeoutError(f"the engine at {url} did not answer in time")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return EngineUnavailableError(f"the engine at {url} closed the connection before it answered")
    if isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError):
        return EngineError(f"the engine at {url} sent something that cannot be read: {error}")
    return EngineError(f"the connection to the engine at {url} broke: {error or type(error).__name__}")


class HttpReply(EngineReply):
    """A reply whose head has come and whose body is still on the wire."""

    __slots__ = ("_content", "_response", "_url", "status")

    def __init__(self, response: aiohttp.ClientResponse, url: str) -> None:
        self.status = response.status
        self._response = response
        self._content = response.content
        self._url = url

    @property
    def headers(self) -> Mapping[str, str]:  # type: ignore[override]  # made when asked: few ask
        return {k: v for name, v in self._response.headers.items() if (k := name.lower()) not in HOP_BY_HOP}

    async def chunks(self) -> AsyncIterator[bytes]:
        readany = self._content.readany
        try:
            while chunk := await readany():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise as_engine_error(error, self._url) from error

    def leave(self) -> None:
        """Keeps the connection if the body was read to its end, else closes the socket now."""
        if self._content.at_eof() and self._content.exception() is None:
            self._response.release()
        else:
            self._response.close()


class HttpClient:
    """One connection pool to one engine. `open` must run inside an event loop; `close` ends everything."""

    def __init__(self, options: HttpOptions) -> None:
        self.options = options
        self.url = options.url.rstrip("/")
        _check_url(self.url)
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self.unavailable = f"the engine at {self.url} is not started"
        """What a request is told while there is no pool."""

    def open(self) -> Self:
        """Makes the pool. Idempotent."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=self.options.connect_timeout_s, sock_read=self.options.idle_read_timeout_s
            )
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_CONNECTIONS, keepalive_timeout=_KEEPALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=timeout,
                auto_decompress=False,
                headers=self._own_headers(),
            )
        return self

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> HttpReply:
        """Sends a POST and waits for the head of the answer. The caller must `leave` the reply."""
        session = self._live()
        data: bytes | io.BytesIO = body if len(body) < _LARGE_BODY_BYTES else io.BytesIO(body)
        try:
            response = await session.post(
                self._url(path), data=data, headers=self._forward(headers), allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise as_engine_error(error, self.url) from error
        return HttpReply(response, self.url)

    async def get_json(self, path: str) -> tuple[int, Any]:
        """Status and decoded body of a GET; the body is None if it is not JSON."""
        status, text = await self.ask("GET", path)
        return status, _decoded(text)

    async def post_json(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded body of a POST; the body is None if it is not JSON."""
        status, text = await self.ask("POST", path, orjson.dumps(body))
        return status, _decoded(text)

    async def get_text(self, path: str) -> str | None:
        """The body of a GET, or None if its status is not 200."""
        status, text = await self.ask("GET", path)
        return text.decode("utf-8", "replace") if status == 200 else None

    async def ask(self, method: str, path: str, data: bytes | None = None) -> tuple[int, bytes]:
        """One short question about the engine itself, with a total limit of `probe_timeout_s`."""
        session = self._live()
        headers = {"content-type": "application/json"} if data is not None else None
        body = io.BytesIO(data) if data is not None else None
        with translated(self.url):
            async with asyncio.timeout(self.options.probe_timeout_s):
                async with session.request(method, self._url(path), data=body, headers=headers) as response:
                    return response.status, await response.read()

    def _live(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineUnavailableError(self.unavailable)
        return self._session

    def _url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            if len(self._urls) >= 64:
                self._urls.clear()
            url = self._urls[path] = URL(self.url + path)
        return url

    def _own_headers(self) -> dict[str, str]:
        headers = {"accept-encoding": "identity", "user-agent": "kvsteward"}
        if self.options.api_key:
            headers["authorization"] = f"Bearer {self.options.api_key}"
        return headers

    def _forward(self, headers: Mapping[str, str]) -> dict[str, str]:
        drop_key = self.options.api_key is not None
        out = {"content-type": "application/json"}
        if not self.options.reuse_streams:
            out["connection"] = "close"
        for name, value in headers.items():
            key = name.lower()
            if key not in _NOT_FORWARDED and not (drop_key and key == "authorization"):
                out[key] = value
        return out


def _check_url(url: str) -> None:
    root = URL(url)
    if root.scheme not in ("http", "https") or not root.host:
        raise ConfigError(f"not an engine URL: {url!r}", hint="Give it as http://HOST:PORT.")


def _decoded(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None

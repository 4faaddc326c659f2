"""A client of OpenAI's `/v1/embeddings`: llama-server with `--embeddings`, vLLM with `--runner pooling`, any provider.

It knows no session and retries nothing. Invariants: an answer has one finite vector for each text, all of one length,
or an error is raised; no request is longer than its time, no answer longer than `MAX_ANSWER_BYTES`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson

from kvsteward.engines.http import HttpClient, HttpOptions
from kvsteward.errors import ConfigError, EngineError, EngineResponseError, EngineTimeoutError

PATH = "/v1/embeddings"
MAX_ANSWER_BYTES = 32 * 2**20
MAX_DIMENSIONS = 16_384

Vector = list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """Which model makes vectors, and where. Times are in seconds."""

    url: str
    model: str
    api_key: str | None = None
    dimensions: int | None = None
    """Asked for, and held to. None: whatever the model gives."""
    query_prefix: str = ""
    text_prefix: str = ""
    """What the model was trained to find before a question and before a text ("search_query: ", "passage: ")."""
    timeout_s: float = 20.0
    """For a batch of texts in the background."""
    query_timeout_s: float = 2.0
    """For a question that a turn waits for."""
    rest_s: float = 10.0
    """How long an endpoint that failed is left alone."""
    back_off_s: float = 0.5
    """Before a batch is tried again; doubled each time."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(
                "--embeddings needs the name of a model",
                hint="Give --embeddings-model; GET /v1/models of that server lists what it has.",
                param="embeddings_model",
            )
        if self.dimensions is not None and not 1 <= self.dimensions <= MAX_DIMENSIONS:
            raise ConfigError(
                f"--embeddings-dimensions must be between 1 and {MAX_DIMENSIONS}, not {self.dimensions}",
                param="embeddings_dimensions",
            )


class Embedder:
    """One endpoint. Make and use it inside one event loop. Raises ConfigError for what is no URL."""

    def __init__(self, options: EmbeddingOptions) -> None:
        self.options = options
        url = options.url.rstrip("/").removesuffix("/v1")
        self._http = HttpClient(HttpOptions(url, options.api_key, idle_read_timeout_s=options.timeout_s))
        self._http.unavailable = f"the embeddings endpoint at {url} is closed"

    def open(self) -> None:
        """Makes the connection pool. Idempotent; asks nothing."""
        self._http.open()

    async def close(self) -> None:
        await self._http.close()

    async def query(self, text: str) -> Vector:
        """The vector of a question. Errors as `texts`."""
        (vector,) = await self._embed([self.options.query_prefix + text], self.options.query_timeout_s)
        return vector

    async def texts(self, texts: Sequence[str]) -> list[Vector]:
        """A vector for each text. Raises EngineUnavailableError, EngineTimeoutError, EngineResponseError for an error
        status, EngineError for an answer that cannot be used: too few vectors, other lengths, not numbers."""
        return await self._embed([self.options.text_prefix + text for text in texts], self.options.timeout_s)

    async def _embed(self, texts: Sequence[str], within_s: float) -> list[Vector]:
        body: dict[str, Any] = {"model": self.options.model, "input": texts, "encoding_format": "float"}
        if self.options.dimensions is not None:
            body["dimensions"] = self.options.dimensions
        try:
            async with asyncio.timeout(within_s):
                status, answer = await self._post(orjson.dumps(body))
        except TimeoutError as error:
            raise EngineTimeoutError(f"the embeddings endpoint at {self._http.url} did not answer in time") from error
        if status != 200:
            raise EngineResponseError(
                f"the embeddings endpoint at {self._http.url} answered with status {status}: "
                f"{answer[:200].decode(errors='replace')}",
                status=status,
            )
        return self._checked(answer, len(texts))

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        reply = await self._http.send(PATH, body, {})
        try:
            answer = bytearray()
            async for chunk in reply.chunks():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    raise EngineError(f"the embeddings endpoint at {self._http.url} sent more than can be an answer")
            return reply.status, bytes(answer)
        finally:
            reply.leave()

    def _checked(self, answer: bytes, count: int) -> list[Vector]:
        try:
            rows = sorted(orjson.loads(answer)["data"], key=lambda row: row["index"])
            vectors = [[float(value) for value in row["embedding"]] for row in rows]
            numbers = [row["index"] for row in rows]
        except (orjson.JSONDecodeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(f"what {self._http.url} answers is no list of embeddings: {error!r}") from error
        if numbers != list(range(count)):
            raise EngineError(f"{self._http.url} answered with {len(vectors)} embeddings for {count} texts")
        lengths = {len(vector) for vector in vectors}
        asked = self.options.dimensions or len(vectors[0])
        if lengths != {asked} or not 1 <= asked <= MAX_DIMENSIONS:
            raise EngineError(f"{self._http.url} answered with embeddings of {sorted(lengths)} dimensions, not {asked}")
        if not all(map(math.isfinite, chain.from_iterable(vectors))) or not all(map(any, vectors)):
            raise EngineError(f"{self._http.url} answered with an embedding that is 0 or not finite")
        return vectors

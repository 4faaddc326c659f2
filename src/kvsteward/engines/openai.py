"""Any server that speaks the OpenAI API, known by its URL; the base of the other URL adapters.

It knows no dialect beyond `/v1/models`: no metrics, no token counts. Invariant: what the engine does not say is None,
never a guess; what the user says overrides what the engine says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from time import monotonic
from types import TracebackType
from typing import Any, ClassVar

from kvsteward.engines.base import Engine, EngineInfo, EngineLoad, EngineReply, EngineRequest
from kvsteward.engines.http import HttpClient, HttpOptions, HttpReply
from kvsteward.errors import EngineUnavailableError

_CONTEXT_KEYS = ("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens")
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the user says about an engine. A value here wins over what the engine reports."""

    context_limit_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    max_running: int | None = None
    block_tokens: int | None = None

    def applied(self, info: EngineInfo) -> EngineInfo:
        """`info` with every value that the user gave."""
        names = ("context_limit_tokens", "kv_capacity_tokens", "max_running", "block_tokens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(info, **given)


class OpenAIEngine(Engine):
    """An OpenAI-compatible URL. Subclasses override the hooks `_discover`, `_stamp`, `load` and the counts."""

    dialect: ClassVar[str] = "openai"
    health_path: ClassVar[str] = "/v1/models"
    gives_prompt_logprobs: ClassVar[bool] = False

    def __init__(self, options: HttpOptions, overrides: Overrides | None = None) -> None:
        url = options.url.rstrip("/").removesuffix("/v1")
        self._client = HttpClient(replace(options, url=url))
        self.name = self._client.url
        self._overrides = overrides or Overrides()
        self._in_flight = 0
        self.info = EngineInfo(dialect=self.dialect, models=(), prompt_logprobs=self.gives_prompt_logprobs)

    async def start(self) -> EngineInfo:
        """Reads what the engine is. Raises EngineUnavailableError if it cannot be reached or is still loading."""
        self._client.open()
        self.info = self._overrides.applied(await self._discover())
        return self.info

    async def close(self) -> None:
        await self._client.close()

    async def load(self) -> EngineLoad:
        return EngineLoad()

    async def count_prompt_tokens(self, body: Mapping[str, Any]) -> int | None:
        return None

    def open(self, request: EngineRequest) -> AbstractAsyncContextManager[EngineReply]:
        return _Turn(self, request)

    async def enter(self, request: EngineRequest) -> tuple[HttpReply, int | None]:
        """Sends one request. Returns its reply, and the place that the adapter gave it, which `leave` gets back."""
        reply = await self._client.send(request.path, request.body, self._stamp(request))
        self._in_flight += 1
        return reply, None

    def leave(self, place: int | None) -> None:
        """The request is over for us."""
        self._in_flight -= 1

    async def confirm_released(self, request_id: str, *, within_s: float) -> bool:
        return False

    async def _has_no_stranger(self) -> bool:
        """Whether the engine's own figures show no more requests than we have open."""
        load = await self.load()
        if load.running is None:
            return False
        return load.running + (load.waiting or 0) <= self._in_flight

    async def _tokenized(self, body: Mapping[str, Any], fields: tuple[str, ...]) -> int | None:
        """The count of a `/tokenize` that takes messages; None where it does not."""
        question = {name: body[name] for name in fields if name in body}
        status, answer = await self._client.post_json("/tokenize", question)
        count = answer.get("count") if status == 200 and isinstance(answer, dict) else None
        return count if isinstance(count, int) else None

    async def release_session(self, session_id: str, *, moved: bool = False, cache_salt: str | None = None) -> bool:
        return False

    async def check(self) -> None:
        status, _ = await self._client.ask("GET", self.health_path)
        if status != 200:
            raise EngineUnavailableError(f"the engine at {self._client.url} answers {self.health_path} with {status}")

    async def _discover(self) -> EngineInfo:
        cards = await self._model_cards()
        limits = [limit for card in cards if (limit := context_of_card(card)) is not None]
        return EngineInfo(
            dialect=self.dialect,
            models=tuple(str(card["id"]) for card in cards),
            context_limit_tokens=min(limits) if limits else None,
            prompt_logprobs=self.gives_prompt_logprobs,
        )

    def _stamp(self, request: EngineRequest) -> Mapping[str, str]:
        """The headers of one request, with the ids that this engine understands."""
        return request.headers

    async def _model_cards(self) -> list[dict[str, Any]]:
        status, body = await self._client.get_json("/v1/models")
        cards = body.get("data") if isinstance(body, dict) else None
        if status != 200 or not isinstance(cards, list):
            raise EngineUnavailableError(f"the engine at {self._client.url} answers /v1/models with {status}")
        return [card for card in cards if isinstance(card, dict) and "id" in card]


class _Turn:
    """The context of one request. A class and not a generator: it is on the hot path."""

    __slots__ = ("_engine", "_place", "_reply", "_request")

    def __init__(self, engine: OpenAIEngine, request: EngineRequest) -> None:
        self._engine = engine
        self._request = request

    async def __aenter__(self) -> HttpReply:
        self._reply, self._place = await self._engine.enter(self._request)
        return self._reply

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reply.leave()
        self._engine.leave(self._place)


def context_of_card(card: Mapping[str, Any]) -> int | None:
    """The context limit in tokens that a model card of `/v1/models` states, under any of the names in use."""
    meta = card.get("meta")
    places = [card.get(key) for key in _CONTEXT_KEYS]
    if isinstance(meta, dict):
        places += [meta.get("n_ctx"), meta.get("n_ctx_train")]
    return next((value for value in places if isinstance(value, int) and value > 0), None)


def with_fields(body: bytes, fields: bytes) -> bytes:
    """The same JSON object with `fields` (`b'"name":value'`) in front; unchanged if it is not an object.

    Bytes are spliced, not decoded: every field, number and order of the client stays as it is. If the client sends
    the same field itself, its own wins, since of equal keys the last one counts.
    """
    start = body.find(b"{")
    if start < 0 or body[:start].strip():
        return body
    rest = body[start + 1 :]
    comma = b"" if rest[:64].lstrip()[:1] == b"}" else b","
    return b"{%s%s%s" % (fields, comma, rest)


async def poll_until(question: Callable[[], Awaitable[bool]], within_s: float) -> bool:
    """Asks until the awaited answer is true or the time is over. The last question may end a little later."""
    deadline = monotonic() + within_s
    while True:
        if await question():
            return True
        if monotonic() + _POLL_S > deadline:
            return False
        await asyncio.sleep(_POLL_S)

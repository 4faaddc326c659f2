"""A vLLM server, known by its URL.

It knows vLLM's endpoints, metrics and headers. Invariant: the ids that it hands over are the gateway's own
(`X-Request-Id` becomes vLLM's request id, `X-Session-ID` reaches its scheduler), so both logs speak of the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import orjson

from kvsteward.engines.base import EngineInfo, EngineLoad, EngineRequest
from kvsteward.engines.metrics import VLLM, parse_load, parse_vllm_cache_config
from kvsteward.engines.openai import OpenAIEngine, poll_until

_TEMPLATE_FIELDS = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
)


_MAX_LOGPROB_BYTES = 16 * 2**20


class VllmEngine(OpenAIEngine):
    """vLLM by URL. Without its `/metrics`, capacity and load are None and a release cannot be confirmed."""

    dialect: ClassVar[str] = "vllm"
    health_path: ClassVar[str] = "/health"
    gives_prompt_logprobs: ClassVar[bool] = True

    async def _discover(self) -> EngineInfo:
        info = await super()._discover()
        _, version = await self._client.get_json("/version")
        cache = parse_vllm_cache_config(await self._client.get_text("/metrics") or "")
        dtype = None if cache.dtype == "auto" else cache.dtype
        return replace(
            info,
            version=version.get("version") if isinstance(version, dict) else None,
            kv_capacity_tokens=cache.capacity_tokens,
            block_tokens=cache.block_tokens,
            k_dtype=dtype,
            v_dtype=dtype,
        )

    async def load(self) -> EngineLoad:
        text = await self._client.get_text("/metrics")
        return EngineLoad() if text is None else parse_load(text, VLLM)

    async def count_prompt_tokens(self, body: Mapping[str, Any]) -> int | None:
        return await self._tokenized(body, _TEMPLATE_FIELDS)

    async def prompt_logprobs(
        self, prompt: str, *, model: str, request_id: str
    ) -> Sequence[tuple[str, float | None]] | None:
        """By the completions endpoint, which repeats the prompt with its log-probabilities and generates nothing."""
        question = {"model": model or self.info.models[0], "prompt": prompt, "temperature": 0}
        question |= {"echo": True, "logprobs": 0, "max_tokens": 0}
        async with self.open(EngineRequest("/v1/completions", orjson.dumps(question), request_id)) as reply:
            raw = b""
            async for chunk in reply.chunks():
                raw += chunk
                if len(raw) > _MAX_LOGPROB_BYTES:
                    return None
            if reply.status != 200:
                return None
        return _pieces(raw)

    async def confirm_released(self, request_id: str, *, within_s: float) -> bool:
        """True once vLLM works on no more requests than we have open. If others use it too, that may never be."""
        return await poll_until(self._has_no_stranger, within_s)

    def _stamp(self, request: EngineRequest) -> Mapping[str, str]:
        stamped = dict(request.headers)
        stamped["x-request-id"] = request.request_id
        if request.session_id is not None:
            stamped["x-session-id"] = request.session_id
        return stamped


def _pieces(raw: bytes) -> Sequence[tuple[str, float | None]] | None:
    """The tokens of an echoed prompt; None if the answer has another shape."""
    try:
        told = orjson.loads(raw)["choices"][0]["logprobs"]
        found = list(zip(told["tokens"], told["token_logprobs"], strict=True))
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError):
        return None
    fits = all(isinstance(t, str) and (p is None or isinstance(p, int | float)) for t, p in found)
    return found if found and fits else None

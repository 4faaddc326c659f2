"""An SGLang server, known by its URL.

It knows SGLang's endpoints, metrics and its abort by prefix. Invariant: each request carries a `rid` of one fixed
length, because SGLang aborts every request whose id *starts with* the one that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, ClassVar

from kvsteward.engines.base import EngineInfo, EngineLoad, EngineRequest
from kvsteward.engines.http import HttpReply
from kvsteward.engines.metrics import SGLANG, parse_load
from kvsteward.engines.openai import OpenAIEngine, poll_until, with_fields

_RID_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_TEMPLATE_FIELDS = ("model", "messages", "tools", "chat_template_kwargs", "continue_final_message")
# The second name is the one before 2026-04; a server has one of them or both.
_INFO_PATHS = ("/server_info", "/get_server_info")


class SglangEngine(OpenAIEngine):
    """SGLang by URL. Load and confirmation need `--enable-metrics`."""

    dialect: ClassVar[str] = "sglang"
    health_path: ClassVar[str] = "/health"

    async def _discover(self) -> EngineInfo:
        info = await super()._discover()
        server = await self._server_info()
        _, model = await self._client.get_json("/get_model_info")
        dtype = server.get("kv_cache_dtype")
        dtype = dtype if isinstance(dtype, str) and dtype != "auto" else None
        return replace(
            info,
            version=server.get("version"),
            context_limit_tokens=info.context_limit_tokens or _natural(server.get("context_length")),
            kv_capacity_tokens=_natural(server.get("max_total_num_tokens")),
            block_tokens=_natural(server.get("page_size")),
            max_running=_natural(server.get("max_running_requests")),
            k_dtype=dtype,
            v_dtype=dtype,
            modalities=_modalities(model if isinstance(model, dict) else {}),
        )

    async def load(self) -> EngineLoad:
        text = await self._client.get_text("/metrics")
        return EngineLoad() if text is None else parse_load(text, SGLANG)

    async def count_prompt_tokens(self, body: Mapping[str, Any]) -> int | None:
        """None for a server whose `/tokenize` takes plain text only."""
        return await self._tokenized(body, _TEMPLATE_FIELDS)

    async def enter(self, request: EngineRequest) -> tuple[HttpReply, int | None]:
        if request.path in _RID_PATHS:
            request = replace(request, body=with_fields(request.body, b'"rid":"%s"' % rid_of(request.request_id)))
        return await super().enter(request)

    async def confirm_released(self, request_id: str, *, within_s: float) -> bool:
        """Aborts by id as well, since some releases miss a closed connection; then asks until the load agrees."""
        await self._client.post_json("/abort_request", {"rid": rid_of(request_id).decode()})
        return await poll_until(self._has_no_stranger, within_s)

    async def _server_info(self) -> dict[str, Any]:
        for path in _INFO_PATHS:
            status, info = await self._client.get_json(path)
            if status == 200 and isinstance(info, dict):
                return info
        return {}


def rid_of(request_id: str) -> bytes:
    """SGLang's id of a request: 32 hex digits, so that none is the beginning of another."""
    return blake2b(request_id.encode(), digest_size=16).hexdigest().encode()


def _modalities(model: Mapping[str, Any]) -> frozenset[str]:
    flags = {"has_image_understanding": "image", "has_audio_understanding": "audio"}
    return frozenset({"text"} | {name for flag, name in flags.items() if model.get(flag)})


def _natural(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

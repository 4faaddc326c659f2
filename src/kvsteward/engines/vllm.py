"""A vLLM server, known by its URL.

It knows vLLM's endpoints, metrics and headers. Invariant: the ids that it hands over are the gateway's own
(`X-Request-Id` becomes vLLM's request id, `X-Session-ID` reaches its scheduler), so both logs speak of the same thing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal
from urllib.parse import quote

import orjson

from kvsteward.engines.base import EngineInfo, EngineLoad, EngineRequest, Held, Keep
from kvsteward.engines.http import HttpOptions
from kvsteward.engines.metrics import VLLM, parse_load, parse_vllm_cache_config
from kvsteward.engines.openai import OpenAIEngine, Overrides, poll_until
from kvsteward.errors import EngineError
from kvsteward.wire.hints import FIELD, VERSION, keeping, pausing, with_hint

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
Hints = Literal["auto", "on", "off"]
_SESSIONS = "/kvsteward/sessions"


class VllmEngine(OpenAIEngine):
    """vLLM by URL. Without its `/metrics`, capacity and load are None and a release cannot be confirmed.

    Hints go to kvsteward's connector only. `auto`: where its endpoint plug-in answers. `on`: the user says that it is
    there; without the plug-in, notes are requests of one token."""

    dialect: ClassVar[str] = "vllm"
    health_path: ClassVar[str] = "/health"
    gives_prompt_logprobs: ClassVar[bool] = True
    isolates = True

    def __init__(self, options: HttpOptions, overrides: Overrides | None = None, *, hints: Hints = "auto") -> None:
        super().__init__(options, overrides)
        self._hints = hints
        self._plugged = False

    async def _discover(self) -> EngineInfo:
        info = await super()._discover()
        self._plugged = self._hints != "off" and await self._listed() is not None
        self.takes_hints = self._hints == "on" or self._plugged
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
        self, prompt: str, *, model: str, request_id: str, cache_salt: str | None = None
    ) -> Sequence[tuple[str, float | None]] | None:
        """By the completions endpoint, which repeats the prompt with its log-probabilities and generates nothing."""
        question = {"model": model or self.info.models[0], "prompt": prompt, "temperature": 0}
        question |= {"echo": True, "logprobs": 0, "max_tokens": 0, **self.cache_fields(cache_salt, {})}
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

    def cache_fields(self, salt: str | None, sent: Mapping[str, Any]) -> Mapping[str, Any]:
        """vLLM hashes `cache_salt` into every block of a prompt. A client's and ours become one of 64 hex digits."""
        if salt is None:
            return {}
        own = sent.get("cache_salt")
        both = hashlib.sha256(f"{salt}\n{own}".encode()).hexdigest() if isinstance(own, str) and own else salt
        return {"cache_salt": both}

    def hint_fields(self, keep: Keep, sent: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.takes_hints:
            return {}
        params = with_hint(sent.get("kv_transfer_params"), _hint(keep))
        return {} if params is None else {"kv_transfer_params": params}

    async def note_pause(self, session_id: str, keep: Keep) -> None:
        if self.takes_hints and not await self._note(session_id, "note", _hint(keep)):
            raise EngineError(f"the engine at {self.name} did not take a note")

    async def release_session(self, session_id: str, *, moved: bool = False, cache_salt: str | None = None) -> bool:
        if not self.takes_hints:
            return False
        if self._plugged:
            return await self._note(session_id, "release", {"moved": moved}, cache_salt)
        return await self._note(session_id, "note", {"final": True, "moved": moved}, cache_salt)

    async def held(self) -> Held | None:
        listed = await self._listed() if self._plugged else None
        if listed is None:
            return None
        try:
            sessions = {str(one["session"]): (int(one["blocks"]), int(one["tokens"])) for one in listed["data"]}
            totals = {name: int(listed["totals"][name]) for name in ("sessions", "blocks", "tokens")}
            return Held(sessions, totals["blocks"], totals["tokens"], totals["sessions"] == len(sessions))
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"the engine at {self.name} lists its sessions in a way that is not known") from error

    async def _note(self, session_id: str, verb: str, hint: Mapping[str, Any], cache_salt: str | None = None) -> bool:
        """To the plug-in, or as a request of one token, which waits in the engine's queue."""
        salted = self.cache_fields(cache_salt, {})
        if self._plugged:
            path = f"{_SESSIONS}/{quote(session_id, safe='')}/{verb}"
            status, _ = await self._client.post_json(path, {**hint, **salted})
            return status == 200
        body = {
            "model": next(iter(self.info.models), ""),
            "messages": [{"role": "user", "content": "-"}],
            "max_tokens": 1,
            "session_id": session_id,
            "kv_transfer_params": {FIELD: {"version": VERSION, "note": True, **hint}},
            **salted,
        }
        status, _ = await self._client.post_json("/v1/chat/completions", body)
        return status == 200

    async def _listed(self) -> dict[str, Any] | None:
        """What the endpoint plug-in says; None where there is none, or no connector behind it."""
        status, listed = await self._client.get_json(_SESSIONS)
        known = status == 200 and isinstance(listed, dict) and listed.get("connector") == FIELD
        return listed if known and listed.get("version") == VERSION else None

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


def _hint(keep: Keep) -> dict[str, Any]:
    return {**keeping(keep.ttl_s, keep.priority), **(pausing(keep.tools) if keep.tools else {})}

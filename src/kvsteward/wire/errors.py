"""Errors on the wire: ours in OpenAI's shape, and the engines' three shapes read into one.

vLLM and llama-server nest under "error", SGLang is flat; a context overflow has a different mark in each. Knows no
sockets. Invariant: whatever an engine sent, `engine_error` returns an EngineResponseError or ContextOverflowError
that has a message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from kvsteward.errors import ContextOverflowError, EngineResponseError, KVStewardError

_OVERFLOW = re.compile(
    r"maximum context length|context size has been exceeded|exceeds the available context|context_length_exceeded"
    r"|longer than the model's context length|exceed_context_size",
    re.IGNORECASE,
)
_MAX_TEXT = 2_000


def error_body(error: KVStewardError, request_id: str | None = None) -> dict[str, Any]:
    """`{"error": {...}}` as OpenAI's clients read it, with a hint that tells what to do."""
    if isinstance(error, EngineResponseError) and error.body:
        return {"error": {**error.body, "hint": error.hint, **({"request_id": request_id} if request_id else {})}}
    body: dict[str, Any] = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
        "hint": error.hint,
    }
    if request_id:
        body["request_id"] = request_id
    return {"error": body}


def engine_error(status: int, raw: bytes) -> EngineResponseError | ContextOverflowError:
    """The engine's error answer as one of ours. An overflow keeps the engine's words under our code."""
    fields = _fields(raw)
    message = str(fields.get("message") or f"the engine answered with status {status}")[:_MAX_TEXT]
    mark = f"{fields.get('type', '')} {fields.get('code', '')} {message}"
    if _OVERFLOW.search(mark):
        return ContextOverflowError(message)
    code = fields.get("code")
    body = {
        **fields,
        "message": message,
        "type": str(fields.get("type") or "engine_error"),
        "param": fields.get("param"),
        "code": code if isinstance(code, str) else "engine_response",
    }
    return EngineResponseError(message, status=status if 400 <= status < 600 else 502, body=body)


def _fields(raw: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {"message": raw.decode("utf-8", "replace").strip()}
    if not isinstance(parsed, Mapping):
        return {"message": str(parsed)}
    inner = parsed.get("error")
    if isinstance(inner, Mapping):
        return dict(inner)
    if isinstance(inner, str):
        return {"message": inner}
    return {k: parsed[k] for k in ("message", "type", "param", "code", "detail") if k in parsed} or {
        "message": str(dict(parsed))
    }

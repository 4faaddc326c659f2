"""Whose turn is this: the session id that a client sent, by whatever name its framework uses.

Sources in order of precedence, each a *schema* of its own; fields of two schemas are never combined, because a
session id of one client library and a thread id of another name different things. A request id is never a session:
it would make each request a session of its own. Where nothing is found, the history's fingerprint decides
(`kvsteward.wire.fingerprint`).

Header and field names are those of the projects named beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvsteward.errors import ProtocolError

MAX_ID_CHARS = 256

_HEADER_SCHEMAS: tuple[tuple[str, ...], ...] = (
    ("x-session-id",),  # vLLM, Ray, OpenCode, Dynamo's OpenCode mapping
    ("x-claude-code-session-id", "x-claude-code-agent-id"),  # Claude Code: a sub-agent has a history of its own
    ("session-id", "thread-id"),  # Codex, OpenCode
    ("session_id", "thread-id"),  # Codex, older
    ("conversation_id",),  # Codex, oldest
    ("x-session-affinity",),  # OpenCode
    ("x-litellm-session-id",),
    ("x-dynamo-session-id",),
    ("x-smg-routing-key",),  # SMG, SGLang
    ("x-aibrix-session-key",),
)
"""The first name of a schema must be there; the others refine it."""

_BODY_SCHEMAS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("session_id",),),  # vLLM, SGLang
    (("vllm_xargs", "session_id"),),
    (("session_params", "id"),),  # SGLang
    (("litellm_session_id",),),
    (("metadata", "session_id"),),  # LiteLLM
    (("nvext", "agent_context", "trajectory_id"),),  # Dynamo
)

How = Literal["header", "body", "previous_response_id", "conversation", "prompt_cache_key", "fingerprint"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What the client said. `value` is a session id, except for `previous_response_id`, where it names an answer."""

    how: How
    value: str = ""
    source: str = ""
    """The header or field that it came from."""


def identify(headers: Mapping[str, str], body: Mapping[str, Any]) -> Identity:
    """The session identity of a request. `headers` has lower-case names. Raises ProtocolError for an unusable id."""
    for schema in _HEADER_SCHEMAS:
        if headers.get(schema[0]):
            value = "/".join(headers[name] for name in schema if headers.get(name))
            return Identity("header", _checked(value, schema[0]), schema[0])
    for paths in _BODY_SCHEMAS:
        value = "/".join(v for path in paths if (v := _at(body, path)))
        if value:
            return Identity("body", _checked(value, ".".join(paths[0])), ".".join(paths[0]))
    return _from_openai_fields(body)


def _from_openai_fields(body: Mapping[str, Any]) -> Identity:
    previous = _at(body, ("previous_response_id",))
    if previous:
        return Identity("previous_response_id", _checked(previous, "previous_response_id"), "previous_response_id")
    conversation = _at(body, ("conversation",)) or _at(body, ("conversation", "id"))
    if conversation:
        return Identity("conversation", _checked(conversation, "conversation"), "conversation")
    key = _at(body, ("prompt_cache_key",))
    if key:
        return Identity("prompt_cache_key", _checked(key, "prompt_cache_key"), "prompt_cache_key")
    return Identity("fingerprint")


def _at(body: Mapping[str, Any], path: tuple[str, ...]) -> str:
    value: Any = body
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else ""


def _checked(value: str, source: str) -> str:
    if len(value) > MAX_ID_CHARS or not value.isprintable():
        raise ProtocolError(
            f"the session id in {source} is not usable: at most {MAX_ID_CHARS} printable characters",
            param=source,
        )
    return value

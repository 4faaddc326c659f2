"""Fingerprints of conversations: a parent-hash chain over messages.

`link(parent, message)` names a message *and all that came before it*. Two requests whose histories have the same
meaning get the same hashes, although clients re-serialise what they were sent: they drop `reasoning_content`, turn
`content: null` into `""`, trim blanks, or print call arguments anew. So the hash covers a canonical form; what was
really received is kept beside it, byte for byte, by the session log.

Knows no sockets and no sessions. Invariant: `canonical` is a pure function of meaning, and a hash never depends on
the order of JSON keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

DIGEST_BYTES = 16
_FORM = b"kvsteward-chain-1"

Message = Mapping[str, Any]


def root(tenant: str = "") -> str:
    """The parent of a first message. Tenants have different roots, so their hashes never meet."""
    return hashlib.blake2b(_FORM + b"\0" + tenant.encode(), digest_size=DIGEST_BYTES).hexdigest()


def link(parent: str, message: Message) -> str:
    """The chain hash of `message` after `parent`: 32 hex digits."""
    return hashlib.blake2b(parent.encode() + b"\0" + canonical(message), digest_size=DIGEST_BYTES).hexdigest()


def chain(messages: Iterable[Message], *, tenant: str = "") -> Iterator[str]:
    """One hash per message, each covering all messages up to it."""
    parent = root(tenant)
    for message in messages:
        parent = link(parent, message)
        yield parent


def body_hash(raw: bytes) -> str:
    """The hash of stored bytes, as they are: what `verify()` re-derives beside the chain."""
    return hashlib.blake2b(raw, digest_size=DIGEST_BYTES).hexdigest()


def canonical(message: Message) -> bytes:
    """The meaning of a message as sorted, compact JSON: role, text or parts, calls, and what a call answers."""
    meaning: dict[str, Any] = {"role": message.get("role"), "content": _content(message.get("content"))}
    calls = message.get("tool_calls")
    if calls:
        meaning["tool_calls"] = [_call(call) for call in calls]
    for field in ("tool_call_id", "name", "function_call"):
        if message.get(field):
            meaning[field] = message[field]
    return orjson.dumps(meaning, option=orjson.OPT_SORT_KEYS)


def _content(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    if isinstance(content, list) and all(
        isinstance(p, dict) and p.get("type") in {"text", "input_text"} for p in content
    ):
        return "\n".join(str(p.get("text", "")) for p in content).strip()
    return content


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments.strip()

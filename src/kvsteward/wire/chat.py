"""A chat completion request: what we must understand of it. Everything else passes through untouched.

Knows no sockets and no sessions. Invariant: `ChatRequest.body` is the client's JSON, field for field; `encode` changes
only what its arguments name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from kvsteward.errors import ProtocolError

Message = dict[str, Any]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
PINNED_ROLES = frozenset({"system", "developer"})

IMAGE_DIGITS = 10
IMAGE_TYPES = frozenset({"image_url", "input_image", "image"})

OWN_FIELD = "kvsteward"
"""A message's field that is ours: `{"class": "plan" | "fact" | "trace"}`. No engine sees it, no hash covers it."""
CLASSES = ("plan", "fact", "trace")

OWN_FIELDS = ("session_id", "previous_response_id", "conversation", "kvsteward")
"""Fields that are ours to read and that an engine need not see (vLLM is told the session by header)."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    body: dict[str, Any]
    messages: tuple[Message, ...]
    model: str
    stream: bool
    wants_usage: bool
    """The client asked for the usage chunk at the end of a stream."""

    @property
    def tools(self) -> Any:
        return self.body.get("tools")

    @property
    def max_output_tokens(self) -> int | None:
        """The client's limit on the answer, by either of its names."""
        for name in ("max_completion_tokens", "max_tokens"):
            value = self.body.get(name)
            if isinstance(value, int) and value > 0:
                return value
        return None


def parse_chat(raw: bytes) -> ChatRequest:
    """Raises ProtocolError, naming the field, for anything that no engine could understand."""
    body = parse_object(raw)
    messages = _messages(body.get("messages"))
    _check_depth(body)
    model = body.get("model", "")
    if not isinstance(model, str):
        raise ProtocolError("'model' must be a string", param="model")
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise ProtocolError("'stream' must be true or false", param="stream")
    _check_limits(body)
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and OWN_FIELD in metadata:
        _check_class(metadata[OWN_FIELD], f"metadata.{OWN_FIELD}")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ProtocolError("'stream_options' must be an object", param="stream_options")
    wants_usage = bool(options and options.get("include_usage"))
    given = class_of(metadata) if isinstance(metadata, dict) else None
    return ChatRequest(body, tuple(with_class(m, given) for m in messages), model, stream, wants_usage)


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises ProtocolError with the place where the JSON breaks."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the body is not valid JSON: {error}", hint="Send a JSON object.") from None
    if not isinstance(body, dict):
        raise ProtocolError(f"the body must be a JSON object, not {type(body).__name__}", hint="Send a JSON object.")
    return body


def _check_depth(body: Mapping[str, Any]) -> None:
    """Raises ProtocolError for what is nested so deeply that it could be read but not written again (255 levels)."""
    rest = [value for name, value in body.items() if name != "messages"]
    inside = [value for message in body["messages"] for value in message.values() if not isinstance(value, str)]
    try:
        orjson.dumps([rest, [[inside]]])  # two levels more than they have in the body, so that there is room for ours
    except TypeError as error:
        raise ProtocolError(f"the body cannot be passed on: {error}", hint="Nest at most 250 levels deep.") from None


def _check_limits(body: Mapping[str, Any]) -> None:
    for name in ("max_tokens", "max_completion_tokens", "n"):
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ProtocolError(f"'{name}' must be an integer", param=name)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ProtocolError("'messages' must be a list with at least one message", param="messages")
    for index, message in enumerate(value):
        _check_message(message, f"messages[{index}]")
    return tuple(value)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise ProtocolError(f"{where} must be an object", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise ProtocolError(f"{where}.role must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise ProtocolError(f"{where}.content must be a string, a list of parts or null", param=f"{where}.content")
    if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
        raise ProtocolError(f"{where}.content: each part must be an object", param=f"{where}.content")
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not all(_is_call(call) for call in calls)):
        raise ProtocolError(
            f"{where}.tool_calls must be a list of calls, each with an id and a function name",
            param=f"{where}.tool_calls",
        )
    if OWN_FIELD in message:
        _check_class(message[OWN_FIELD], f"{where}.{OWN_FIELD}")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ProtocolError(f"{where} answers no call: 'tool_call_id' is missing", param=f"{where}.tool_call_id")


def _check_class(given: Any, where: str) -> None:
    """Raises ProtocolError for a class that does not exist: a message that was meant to stay must not just go."""
    if not isinstance(given, dict):
        raise ProtocolError(f'{where} must be an object such as {{"class": "plan"}}', param=where)
    unknown = sorted(set(given) - {"class"})
    if unknown:
        raise ProtocolError(f"{where} has an unknown field '{unknown[0]}'; it may have 'class'", param=where)
    if given.get("class") not in CLASSES:
        raise ProtocolError(
            f"{where}.class must be one of {', '.join(CLASSES)}, not {given.get('class')!r}", param=f"{where}.class"
        )


def class_of(message: Mapping[str, Any]) -> str | None:
    """What the caller says that a message is: "plan", "fact", "trace", or None."""
    given = message.get(OWN_FIELD)
    return given.get("class") if isinstance(given, Mapping) else None


def with_class(message: Message, given: str | None) -> Message:
    """The message with a class, if it has none of its own. Answers keep none: they are the engine's."""
    if given is None or OWN_FIELD in message or message.get("role") == "assistant":
        return message
    return {**message, OWN_FIELD: {"class": given}}


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict) or not isinstance(call.get("id"), str):
        return False
    function = call.get("function")
    return not isinstance(function, dict) or isinstance(function.get("name"), str)


def check_tool_pairs(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raises ProtocolError if a tool message answers a call that no earlier assistant message made."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            known.add(call["id"])
        if message.get("role") == "tool" and message["tool_call_id"] not in known:
            raise ProtocolError(
                f"messages[{index}] answers the call '{message['tool_call_id']}', which no earlier message made",
                hint="Send the assistant message with its tool_calls before their results.",
                param=f"messages[{index}].tool_call_id",
            )


def has_images(messages: Iterable[Mapping[str, Any]]) -> bool:
    """True if a message carries an image part."""
    return any(
        isinstance(message.get("content"), list) and any(part.get("type") in IMAGE_TYPES for part in message["content"])
        for message in messages
    )


def image_urls(message: Mapping[str, Any]) -> list[str]:
    """The URL of each image part of a message, in order."""
    content = message.get("content")
    urls: list[str] = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") in IMAGE_TYPES:
            source = part.get("image_url") or part.get("image")
            url = source.get("url") if isinstance(source, dict) else source
            urls.append(url if isinstance(url, str) else orjson.dumps(part).decode())
    return urls


def image_hash(url: str) -> str:
    """Names an image by the content of its URL: 32 hex digits."""
    return hashlib.blake2b(url.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def image_marks(message: Mapping[str, Any]) -> list[str]:
    """`[image HASH]` for each image of a message, with the first digits of its hash: the words that find it."""
    return [f"[image {image_hash(url)[:IMAGE_DIGITS]}]" for url in image_urls(message)]


def text_of(message: Mapping[str, Any]) -> str:
    """All text of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(p.get("text", "")) for p in content if isinstance(p, dict) and p.get("text"))
    return ""


def with_tools(request: ChatRequest, tools: Any) -> ChatRequest:
    """The request with other tools."""
    if tools is request.tools:
        return request
    return replace(request, body={**request.body, "tools": tools})


def encode(
    request: ChatRequest,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    stream: bool | None = None,
    max_tokens: int | None = None,
    model: str | None = None,
    fields: Mapping[str, Any] | None = None,
) -> bytes:
    """The body for the engine: the client's, with the named parts replaced. A stream always reports its usage."""
    body = {k: v for k, v in request.body.items() if k not in OWN_FIELDS}
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and OWN_FIELD in metadata:
        rest = {k: v for k, v in metadata.items() if k != OWN_FIELD}
        body = {**body, "metadata": rest} if rest else {k: v for k, v in body.items() if k != "metadata"}
    if fields:
        body.update(fields)
    if messages is not None:
        body["messages"] = messages
    if model is not None:
        body["model"] = model
    if max_tokens is not None:
        name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        body[name] = max_tokens
    if stream if stream is not None else request.stream:
        body["stream"] = True
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    elif stream is not None:
        body["stream"] = False
        body.pop("stream_options", None)
    return orjson.dumps(body)

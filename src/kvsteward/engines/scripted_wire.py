"""What the scripted engine reads and writes: its tokenizer, the OpenAI chat shapes, and each engine's error shapes.

Pure: values in, bytes out. Invariants: tokens of a history are a prefix of the tokens of that history plus a message;
the text of the streamed deltas, joined, is the text of the answer that is not streamed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

IMAGE_TOKENS = 64
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model makes. `arguments` is JSON text, as a model would write it."""

    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says. Tool calls come after the text."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """One output token: a part of the text, or of the arguments of tool call number `call`."""

    text: str
    call: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def pieces_of_text(text: str, chars: int) -> list[str]:
    return [text[start : start + chars] for start in range(0, len(text), chars)]


def tokens_of_text(text: str, chars: int) -> list[int]:
    """One token for each `chars` characters; the same text gives the same tokens in every process."""
    return [zlib.crc32(piece.encode("utf-8", "surrogatepass")) for piece in pieces_of_text(text, chars)]


def tokens_of_prompt(body: Mapping[str, Any], chars: int) -> list[int]:
    """The prompt of a chat body: the tools, then for each message a mark, its text and its calls, then the mark of
    the answer: so the tokens of prompt and answer are a prefix of the next turn's prompt."""
    tokens = tokens_of_text(_json(body["tools"]), chars) if body.get("tools") else []
    for message in body.get("messages") or ():
        tokens += _mark(str(message.get("role")), chars)
        tokens += _tokens_of_content(message.get("content"), chars)
        if message.get("tool_calls"):
            tokens += tokens_of_text(_json(message["tool_calls"]), chars)
    return tokens + _mark("assistant", chars)


def pieces_of_answer(answer: Answer, chars: int) -> list[Piece]:
    """The answer, token by token. An empty answer has none; a call has at least one."""
    pieces = [Piece(text) for text in pieces_of_text(answer.text, chars)]
    for index, call in enumerate(answer.tool_calls):
        pieces += [Piece(text, index) for text in pieces_of_text(call.arguments, chars) or [""]]
    return pieces


def error_body(imitates: str, status: int, kind: str, message: str) -> dict[str, Any]:
    """An error as the imitated engine words it."""
    if imitates == "sglang":
        return {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    if imitates == "llama-server":
        return {"error": {"code": status, "message": message, "type": kind}}
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def overflow_body(imitates: str, prompt_tokens: int, limit_tokens: int) -> dict[str, Any]:
    """HTTP 400: the prompt is longer than the context, as the imitated engine words it."""
    if imitates == "llama-server":
        text = f"request ({prompt_tokens} tokens) exceeds the available context size ({limit_tokens} tokens)"
        text += ", try increasing it"
        body = error_body(imitates, 400, "exceed_context_size_error", text)
        body["error"] |= {"n_prompt_tokens": prompt_tokens, "n_ctx": limit_tokens}
        return body
    text = (
        f"This model's maximum context length is {limit_tokens} tokens. However, your prompt contains {prompt_tokens} "
        "input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt."
    )
    body = error_body(imitates, 400, "BadRequestError", text)
    if imitates == "vllm":
        body["error"]["param"] = "input_tokens"
    if imitates == "openai":
        body["error"] |= {"type": "invalid_request_error", "code": "context_length_exceeded", "param": "messages"}
    return body


class ChatWriter:
    """Writes one answer in OpenAI's chat shape, as events or whole."""

    def __init__(self, body: Mapping[str, Any], answer: Answer, reply_id: str, model: str, created: int) -> None:
        self._body = body
        self._answer = answer
        self._head = {"id": reply_id, "created": created, "model": model}
        self._logprobs = bool(body.get("logprobs"))
        self._begun: set[int] = set()

    @property
    def includes_usage(self) -> bool:
        options = self._body.get("stream_options")
        return bool(isinstance(options, Mapping) and options.get("include_usage"))

    def first(self) -> bytes:
        """The role, before any text."""
        return self._event({"role": "assistant", "content": ""})

    def delta(self, piece: Piece) -> bytes:
        if piece.call is None:
            return self._event({"content": piece.text}, logprobs=[piece.text])
        fragment: dict[str, Any] = {"index": piece.call, "function": {"arguments": piece.text}}
        if piece.call not in self._begun:
            self._begun.add(piece.call)
            call = self._answer.tool_calls[piece.call]
            fragment |= {"id": self._call_id(piece.call), "type": "function"}
            fragment["function"]["name"] = call.name
        return self._event({"tool_calls": [fragment]})

    def last(self, finish: str, usage: Usage) -> Iterator[bytes]:
        """The finish reason, the usage if it was asked for, and the end mark."""
        yield self._event({}, finish=finish)
        if self.includes_usage:
            yield _sse({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage.json()})
        yield DONE

    def whole(self, pieces: Sequence[Piece], finish: str, usage: Usage) -> bytes:
        """The answer in one JSON object."""
        texts = [piece.text for piece in pieces if piece.call is None]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
        calls = sorted({piece.call for piece in pieces if piece.call is not None})
        if calls:
            message["tool_calls"] = [self._whole_call(index, pieces) for index in calls]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        if self._logprobs:
            choice["logprobs"] = {"content": [_logprob(text) for text in texts]}
        return orjson.dumps({**self._head, "object": "chat.completion", "choices": [choice], "usage": usage.json()})

    def _whole_call(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        arguments = "".join(piece.text for piece in pieces if piece.call == index)
        function = {"name": self._answer.tool_calls[index].name, "arguments": arguments}
        return {"id": self._call_id(index), "type": "function", "function": function}

    def _call_id(self, index: int) -> str:
        return f"call_{self._head['id']}_{index}"

    def _event(self, delta: dict[str, Any], finish: str | None = None, logprobs: Sequence[str] = ()) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if self._logprobs and logprobs:
            choice["logprobs"] = {"content": [_logprob(text) for text in logprobs]}
        return _sse({**self._head, "object": "chat.completion.chunk", "choices": [choice]})


def _sse(value: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _logprob(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode("utf-8", "surrogatepass")), "top_logprobs": []}


def _mark(role: str, chars: int) -> list[int]:
    """One token that says who speaks."""
    return tokens_of_text(f"<{role}>"[:chars].ljust(chars), chars)


def _tokens_of_content(content: object, chars: int) -> list[int]:
    if isinstance(content, str):
        return tokens_of_text(content, chars)
    tokens: list[int] = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            tokens += tokens_of_text(part["text"], chars)
        else:
            tokens += [zlib.crc32(_json(part).encode())] * IMAGE_TOKENS
    return tokens


def _json(value: object) -> str:
    return orjson.dumps(value).decode()

"""An engine's streamed answer, read back into one message.

`AnswerReader` only collects while the stream runs, because it sits on the path of every chunk; it parses when it is
asked. It joins text, reasoning, refusals, tool calls (fragments by index), log-probabilities and usage of every
choice, so that an answer that had to be streamed can be given whole to a client that did not ask for a stream.

Knows no sockets. Invariant: what `completion` returns says the same as the chunks that were fed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from kvsteward.errors import EngineError
from kvsteward.wire.sse import data_of
from kvsteward.wire.usage import Usage, parse_usage

MAX_ANSWER_BYTES = 256 * 2**20
_JOINED = ("content", "reasoning_content", "reasoning", "refusal")
_USAGE_ONLY = (b'"choices":[]', b'"choices": []')


def is_usage_only(event: bytes) -> bool:
    """True for the extra chunk that `include_usage` adds: no choices, only usage."""
    if not any(mark in event for mark in _USAGE_ONLY):
        return False
    data = data_of(event)
    chunk = _loads(data) if data else None
    return isinstance(chunk, dict) and not chunk.get("choices") and isinstance(chunk.get("usage"), dict)


@dataclass(slots=True)
class _Choice:
    """What has been said in one choice so far. Mutable."""

    message: dict[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": None})
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: dict[str, Any] | None = None
    finish: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, choice: Mapping[str, Any]) -> None:
        for name, value in (choice.get("delta") or {}).items():
            self._add_field(name, value)
        self.finish = choice.get("finish_reason") or self.finish
        if isinstance(choice.get("logprobs"), Mapping):
            self.logprobs = _joined_lists(self.logprobs, choice["logprobs"])
        for name, value in choice.items():
            if name not in {"delta", "finish_reason", "logprobs", "index"}:
                self.extra[name] = value

    def _add_field(self, name: str, value: Any) -> None:
        if name == "tool_calls":
            for fragment in value or ():
                self._add_call(fragment)
        elif name in _JOINED and isinstance(value, str):
            self.message[name] = (self.message.get(name) or "") + value
        elif value is not None:
            self.message[name] = value

    def _add_call(self, fragment: Mapping[str, Any]) -> None:
        call = self.calls.setdefault(
            fragment.get("index", len(self.calls)),
            {"id": None, "type": "function", "function": {"name": "", "arguments": ""}},
        )
        for name in ("id", "type"):
            if fragment.get(name):
                call[name] = fragment[name]
        function = fragment.get("function") or {}
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""

    def finished(self) -> dict[str, Any]:
        message = dict(self.message)
        if self.calls:
            message["tool_calls"] = [call for _, call in sorted(self.calls.items())]
        return message


def _joined_lists(into: dict[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(into or {})
    for name, value in more.items():
        before = joined.get(name)
        joined[name] = [*(before or []), *value] if isinstance(value, list) else (before if value is None else value)
    return joined


class AnswerReader:
    """Collects the events of one stream. Mutable; one for each turn."""

    __slots__ = ("_bytes", "_choices", "_head", "_parsed", "_pending", "_tail", "_usage", "error", "saw_done")

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._bytes = 0
        self._parsed = 0
        self._choices: dict[int, _Choice] = {}
        self._head: dict[str, Any] = {}
        self._tail: dict[str, Any] = {}
        self._usage: Usage | None = None
        self.error: bytes | None = None
        """The engine's error event, if it sent one in the middle of the stream."""
        self.saw_done = False

    def feed(self, event: bytes) -> None:
        """Takes one event as it came. Raises EngineError when the answer grows over its bound."""
        self._bytes += len(event)
        if self._bytes > MAX_ANSWER_BYTES:
            raise EngineError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes", hint="Set max_tokens.")
        self._pending.append(event)

    def _parse(self) -> None:
        pending, self._pending = self._pending, []
        for event in pending:
            data = data_of(event)
            if data is None:
                continue
            if data == b"[DONE]":
                self.saw_done = True
                continue
            chunk = _loads(data)
            if isinstance(chunk, dict):
                self._add(chunk, data)

    def _add(self, chunk: dict[str, Any], data: bytes) -> None:
        if "error" in chunk and not chunk.get("choices"):
            self.error = data
            return
        for name, value in chunk.items():
            if name not in {"choices", "usage", "object"}:
                (self._tail if self._head and name not in self._head else self._head)[name] = value
        for choice in chunk.get("choices") or ():
            self._choices.setdefault(choice.get("index", 0), _Choice()).add(choice)
        if isinstance(chunk.get("usage"), dict):
            self._tail["usage"] = chunk["usage"]
            self._usage = parse_usage(chunk) or self._usage

    @property
    def usage(self) -> Usage | None:
        self._parse()
        return self._usage

    @property
    def response_id(self) -> str | None:
        self._parse()
        return self._head.get("id")

    @property
    def failed(self) -> bytes | None:
        self._parse()
        return self.error

    @property
    def finish(self) -> str | None:
        self._parse()
        return self._choices[0].finish if 0 in self._choices else None

    @property
    def ended(self) -> bool:
        """The engine said that it was done: a finish reason for each choice, or the closing frame."""
        self._parse()
        return self.saw_done or (bool(self._choices) and all(c.finish for c in self._choices.values()))

    def message(self) -> dict[str, Any] | None:
        """The first choice as an assistant message, or None if nothing was said."""
        self._parse()
        if 0 not in self._choices:
            return None
        message = self._choices[0].finished()
        said = any(message.get(name) for name in (*_JOINED, "tool_calls"))
        return message if said or self._choices[0].finish else None

    def completion(self) -> dict[str, Any]:
        """The answer as a `chat.completion` object."""
        self._parse()
        choices = [
            {
                "index": index,
                "message": choice.finished(),
                "logprobs": choice.logprobs,
                "finish_reason": choice.finish,
                **choice.extra,
            }
            for index, choice in sorted(self._choices.items())
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, **self._tail}


def _loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None

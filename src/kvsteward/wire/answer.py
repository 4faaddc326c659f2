"""An engine's streamed answer, read back into one message.

`AnswerReader` only collects while the stream runs, because it sits on the path of every chunk; it parses when it is
asked. It joins text, reasoning, refusals, tool calls (fragments by index), log-probabilities and usage of every
choice, so that an answer that had to be streamed can be given whole to a client that did not ask for a stream.

Knows no sockets. Invariant: what `completion` returns says the same as the chunks that were fed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from kvsteward.errors import EngineError
from kvsteward.wire.sse import data_of
from kvsteward.wire.usage import Usage, parse_usage

MAX_ANSWER_BYTES = 256 * 2**20
_JOINED = ("content", "reasoning_content", "reasoning", "refusal")
_TEXT = re.compile(rb'"(content|reasoning_content|reasoning)": ?("(?:[^"\\]|\\.)*")')
_MOULDS = 4
"""How many events of a stream may be tried as a mould."""
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
    pieces: dict[str, list[str]] = field(default_factory=dict)
    """Texts of the fields that are told piece by piece, not joined yet."""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: dict[str, Any] | None = None
    finish: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, choice: dict[str, Any]) -> None:
        """Takes what a chunk says of this choice. `choice` is used up."""
        delta = choice.pop("delta", None)
        if delta:
            for name, value in delta.items():
                self._add_field(name, value)
        self.finish = choice.pop("finish_reason", None) or self.finish
        logprobs = choice.pop("logprobs", None)
        if isinstance(logprobs, Mapping):
            self.logprobs = _joined_lists(self.logprobs, logprobs)
        choice.pop("index", None)
        if choice:
            self.extra.update(choice)

    def _add_field(self, name: str, value: Any) -> None:
        if name == "tool_calls":
            for fragment in value or ():
                self._add_call(fragment)
        elif name in _JOINED and isinstance(value, str):
            pieces = self.pieces.get(name)
            if pieces is None:
                self.pieces[name] = [value]
                self.message.setdefault(name, None)  # keeps the order in which fields were told
            else:
                pieces.append(value)
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
        for name, pieces in self.pieces.items():
            text = "".join(pieces)
            pieces[:] = [text]
            message[name] = text
        if self.calls:
            message["tool_calls"] = [call for _, call in sorted(self.calls.items())]
        return message


def _joined_lists(into: dict[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(into or {})
    for name, value in more.items():
        before = joined.get(name)
        joined[name] = [*(before or []), *value] if isinstance(value, list) else (before if value is None else value)
    return joined


@dataclass(frozen=True, slots=True)
class _Mould:
    """An event around the text that it adds. Most events of a stream differ from one another in this text alone."""

    before: bytes
    after: bytes
    pieces: list[str]
    """Where the text goes."""

    def takes(self, event: bytes) -> bool:
        """Adds the text of an event of this mould. False: it is another event, and nothing was done.

        What stands between two known parts of a JSON text and is one JSON string can be nothing but that string's
        place, so all else that the event says is what the first of its kind said."""
        before, after = self.before, self.after
        if not (event.startswith(before) and event.endswith(after) and len(event) >= len(before) + len(after) + 2):
            return False
        text = _loads(event[len(before) : len(event) - len(after)])
        if not isinstance(text, str):
            return False
        self.pieces.append(text)
        return True


def _mould_of(event: bytes, found: re.Match[bytes], choices: Mapping[int, _Choice]) -> _Mould | None:
    """The mould of an event that has just been added, if it says no more than one piece of text."""
    name = found[1].decode()
    before, after = event[: found.start(2)], event[found.end(2) :]
    probe = _loads(data_of(before + b'"?"' + after) or b"")
    told = probe.get("choices") if isinstance(probe, dict) and not probe.get("usage") else None
    if (
        not isinstance(told, list)
        or len(told) != 1
        or told[0].get("index", 0) != 0
        or told[0].get("delta") != {name: "?"}
    ):
        return None
    if told[0].get("logprobs") or told[0].get("finish_reason"):
        return None
    return _Mould(before, after, choices[0].pieces[name])


class AnswerReader:
    """Collects the events of one stream. Mutable; one for each turn."""

    __slots__ = (
        "_bytes",
        "_choices",
        "_head",
        "_mould",
        "_moulds_left",
        "_pending",
        "_tail",
        "_usage",
        "error",
        "saw_done",
    )

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._bytes = 0
        self._choices: dict[int, _Choice] = {}
        self._head: dict[str, Any] = {}
        self._tail: dict[str, Any] = {}
        self._usage: Usage | None = None
        self._mould: _Mould | None = None
        self._moulds_left = _MOULDS
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
            if self._mould is not None and self._mould.takes(event):
                continue
            data = data_of(event)
            if data is None:
                continue
            if data == b"[DONE]":
                self.saw_done = True
                continue
            chunk = _loads(data)
            if isinstance(chunk, dict):
                self._add(chunk, data)
                self._mould = self._next_mould(event)

    def _next_mould(self, event: bytes) -> _Mould | None:
        found = _TEXT.search(event) if self._moulds_left else None
        if found is None:
            return None
        self._moulds_left -= 1
        return _mould_of(event, found, self._choices)

    def _add(self, chunk: dict[str, Any], data: bytes) -> None:
        if "error" in chunk and not chunk.get("choices"):
            self.error = data
            return
        choices = chunk.pop("choices", None)
        if isinstance(chunk.get("usage"), dict):
            self._tail["usage"] = chunk["usage"]
            self._usage = parse_usage(chunk) or self._usage
        chunk.pop("usage", None)
        chunk.pop("object", None)
        self._add_head(chunk)
        for said in choices or ():
            index = said.get("index", 0)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = _Choice()
            choice.add(said)

    def _add_head(self, fields: dict[str, Any]) -> None:
        """What the first chunk has stands before the choices, what comes later after them; the last word counts."""
        if not self._head:
            self._head = fields
        elif fields.keys() <= self._head.keys():
            self._head.update(fields)
        else:
            for name, value in fields.items():
                (self._head if name in self._head else self._tail)[name] = value

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

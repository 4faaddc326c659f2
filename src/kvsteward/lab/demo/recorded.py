"""Recorded conversations, joined end to end until there are enough turns.

Conversations of different files follow each other, each cut off after `MAX_TURNS_EACH` turns, so that one long
recording is not the whole session. Call ids are made unique; only the first system message is kept (one session has
one), and tools are not declared (each recording has its own). Every reply is the recorded one.

Knows the form of the data (`*.jsonl`, one object a line with `messages` and perhaps `tools`). Invariant: no tool
message without its call; a long tool result arrives at turn 5, 25, 45, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any

import orjson

from kvsteward.errors import ConfigError
from kvsteward.lab.demo.base import LONG_BYTES, Message, Script, Turn, is_long
from kvsteward.lab.demo.facts import text_of

MAX_TURNS_EACH = 15
_MAX_FILE_BYTES = 256 * 2**20


def recorded_session(folder: Path, turns: int) -> Script:
    """A session of `turns` turns from a folder of recordings. Raises ConfigError if they are not enough."""
    conversations = _round_robin([_read(path) for path in sorted(folder.glob("*.jsonl"))])
    if not conversations:
        raise ConfigError(f"{folder} has no conversations (*.jsonl)", param="data")
    long_rounds = list(_long_rounds(conversations))
    if not long_rounds:
        raise ConfigError(f"no tool result of {LONG_BYTES} bytes or more is in {folder}", param="data")
    made = tuple(islice(_turns(_joined(conversations), cycle(long_rounds)), turns))
    if len(made) < turns:
        raise ConfigError(f"the conversations in {folder} have {len(made)} turns, not {turns}", param="turns")
    names = (t.get("function", t).get("name") for c in conversations for t in c.get("tools") or ())
    return Script(f"recorded: {folder.name}", made, known_tools=frozenset(str(n) for n in names if n))


def _read(path: Path) -> list[dict[str, Any]]:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_FILE_BYTES} bytes", param="data")
    try:
        found = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON, one object a line: {error}", param="data") from None
    return [c for c in found if isinstance(c, dict) and isinstance(c.get("messages"), list)]


def _round_robin(files: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [c for row in zip_longest(*files) for c in row if c is not None]


def _joined(conversations: Iterable[Mapping[str, Any]]) -> Iterator[Message]:
    has_system = False
    for number, conversation in enumerate(conversations):
        for message in _first_turns(conversation["messages"]):
            if message["role"] in {"system", "developer"}:
                if has_system or number:
                    continue
                has_system = True
            yield _renamed(message, f"r{number}-")


def _first_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """The beginning of a conversation; the results of its last call are still part of it."""
    turns, known = 0, set[str]()
    for message in messages:
        if turns >= MAX_TURNS_EACH and message["role"] != "tool":
            return
        turns += message["role"] == "assistant"
        known.update(call["id"] for call in message.get("tool_calls") or ())
        if message["role"] != "tool" or message.get("tool_call_id") in known:
            yield message


def _renamed(message: Message, prefix: str) -> Message:
    """The same message with its call ids made unique; only the fields that a request has."""
    kept = {name: message[name] for name in ("role", "content", "name") if message.get(name) is not None}
    kept.setdefault("content", None)
    if message.get("tool_calls"):
        kept["tool_calls"] = [{**call, "id": prefix + call["id"]} for call in message["tool_calls"]]
    if message["role"] == "tool":
        kept["tool_call_id"] = prefix + message["tool_call_id"]
    return kept


def _turns(messages: Iterable[Message], long_rounds: Iterator[tuple[Message, Message]]) -> Iterator[Turn]:
    """A turn ends at each assistant message that answers something; others are history."""
    arrivals: list[Message] = []
    number = 1
    for message in messages:
        if message["role"] != "assistant" or not arrivals or arrivals[-1]["role"] == "assistant":
            arrivals.append(message)
            continue
        if is_long(number) and not any(_is_long_result(m) for m in arrivals):
            arrivals += [_renamed(m, f"long{number}-") for m in next(long_rounds)]
        yield Turn(tuple(arrivals), message)
        arrivals, number = [], number + 1


def _is_long_result(message: Message) -> bool:
    return message["role"] == "tool" and len(text_of(message).encode()) >= LONG_BYTES


def _long_rounds(conversations: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Message, Message]]:
    """Recorded calls with a long result, each with its result."""
    for conversation in conversations:
        messages = conversation["messages"]
        for before, message in zip(messages, messages[1:], strict=False):
            calls = before.get("tool_calls") or ()
            if _is_long_result(message) and len(calls) == 1 and calls[0]["id"] == message.get("tool_call_id"):
                yield before, message

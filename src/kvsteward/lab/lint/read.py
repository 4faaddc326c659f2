"""Recorded requests, whatever wrote them: one list of chat bodies, each with its session where that is known.

Understood, found out line by line: bodies of OpenAI chat completions and of Anthropic messages, alone or wrapped by a
proxy (`{"request": {"body": ...}}`, `{"headers", "body"}`), and recorded conversations, which become one request for
each answer in them. A file is JSON lines, one JSON value, or a list.

Knows no judgement. Invariants: bounded in bytes and requests; a line that is none of these is a ConfigError that names
it; an Anthropic body becomes the OpenAI body of the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from kvsteward.context.hygiene import Moved, restored
from kvsteward.errors import ConfigError, KVStewardError
from kvsteward.lab.prompts import Prompt, parts_of
from kvsteward.wire.chat import PINNED_ROLES
from kvsteward.wire.identity import identify

MOST_BYTES = 1 << 30
MOST_REQUESTS = 100_000
_WRAPPERS = ("request", "body", "json", "payload", "data", "kwargs", "request_body")
_CONVERSATION = ("structure", "source", "meta", "conversation_id", "trajectory", "licence")


_Turn = tuple[Prompt, Prompt]
"""The first message of a conversation, and an answer in it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request. `session` is "" where nothing names one; `line` counts from 1."""

    body: Mapping[str, Any]
    session: str
    line: int


def read_file(path: Path) -> list[Recorded]:
    """All requests of a file. Raises ConfigError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} is larger than {MOST_BYTES >> 30} GiB")
        return read_requests(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}", hint="Name a file of requests, or a gateway's URL."
        ) from None


def read_requests(raw: bytes, name: str = "the file") -> list[Recorded]:
    """Requests from JSON lines, one JSON value, or a list of them."""
    found: list[Recorded] = []
    for line, value in _values(raw, name):
        taken = list(_of(value, line, {}, ""))
        if not taken:
            raise ConfigError(
                f"line {line} of {name} is no chat request",
                hint="Each line is a body with 'messages' (OpenAI or Anthropic), alone or as 'body' or 'request'.",
            )
        found += taken
        if len(found) > MOST_REQUESTS:
            raise ConfigError(f"{name} has more than {MOST_REQUESTS:,} requests")
    return found


def _values(raw: bytes, name: str) -> Iterator[tuple[int, Any]]:
    try:
        whole = orjson.loads(raw)
    except orjson.JSONDecodeError:
        whole = None
    if whole is not None:
        yield from enumerate(whole if isinstance(whole, list) else [whole], 1)
        return
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"line {number} of {name} is not JSON: {error}") from None


def _of(value: Any, line: int, headers: Mapping[str, str], session: str, depth: int = 0) -> Iterator[Recorded]:
    if isinstance(value, str) and depth and value.lstrip()[:1] == "{":
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return
    if not isinstance(value, Mapping) or depth > 4:
        return
    if isinstance(value.get("messages"), list):
        yield from _request(value, line, headers, session)
        return
    named = value.get("session_id") or value.get("session")
    session = named if isinstance(named, str) else session
    sent = value.get("headers")
    if isinstance(sent, Mapping):
        headers = {str(k).lower(): v for k, v in sent.items() if isinstance(v, str)}
    for wrapper in _WRAPPERS:
        if wrapper in value:
            found = list(_of(value[wrapper], line, headers, session, depth + 1))
            if found:
                yield from found
                return


def _request(body: Mapping[str, Any], line: int, headers: Mapping[str, str], session: str) -> Iterator[Recorded]:
    messages = body["messages"]
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        return
    body = openai_body(body)
    messages = body["messages"]
    name = session or session_of(headers, body)
    conversation = messages[-1].get("role") == "assistant" or any(key in body for key in _CONVERSATION)
    if not conversation:
        yield Recorded(body, name, line)
        return
    own = name or str(body.get("id") or f"line {line}")
    for index, message in enumerate(messages):
        if message.get("role") == "assistant" and index:
            yield Recorded({**body, "messages": messages[:index]}, own, line)


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """The id that the client said, by any of the names that the gateway knows."""
    try:
        found = identify(headers, body)
    except KVStewardError:
        return ""
    return found.value if found.how in {"header", "body", "conversation", "prompt_cache_key"} else ""


# -- Anthropic ------------------------------------------------------------------------------------------------------


def openai_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the same prompt in OpenAI's shape. One that has this shape already stays as it is."""
    made = dict(body)
    tools = body.get("tools")
    if isinstance(tools, list):
        made["tools"] = [_tool(tool) for tool in tools]
    messages = [one for message in body["messages"] for one in _messages(message)]
    system = body.get("system")
    if isinstance(system, str | list):
        messages.insert(0, {"role": "system", "content": system})
        made.pop("system")
    made["messages"] = messages
    return made


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or "input_schema" not in tool:
        return tool
    named = {key: tool[key] for key in ("name", "description") if key in tool}
    return {"type": "function", "function": {**named, "parameters": tool["input_schema"]}}


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list) or not any(_is_block(part) for part in content):
        return [dict(message)]
    kept: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "tool_use":
            arguments = orjson.dumps(part.get("input")).decode()
            function = {"name": str(part.get("name")), "arguments": arguments}
            calls.append({"id": str(part.get("id")), "type": "function", "function": function})
        elif kind == "tool_result":
            answered = part.get("content")
            text = answered if isinstance(answered, str | list) else ""
            results.append({"role": "tool", "tool_call_id": str(part.get("tool_use_id")), "content": text})
        elif kind == "image":
            kept.append({"type": "image_url", "image_url": {"url": _url(part.get("source"))}})
        elif kind not in {"thinking", "redacted_thinking"}:  # no template prints the thoughts of earlier turns
            kept.append(part)
    made = {key: value for key, value in message.items() if key != "content"}
    own = [{**made, "content": kept, **({"tool_calls": calls} if calls else {})}] if kept or calls else []
    return [*results, *own]


def _is_block(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in {"tool_use", "tool_result", "image", "thinking"}


def _url(source: Any) -> str:
    if not isinstance(source, Mapping):
        return ""
    return str(source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}")


# -- a running gateway ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Logged:
    """A session of a gateway, as its API tells it: its row, the messages of all branches as they came, decisions."""

    row: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]
    decisions: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Answered:
    """An answer of an engine, when it came, and the body of its request."""

    at_s: float
    body: Mapping[str, Any]
    answer: Any


def requests_of_logs(logs: Sequence[Logged]) -> list[Recorded]:
    """The requests that the clients of a gateway sent: one for each answer of an engine, on whatever branch it is.

    A client that names no session and changes what it had sent begins a session with each turn. Such a session is told
    by the answers in its first request, and its requests are counted as those of the session that gave them."""
    names: dict[str, str] = {}
    gave: dict[_Turn, str] = {}
    found: dict[str, dict[str, _Answered]] = {}
    for log in sorted(logs, key=lambda log: float(log.row["created_s"])):
        id_, answered = str(log.row["id"]), _answered(log)
        begun = next((_newest_turn(one.body) for one in answered.values()), None)
        name = names.get(str(log.row.get("branched_from"))) or (gave.get(begun) if begun else None) or id_
        names[id_] = name
        gave |= {_turn(one.body, one.answer): name for one in answered.values()}
        found[name] = found.get(name, {}) | answered  # a branch has copies of what it goes on from
    made = []
    for name, of_name in found.items():
        ordered = sorted(of_name.values(), key=lambda one: one.at_s)
        made += [Recorded(one.body, name, number) for number, one in enumerate(ordered, 1)]
    return made


def _answered(log: Logged) -> dict[str, _Answered]:
    """The answers of engines by their hashes. A system prompt is put together again with what the gateway had moved out
    of it."""
    notes = {d["at"]: d["payload"].get("moved") or [] for d in log.decisions if d["kind"] == "note"}
    tools = {d["at"]: d["payload"] for d in log.decisions if d["kind"] == "tools"}
    known: dict[str, Mapping[str, Any]] = {}
    found = {}
    for entry in log.entries:
        if entry["source"] == "engine" and entry["parent"] in known:
            path = _path(known, entry["parent"])
            moved = next((notes[one["hash"]] for one in path if one["hash"] in notes), [])
            given = next((tools[one["hash"]] for one in path if one["hash"] in tools), None)
            shown = given.get("sent") if isinstance(given, Mapping) else given
            messages = _with_moved([one["message"] for one in reversed(path)], moved)
            body = {"messages": messages, **({"tools": shown} if shown else {})}
            found[str(entry["hash"])] = _Answered(float(entry["created_s"]), body, entry["message"])
        known[entry["hash"]] = entry
    return found


def _path(known: Mapping[str, Mapping[str, Any]], hash_: str) -> list[Mapping[str, Any]]:
    """The entries from there back to the first."""
    path = []
    while (entry := known.get(hash_)) is not None:  # it ends: an entry came after its parent
        path.append(entry)
        hash_ = entry["parent"]
    return path


def _newest_turn(body: Mapping[str, Any]) -> _Turn | None:
    """Of the answers that a request brings along, the newest."""
    answers = (message for message in reversed(body["messages"]) if message.get("role") == "assistant")
    return next((_turn(body, answer) for answer in answers), None)


def _turn(body: Mapping[str, Any], answer: Any) -> _Turn:
    said = (message for message in body["messages"] if message.get("role") not in PINNED_ROLES)
    return parts_of({"messages": [next(said, {})]}), parts_of({"messages": [answer]})


def _with_moved(history: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
    return list(restored(history, None, [Moved(**one) for one in moved])[0])

"""Hides the calls of one tool in a streamed answer, over several rounds that the client sees as one.

Text goes through at once, in the engine's own bytes where nothing has to change. A call is held back only until its
name is known: a client's call then passes (renumbered), ours never does. A round in which only our tool was called
has no end for the client; the next round goes on in the same answer, under the same id. Usage is summed.

Knows no sockets. Invariant: what comes out is one well-formed answer that never names the hidden tool.
"""

from __future__ import annotations

from typing import Any

import orjson

from kvsteward.wire.answer import AnswerReader
from kvsteward.wire.sse import data_of, frame
from kvsteward.wire.usage import Usage, parse_usage

_ONE_ANSWER = ("id", "created", "model")
_SPACER = "\n\n"


class Veil:
    """One for each answer of one choice. Mutable. `more` False: no further round can follow this one."""

    def __init__(self, hidden: str) -> None:
        self._hidden = hidden
        self._head: dict[str, Any] | None = None
        self._usages: list[Usage] = []
        self._said = False
        self._calls_shown = 0
        self._first = True
        self.begin(more=True)

    def begin(self, *, more: bool) -> None:
        """A round begins."""
        self._more = more
        self._places: dict[int, int | None] = {}
        self._unnamed: dict[int, list[dict[str, Any]]] = {}
        self._shown_before = self._calls_shown
        self._reader = AnswerReader()

    def feed(self, event: bytes) -> bytes:
        """What the client may see of one event: the event, a changed one, or nothing."""
        self._reader.feed(event)
        plain = b'"tool_calls"' not in event and b'"usage":{' not in event and b'"usage": {' not in event
        unfinished = b'"finish_reason":null' in event or b'"finish_reason": null' in event
        if self._first and self._head is not None and plain and unfinished:
            return event
        data = data_of(event)
        chunk = _object(data) if data else None
        if chunk is None or ("error" in chunk and not chunk.get("choices")):
            return event
        if self._head is None:
            self._head = {name: chunk[name] for name in _ONE_ANSWER if name in chunk}
        usage = parse_usage(chunk)
        if usage is not None and not chunk.get("choices"):
            return b""
        return self._changed(chunk, event)

    def _changed(self, chunk: dict[str, Any], event: bytes) -> bytes:
        before = orjson.dumps(chunk)
        choices = [c for c in chunk.get("choices") or () if isinstance(c, dict)]
        kept = [choice for choice in choices if self._choice(choice)]
        if choices and not kept:
            return b""
        chunk["choices"] = kept
        if not self._first:
            chunk.update(self._head or {})
        return event if orjson.dumps(chunk) == before else frame(chunk)

    def _choice(self, choice: dict[str, Any]) -> bool:
        """Takes ours out of a choice. False if nothing is left to say."""
        delta = choice.get("delta") or {}
        if isinstance(delta.get("tool_calls"), list):
            shown = [f for fragment in delta["tool_calls"] for f in self._fragment(fragment)]
            delta.pop("tool_calls")
            if shown:
                delta["tool_calls"] = shown
        elif not self._first and delta.get("content") and self._said:
            self._said = False
            delta["content"] = _SPACER + delta["content"]
        if not self._first:
            delta.pop("role", None)
        finish = choice.get("finish_reason")
        if finish:
            late = [f for held in self._unnamed.values() for f in held]
            self._unnamed = {}
            if late:
                delta["tool_calls"] = [*(delta.get("tool_calls") or ()), *late]
                self._calls_shown += 1
            if self._only_ours:
                choice["finish_reason"] = finish = None if self._more else "stop"
        choice["delta"] = delta
        return bool(finish) or any(value not in (None, "", []) for value in delta.values())

    def _fragment(self, fragment: Any) -> list[dict[str, Any]]:
        """The fragments that may be shown now: of this call, or none while its name is not known."""
        if not isinstance(fragment, dict):
            return []
        index = fragment.get("index", 0)
        if index not in self._places:
            held = self._unnamed.setdefault(index, [])
            held.append(fragment)
            name = (fragment.get("function") or {}).get("name")
            if not name:
                return []
            self._places[index] = None if name == self._hidden else self._calls_shown
            self._calls_shown += name != self._hidden
            fragments = self._unnamed.pop(index)
        else:
            fragments = [fragment]
        place = self._places[index]
        return [] if place is None else [{**f, "index": place} for f in fragments]

    @property
    def _only_ours(self) -> bool:
        return None in self._places.values() and self._calls_shown == self._shown_before

    def end(self) -> list[dict[str, Any]]:
        """Ends the round. The calls that we must answer before the next one; none if the answer is complete."""
        usage = self._reader.usage
        if usage is not None:
            self._usages.append(usage)
        message = self._reader.message() or {}
        calls = message.get("tool_calls") or [] if self._only_ours and self._more else []
        self._said = bool(message.get("content"))
        self._first = False
        return [call for call in calls if call["function"]["name"] == self._hidden]

    @property
    def round(self) -> AnswerReader:
        """What the engine really said in this round."""
        return self._reader

    def usage(self) -> Usage | None:
        """The sum over all rounds."""
        u = self._usages
        total = (sum(x.prompt_tokens for x in u), sum(x.cached_tokens for x in u), sum(x.output_tokens for x in u))
        return Usage(*total) if u else None

    def first_prompt(self) -> Usage | None:
        """The usage of the first round, whose prompt is the view alone."""
        return self._usages[0] if self._usages else None

    def last_event(self) -> bytes:
        """The usage chunk of the whole answer, as `include_usage` puts it at the end. Empty where none was reported."""
        usage = self.usage()
        if usage is None:
            return b""
        body = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.resident_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        return frame({**(self._head or {}), "object": "chat.completion.chunk", "choices": [], "usage": body})


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None

"""What a source of turns is: a session written down beforehand, so that both modes are given the same one.

Knows no HTTP. Invariant: a turn is one chat completion request; the messages of turns 1..n, with the replies put in
place, are a valid conversation for every n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

LONG_TURN, LONG_EVERY = 5, 20
"""Turn 5 and every 20 turns after it carry a long tool result."""
LONG_TOKENS = 3_000
LONG_BYTES = 18_000
"""At least `LONG_TOKENS` for any text up to six bytes a token; English prose has about four and a half."""


@dataclass(frozen=True, slots=True)
class Turn:
    """`arrivals` are appended to the history before the request; `reply` takes the place of the engine's answer.
    None: the engine's own words are kept."""

    arrivals: tuple[Message, ...]
    reply: Message | None


@dataclass(frozen=True, slots=True)
class Script:
    """A whole session. `tools` are sent with every request."""

    source: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    known_tools: frozenset[str] = frozenset()
    """Names of tools that are not sent, because the conversations that are joined have different ones."""

    @property
    def tool_names(self) -> frozenset[str]:
        """Names of tools that are declared or called: they are the harness's words, never facts."""
        called = {
            str(call["function"]["name"])
            for turn in self.turns
            if turn.reply
            for call in turn.reply.get("tool_calls") or ()
        }
        return self.known_tools | called | {str(tool["function"]["name"]) for tool in self.tools}


def is_long(turn: int) -> bool:
    """True for turn 5, 25, 45, ... (counted from 1)."""
    return turn % LONG_EVERY == LONG_TURN % LONG_EVERY


def call(call_id: str, name: str, arguments: str, content: str | None = None) -> Message:
    """An assistant message with one call."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(call_id: str, text: str) -> Message:
    """The message that answers a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}

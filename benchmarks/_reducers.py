"""The others: what a model would see of a conversation with common context reducers, turn by turn.

Every reducer lives a conversation as an agent does: `turn` is given the messages that are new and returns the view,
`answer` is given what the model said. The peers are the published packages, called as their own code calls them; a
package that is not installed makes its reducers raise `Absent`. LangChain's summary is written by the engine that
`Ask` is given, or by a stand-in that quotes; its label says which.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Message = dict[str, Any]
Messages = list[Message]
Length = Callable[[Message], int]
HIGH_RATIO, KEPT_RATIO, SUMMARY_RATIO, WINDOW_RATIO = 0.85, 0.30, 0.10, 0.60
"""What a reducer with marks is given of the budget: where it starts, what it keeps, how long its summary is; and the
length of a sliding window, about the mean between two marks."""


class Absent(Exception):
    """The package of a peer is not installed."""


def package(name: str, pip: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"left out: {pip} is not installed ({error.name})") from error


@dataclass
class Ask:
    """Asks an OpenAI-compatible engine. Mutable: counts the tokens that its prompts had."""

    url: str
    model: str
    count: Callable[[str], int]
    asked_tokens: int = 0

    def __call__(self, messages: Sequence[Message], max_tokens: int) -> str:
        body = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer none"},
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return str(json.load(reply)["choices"][0]["message"]["content"] or "")


def quoted(prompt: str, max_chars: int) -> str:
    """The stand-in for a model: the beginning of each message that stands in the prompt, the newest first."""
    told = re.findall(r"<message[^>]*>\s*(.*?)\s*</message>", prompt.rpartition("<messages>")[2], re.S)
    lines: list[str] = []
    for text in reversed(told):
        line = " ".join(text.split())[:200]
        max_chars -= len(line) + 1
        if max_chars < 0:
            break
        lines.append(line)
    return "\n".join(reversed(lines))


class Reducer(ABC):
    """One policy on one conversation. `asked_tokens`: prompts of its own model calls, which no cache holds."""

    label: str
    asked_tokens: int = 0

    def __init__(self, budget: int, length: Length, count: Callable[[str], int], ask: Ask | None) -> None:
        self.budget, self.length, self.count, self.ask = budget, length, count, ask
        self.history: Messages = []

    def turn(self, new: Messages) -> Messages:
        self.history.extend(new)
        return self.view()

    def answer(self, message: Message) -> None:
        self.history.append(message)

    @abstractmethod
    def view(self) -> Messages: ...

    def recallable(self, view: Messages) -> str | None:
        """The text that its own store gives back for what the view names. None: it has no store."""
        return None


def text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(p.get("text") or "") if isinstance(p, dict) else str(p) for p in content)
    return str(content or "")


def rounds(messages: Messages) -> list[Messages]:
    """Whole rounds: a user message or an assistant's, and the results after it."""
    found: list[Messages] = []
    for message in messages:
        if message["role"] == "tool" and found:
            found[-1].append(message)
        else:
            found.append([message])
    return found


def head_of(messages: Messages) -> int:
    """The number of leading messages that every window keeps: the system prompt and the first user message."""
    index = 0
    while index < len(messages) and messages[index]["role"] in {"system", "developer"}:
        index += 1
    return min(len(messages), index + 1)


class Whole(Reducer):
    label = "nothing reduced"

    def view(self) -> Messages:
        return list(self.history)


class LastRounds(Reducer):
    """System prompt, first user message, and the newest six rounds."""

    label = "last 6 rounds"
    rounds_kept = 6

    def view(self) -> Messages:
        head = head_of(self.history)
        kept = rounds(self.history[head:])
        starts = [i for i, each in enumerate(kept) if each[0]["role"] == "assistant"][-self.rounds_kept :]
        return self.history[:head] + [m for each in kept[starts[0] if starts else 0 :] for m in each]


class Window(Reducer):
    """System prompt, first user message, and the newest whole rounds that fit a window."""

    label = "sliding window"

    def view(self) -> Messages:
        head = head_of(self.history)
        room = int(self.budget * WINDOW_RATIO) - sum(map(self.length, self.history[:head]))
        kept: list[Messages] = []
        for each in reversed(rounds(self.history[head:])):
            room -= sum(map(self.length, each))
            if room < 0 and kept:
                break
            kept.append(each)
        return self.history[:head] + [m for each in reversed(kept) for m in each]


class HeadTail(Reducer):
    """Each tool result over a sixteenth of the budget is cut to its head and its tail."""

    label = "head and tail of results"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cut: dict[int, Message] = {}

    def view(self) -> Messages:
        return [self._cut(i, m) if m["role"] == "tool" else m for i, m in enumerate(self.history)]

    def _cut(self, index: int, message: Message) -> Message:
        if index not in self.cut:
            text, limit = text_of(message), self.budget // 16
            tokens = self.count(text)
            half = len(text) * limit // (2 * max(1, tokens))
            short = f"{text[:half]}\n… {tokens - limit} tokens left out …\n{text[-half:]}"
            self.cut[index] = {**message, "content": short} if tokens > limit else message
        return self.cut[index]


class LangChain(Reducer):
    """Keeps the conversation as LangChain's messages, without the system prompt: its agents hold that apart."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        package("langchain.agents.middleware", "langchain")
        self.kinds = importlib.import_module("langchain_core.messages")
        self.system: Messages = []
        self.state: list[Any] = []
        self.origin: dict[str, Message] = {}

    def _take(self, message: Message) -> None:
        if message["role"] in {"system", "developer"} and not self.state:
            self.system.append(message)
            return
        name = f"m{len(self.origin)}"
        self.origin[name] = message
        text = text_of(message)
        if message["role"] == "assistant":
            calls = [
                {"id": c["id"], "name": c["function"]["name"], "args": _arguments(c), "type": "tool_call"}
                for c in message.get("tool_calls") or ()
            ]
            self.state.append(self.kinds.AIMessage(content=text, tool_calls=calls, id=name))
        elif message["role"] == "tool":
            call = str(message.get("tool_call_id") or name)
            self.state.append(self.kinds.ToolMessage(content=text, tool_call_id=call, id=name))
        else:
            self.state.append(self.kinds.HumanMessage(content=text, id=name))

    def _back(self, messages: Sequence[Any]) -> Messages:
        """As plain messages: the recorded one where its text was not touched."""
        found = list(self.system)
        for message in messages:
            origin = self.origin.get(message.id)
            if origin is None:
                found.append({"role": "user", "content": message.content})
            else:
                found.append(
                    origin if message.content == text_of(origin) else {**origin, "content": str(message.content)}
                )
        return found

    def tokens_of(self, messages: Sequence[Any]) -> int:
        return sum(map(self.length, self._back(messages))) - sum(map(self.length, self.system))

    def turn(self, new: Messages) -> Messages:
        for message in new:
            self._take(message)
        return self.view()

    def answer(self, message: Message) -> None:
        self._take(message)


def _arguments(call: Any) -> dict[str, Any]:
    try:
        value = json.loads(call["function"].get("arguments") or "{}")
    except (TypeError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


class ClearToolUses(LangChain):
    """LangChain's context editing: results but the newest three are cleared once the trigger is reached."""

    label = "LangChain context editing"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        middleware = package("langchain.agents.middleware", "langchain")
        edit = middleware.ClearToolUsesEdit(trigger=int(self.budget * HIGH_RATIO), keep=3)
        self.middleware = middleware.ContextEditingMiddleware(edits=[edit], token_counter=self.tokens_of)

    def view(self) -> Messages:
        edited = list(self.state)  # an edit replaces messages in its list, the state keeps the old ones
        for edit in self.middleware.edits:
            edit.apply(edited, count_tokens=self.tokens_of)
        return self._back(edited)


class Summarising(LangChain):
    """LangChain's summarisation: over the trigger, all but the newest messages become a summary."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        middleware = package("langchain.agents.middleware", "langchain")
        self.label = "LangChain summary" if self.ask else "LangChain summary, stand-in"
        trigger, keep = int(self.budget * HIGH_RATIO), int(self.budget * KEPT_RATIO)
        self.middleware = middleware.SummarizationMiddleware(
            self._model(), trigger=("tokens", trigger), keep=("tokens", keep), token_counter=self.tokens_of
        )

    def _model(self) -> Any:
        models = importlib.import_module("langchain_core.language_models.chat_models")
        reducer, limit = self, int(self.budget * SUMMARY_RATIO)

        class Model(models.SimpleChatModel):  # type: ignore[name-defined,misc]
            _llm_type = "benchmark"

            def _call(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> str:
                prompt = str(messages[-1].content)
                reducer.asked_tokens += reducer.count(prompt)
                if reducer.ask is None:
                    return quoted(prompt, limit * 4)
                return reducer.ask([{"role": "user", "content": prompt}], limit)

        return Model()

    def view(self) -> Messages:
        update = self.middleware.before_model({"messages": self.state}, None)
        if update is not None:
            self.state = list(update["messages"][1:])  # the first tells to remove all that was there
        return self._back(self.state)


class Headroom(Reducer):
    """headroom's compress(), as its documentation tells a loop to call it: what was sent before stays frozen.
    (`protect_recent` is 0 here: new messages are the most recent, so its default would never compress any.)"""

    label = "headroom, frozen prefix"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        os.environ.setdefault("HEADROOM_OFFLINE", "1")
        logging.getLogger("headroom").setLevel(logging.ERROR)
        self.compress = package("headroom", "headroom-ai").compress
        self.sent = 0

    def view(self) -> Messages:
        options = {"protect_recent": 0, "frozen_message_count": self.sent}
        self.history = list(self.compress(_plain(self.history), model="gpt-4", **options).messages)
        self.sent = len(self.history)
        return self.history

    def recallable(self, view: Messages) -> str | None:
        store = importlib.import_module("headroom.cache.compression_store").get_compression_store()
        names = re.findall(r"hash[=:]\s*([0-9a-f]{6,})", "\n".join(map(text_of, view)))
        entries = [store.retrieve(name) for name in dict.fromkeys(names)]
        return "\n".join(str(entry.original_content) for entry in entries if entry is not None)


class HeadroomWhole(Headroom):
    """headroom's compress() with its defaults, on the whole history at each turn."""

    label = "headroom, default"

    def view(self) -> Messages:
        return list(self.compress(_plain(self.history), model="gpt-4").messages)


def _plain(messages: Messages) -> Messages:
    return [dict(message) for message in messages]


REDUCERS: dict[str, type[Reducer]] = {
    "whole": Whole,
    "last": LastRounds,
    "window": Window,
    "headtail": HeadTail,
    "clear": ClearToolUses,
    "summary": Summarising,
    "headroom": Headroom,
    "headroom-default": HeadroomWhole,
}
"""By the name that the command line uses. The last is slow and only run when it is named."""
BUDGETLESS = frozenset({"whole", "last", "headroom", "headroom-default"})
"""These do not depend on a budget."""

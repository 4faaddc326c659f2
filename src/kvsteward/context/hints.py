"""What is known of what will be asked, when a message comes: the newest question, and the values that calls used.

Pure. Knows neither distillers nor engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvsteward.context.distill.base import Hints
from kvsteward.context.layout import Arrival, Item, Message, View
from kvsteward.context.memory import argument_values, values
from kvsteward.wire.chat import text_of

_RECENT = 12
"""Messages whose calls are looked at."""


def calls_of(messages: Iterable[Message]) -> dict[str, tuple[str, str]]:
    """Call id -> (tool name, arguments)."""
    return {
        call["id"]: (
            str((call.get("function") or {}).get("name", "")),
            str((call.get("function") or {}).get("arguments", "")),
        )
        for message in messages
        for call in message.get("tool_calls") or ()
    }


def hints_of(item: Item, view: View, arrivals: Sequence[Arrival], calls: Mapping[str, tuple[str, str]]) -> Hints:
    """What is known of what will be asked: the newest question before the item, and values that recent calls used."""
    earlier = [*(i.message for i in view.items), *(a.message for a in arrivals if a.depth < item.depth)]
    question = next((text_of(m) for m in reversed(earlier) if m.get("role") == "user"), "")
    name, arguments = calls.get(str(item.message.get("tool_call_id")), ("", ""))
    mentions = {v for message in earlier[-_RECENT:] for v in argument_values(message)}
    mentions.update(values(question))
    return Hints(question, frozenset(mentions), name, arguments)

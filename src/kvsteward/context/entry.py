"""Long prose on entry, where a policy has the engine choose or write what is shown in place of the distillers.

    trace: {selective: 0.5}      its log-probabilities choose sentences (`context.selective`)
    trace: {prose: engine}       its model writes a shorter text (`context.paraphrase`)

A generator of their questions. Bounded in texts. Invariant: only a tool's text that is over its limit and is nobody's
plan is asked about, and what cannot be had is left to the distillers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsteward.context.ask import Ask, Asked
from kvsteward.context.distill.base import Distillate, Hints
from kvsteward.context.hints import calls_of, hints_of
from kvsteward.context.layout import HASH_CHARS, Arrival, Item, View
from kvsteward.context.marks import Marks, Policy
from kvsteward.context.paraphrase import MAX_TEXTS, paraphrase
from kvsteward.context.plan import PLAN
from kvsteward.context.selective import Score, applies_to, select
from kvsteward.context.tokens import Estimator
from kvsteward.wire.chat import class_of, text_of

FOOTER_TOKENS = 64
"""What the note under a reduced text takes at the most."""
SELECTIVE = "selective"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What takes the place of the distillers' work, by the hash of the message, and what was asked to get there."""

    texts: Mapping[str, Distillate] = field(default_factory=dict)
    asked: tuple[Asked, ...] = ()


def chosen(
    view: View, arrivals: Sequence[Arrival], marks: Marks, policy: Policy, estimator: Estimator
) -> Generator[Ask | Score, Any, Chosen]:
    """What the engine has to say of each new tool result that is long prose. Empty without one of the options."""
    room = marks.tool_limit - FOOTER_TOKENS
    texts: dict[str, Distillate] = {}
    asked: list[Asked] = []
    if policy.selective is not None:
        for arrival, hints in _long_prose(view, arrivals, marks, estimator):
            selected = yield from select(
                text_of(arrival.message),
                question=hints.question,
                mentions=hints.mentions,
                ratio=policy.selective,
                room_tokens=room,
                estimator=estimator,
            )
            if selected is not None:
                texts[arrival.hash] = Distillate(SELECTIVE, selected.text, selected.note)
    elif policy.prose == "engine":
        for arrival, hints in _long_prose(view, arrivals, marks, estimator):
            if len(asked) >= MAX_TEXTS:
                break
            made, told = yield from paraphrase(
                text_of(arrival.message),
                at=arrival.hash,
                hints=hints,
                room_tokens=room,
                context_tokens=marks.budget,
                mark=arrival.hash[:HASH_CHARS],
                estimator=estimator,
            )
            if made is not None:
                texts[arrival.hash] = made
            if told is not None:
                asked.append(told)
    return Chosen(texts, tuple(asked))


def _long_prose(
    view: View, arrivals: Sequence[Arrival], marks: Marks, estimator: Estimator
) -> Iterator[tuple[Arrival, Hints]]:
    calls = calls_of((*(i.message for i in view.items), *(a.message for a in arrivals)))
    for arrival in arrivals:
        text = text_of(arrival.message)
        fit = arrival.message.get("role") == "tool" and class_of(arrival.message) != PLAN
        if fit and estimator.text(text) > marks.tool_limit and applies_to(text):
            item = Item(arrival.hash, arrival.depth, arrival.message, 0, 0)
            yield arrival, hints_of(item, view, arrivals, calls)

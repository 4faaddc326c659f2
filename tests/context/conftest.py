"""A session driven by hand: the pipeline's questions are answered here, as a gateway would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvsteward.context.hygiene import Moved
from kvsteward.context.layout import Item, View
from kvsteward.context.marks import Policy
from kvsteward.context.pipeline import Arrival, Count, Prepared, prepare, summarise, summary_due
from kvsteward.context.summary import Draft
from kvsteward.context.tokens import Estimator
from kvsteward.context.unsure import Classified
from kvsteward.wire.fingerprint import link, root

BYTES_PER_TOKEN = 4


def length(messages: Sequence[Any], tools: Any = None) -> int:
    """An engine's count: a fixed rate, with 6 tokens of role marks for each message."""
    estimator = Estimator(1 / BYTES_PER_TOKEN)
    return estimator.json(tools) + sum(estimator.message(message) + 1 for message in messages)


@dataclass
class Driven:
    """One session. `say` sends messages and returns what the pipeline prepared; `answer` appends the engine's."""

    budget: int
    policy: Policy = field(default_factory=Policy)
    tools: Any = None
    summary: str | None = None
    counts: bool = True
    max_output: int | None = None
    view: View = field(default_factory=View)
    parent: str = field(default_factory=root)
    depth: int = 0
    asked: list[Any] = field(default_factory=list)
    draft: Draft | None = None
    classified: Classified | None = None
    log: list[Any] = field(default_factory=list)

    def say(self, *messages: dict[str, Any], force: bool = False, moved: Sequence[Moved] | None = None) -> Prepared:
        arrivals = []
        for message in messages:
            self.parent, self.depth = link(self.parent, message), self.depth + 1
            arrivals.append(Arrival(self.parent, self.depth, message))
            self.log.append(message)
        questions = prepare(
            self.view,
            arrivals,
            tools=self.tools,
            known_for="model",
            marks=self.policy.marks(self.budget, self.max_output),
            policy=self.policy,
            estimator=Estimator(),
            force=force,
            draft=self.draft,
            classified=self.classified,
            moved=moved,
        )
        reply: Any = None
        while True:
            try:
                question = questions.send(reply)
            except StopIteration as stop:
                prepared: Prepared = stop.value
                self.view = prepared.view
                if prepared.epoch:
                    self.draft = None
                return prepared
            assert isinstance(question, Count)
            self.asked.append(question)
            reply = length(question.messages, self.tools) if self.counts else None

    def answer(self, message: dict[str, Any]) -> None:
        self.parent, self.depth = link(self.parent, message), self.depth + 1
        tokens = Estimator().message(message)
        view = self.view.with_items([Item(self.parent, self.depth, message, tokens, tokens)])
        self.view = view.counted(length(view.render(), self.tools), "model")
        self.log.append(message)
        marks = self.policy.marks(self.budget, self.max_output)
        if (
            self.summary is not None
            and self.draft is None
            and summary_due(self.view, self.view.known_tokens, marks, self.policy)
        ):
            self.prepare_summary()

    def prepare_summary(self) -> None:
        """What a gateway does in the background."""
        marks = self.policy.marks(self.budget, self.max_output)
        questions = summarise(self.view, marks, self.policy, Estimator(), Estimator().json(self.tools), structured=True)
        try:
            self.asked.append(next(questions))
            questions.send((self.summary, True))
        except StopIteration as stop:
            self.draft = stop.value


@pytest.fixture
def session() -> Callable[..., Driven]:
    return Driven


@pytest.fixture
def engine_length() -> Callable[..., int]:
    return length

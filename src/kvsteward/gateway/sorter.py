"""The sorter: has the engine's model say what sentences are that rules are unsure of, while nobody waits.

Asked for after a turn that brings a session near its high-water mark, so that the answer is there when its first
messages leave. The work is of the lowest rank (`asking.Spare`). The next turn takes the answer and writes it into the
log with what it was sent.

Mutable, for one event loop. Invariant: no turn waits for an answer; one that comes too late changes nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from kvsteward.context.ask import Ask, Reply
from kvsteward.context.layout import View
from kvsteward.context.marks import Marks, Policy, compaction_near
from kvsteward.context.unsure import Classified, classify, with_classes
from kvsteward.gateway.asking import Spare
from kvsteward.gateway.fleet import Station
from kvsteward.wire.chat import ChatRequest


class Sorter(Spare[Classified]):
    """The questions of one gateway about sentences."""

    def after_turn(
        self,
        session_id: str,
        at: Station,
        request: ChatRequest,
        view: View,
        marks: Marks,
        policy: Policy,
        cache_fields: Mapping[str, Any],
    ) -> None:
        """A turn has ended with this view. Puts a question if one is due, into the same cache."""
        steward = self._steward
        if policy.plan.unsure != "engine" or session_id in self._tasks:
            return
        if not compaction_near(view, view.known_tokens, marks, policy):
            return
        _, news = with_classes(view, self._kept.get(session_id))
        if news is not None:
            return  # the next turn takes it
        self.forget(session_id)
        questions = classify(view, marks, policy, steward.desk.estimator, structured=steward.asking.structured(at))
        try:
            question = next(questions)
        except StopIteration:
            return
        started = steward.now()

        async def work() -> Classified | None:
            async with at.gate.spare(steward.asking.demand(question)) as has_room:
                if not has_room:
                    return self._told(questions, Reply(None, failed="no room"))
                name = f"{steward.desk.ids.new()}-class"
                reply = await steward.asking.put(at, request, question, name, cache_fields)
            return self._told(questions, reply)

        def failed(why: str) -> Classified | None:
            return self._told(questions, Reply(None, seconds=steward.now() - started, failed=why))

        self._begin(session_id, at, work, failed)

    def before_turn(self, session_id: str) -> Classified | None:
        """What was said of a session's sentences. It stays until a turn has written it down."""
        return self._kept.get(session_id)

    def _count(self, outcome: str) -> None:
        self._steward.telemetry.asks.labels("class", outcome).inc()

    def _told(self, questions: Generator[Ask, Reply, Classified | None], reply: Reply) -> Classified | None:
        """What a reply, or the want of one, says of the sentences."""
        try:
            questions.send(reply)
        except StopIteration as stop:
            found: Classified = stop.value
            self._steward.telemetry.count_asked(found.asked)
            return found if found.items else None
        raise AssertionError("sentences are one question")

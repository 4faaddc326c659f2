"""The sorter: has the engine's model say what sentences are that rules are unsure of, while nobody waits.

Asked for after a turn that brings a session near its high-water mark, so that the answer is there when its first
messages leave. The work is of the lowest rank, as that of the scribe: one question for each session and
`Settings.summaries_at_once` over all, none while a turn waits for room, each ended by a time limit or by a turn that
would have to wait. The next turn takes the answer and writes it into the log with what it was sent.

Mutable, for one event loop. Invariant: no turn waits for an answer; one that comes too late changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvsteward.context.ask import Ask, Reply
from kvsteward.context.layout import View
from kvsteward.context.marks import Marks, Policy, compaction_near
from kvsteward.context.unsure import Classified, classify, with_classes
from kvsteward.errors import KVStewardError
from kvsteward.gateway.fleet import Station
from kvsteward.wire.chat import ChatRequest

if TYPE_CHECKING:
    from kvsteward.gateway.app import Steward

log = logging.getLogger("kvsteward")

_MAX_ANSWERS = 1_024


class Sorter:
    """The questions of one gateway about sentences."""

    def __init__(self, steward: Steward) -> None:
        self._steward = steward
        self._answers: OrderedDict[str, Classified] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        return len(self._tasks)

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
        _, news = with_classes(view, self._answers.get(session_id))
        if news is not None:
            return  # the next turn takes it
        self._answers.pop(session_id, None)
        questions = classify(view, marks, policy, steward.desk.estimator, structured=steward.asking.structured(at))
        try:
            question = next(questions)
        except StopIteration:
            return
        if len(self._tasks) >= steward.settings.summaries_at_once or at.draining or at.gate.pool.waiting:
            steward.telemetry.asks.labels("class", "skipped").inc()
            return

        async def work() -> None:
            reply = await self._reply(session_id, at, request, question, cache_fields)
            try:
                questions.send(reply)
            except StopIteration as stop:
                self._keep(session_id, stop.value)

        task = self._tasks[session_id] = asyncio.create_task(work())
        task.add_done_callback(lambda _: self._tasks.pop(session_id, None))

    def before_turn(self, session_id: str) -> Classified | None:
        """What was said of a session's sentences. It stays until a turn has written it down."""
        return self._answers.get(session_id)

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        self._answers.pop(session_id, None)
        task = self._tasks.get(session_id)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, session_id: str, found: Classified) -> None:
        self._steward.telemetry.count_asked(found.asked)
        if found.items:
            self._answers[session_id] = found
            while len(self._answers) > _MAX_ANSWERS:
                self._answers.popitem(last=False)

    async def _reply(
        self, session_id: str, at: Station, request: ChatRequest, question: Ask, cache_fields: Mapping[str, Any]
    ) -> Reply:
        """The engine's reply, or why there is none. A failure costs nothing but the answer."""
        steward = self._steward
        started = steward.now()
        try:
            async with (
                asyncio.timeout(steward.settings.summary_timeout_s),
                at.gate.spare(steward.asking.demand(question)) as has_room,
            ):
                if not has_room:
                    return Reply(None, failed="no room")
                name = f"{steward.desk.ids.new()}-class"
                return await steward.asking.put(at, request, question, name, cache_fields)
        except asyncio.CancelledError:
            steward.telemetry.asks.labels("class", "given_up").inc()
            raise
        except (KVStewardError, TimeoutError) as error:
            log.info("no classes for %s: %r", session_id, error)
            return Reply(None, seconds=steward.now() - started, failed=str(error) or "no answer in time")

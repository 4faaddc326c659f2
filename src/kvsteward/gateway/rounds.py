"""One answer in several rounds, for a turn in which the model may look things up (`recall`).

Knows nothing of what is found. Invariant: the client sees one answer, without our tool and its calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvsteward.context.pipeline import Prepared
from kvsteward.context.recall import TOOL_NAME
from kvsteward.engines.base import EngineRequest
from kvsteward.gateway import recall
from kvsteward.gateway.answer import AnswerLog, completed, passed_on
from kvsteward.gateway.relay import Exchange
from kvsteward.gateway.upstream import check_accepted, check_ended, for_engine, veiled_events
from kvsteward.wire.chat import encode
from kvsteward.wire.veil import Veil

if TYPE_CHECKING:
    from kvsteward.gateway.app import Steward
    from kvsteward.gateway.turn import Turn


async def recalled(steward: Steward, exchange: Exchange, turn: Turn, first: EngineRequest, log: AnswerLog) -> None:
    """One answer in several rounds: as long as the model calls our tool alone, it is answered and goes on. The last
    round has no such tool. The client sees one answer."""
    session_id, prepared, veil = log.resolved.session.id, log.prepared, Veil(TOOL_NAME)
    room, more = recall.room_tokens(prepared), list[Mapping[str, Any]]()
    for left in range(steward.settings.recall_rounds, -1, -1):
        veil.begin(more=left > 0)
        request = replace(first, body=round_body(steward, turn, prepared, more, left)) if more else first
        async with turn.at.engine.open(request) as reply:
            await check_accepted(reply)
            if turn.state == "waiting":
                turn.step("streaming")
            async for events in veiled_events(reply, veil, log.reader):
                await passed_on(steward, exchange, turn, log, events)
            check_ended(veil.round)
        calls = [{**call, "id": call["id"] or f"recall_{len(more)}_{n}"} for n, call in enumerate(veil.end())]
        if not calls:
            break
        answers = await recall.answer_calls(steward, turn, session_id, log.resolved.head, prepared, calls, room)
        room -= sum(steward.desk.estimator.message(message) for message in answers)
        more += [{**(veil.round.message() or {}), "tool_calls": calls}, *answers]
    usage, start = veil.last_event(), veil.first_prompt()
    if usage:
        log.reader.feed(usage)
        await passed_on(steward, exchange, turn, log, usage)
    if start and more:
        said = steward.desk.estimator.message(log.reader.message() or {})
        log.view_usage = replace(start, output_tokens=said)
    await completed(exchange, turn, log)


def round_body(steward: Steward, turn: Turn, prepared: Prepared, more: Sequence[Mapping[str, Any]], left: int) -> bytes:
    """The view and the rounds so far. What they take is no longer free for the answer."""
    request = turn.request if left else recall.withdrawn(turn.request)
    used = sum(steward.desk.estimator.message(message) for message in more)
    room = max(16, prepared.marks.budget - prepared.tokens - used)
    output = min(request.max_output_tokens or room, room)
    messages = for_engine(turn.at.info, [*prepared.view.render(), *more])
    return encode(request, messages=messages, stream=True, max_tokens=output, fields=turn.fields)

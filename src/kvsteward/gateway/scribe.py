"""The scribe: has the engine write a session's summary while nobody waits, so that no turn does at its compaction.

After a turn that brings a session near its high-water mark, the question is appended to what the engine has just
cached. The work is of the lowest rank (`asking.Spare`), and on an engine with slots it is given up for the session's
next turn, which wants the slot that has its cache.

Mutable, for one event loop. Invariant: a draft is handed out once, and only for the view that it was made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsteward.context.layout import View
from kvsteward.context.marks import Marks, Policy
from kvsteward.context.pipeline import Summarise, fits, summarise, summary_due
from kvsteward.context.summary import Draft
from kvsteward.engines.base import EngineRequest, Keep
from kvsteward.gateway.asking import SLOTTED, Spare, format_of, heard, said
from kvsteward.gateway.fleet import Station
from kvsteward.gateway.upstream import PATH, for_engine
from kvsteward.policy.admission import Demand
from kvsteward.wire.chat import ChatRequest, encode

_SHAPING = frozenset(
    {
        *("messages", "n", "stop", "seed", "stream_options", "max_tokens", "max_completion_tokens", "logprobs"),
        *("top_logprobs", "response_format", "grammar", "json_schema", "guided_json", "guided_regex"),
        *("structured_outputs", "parallel_tool_calls", "metadata", "store", "kv_transfer_params"),
    }
)
"""Fields of a request that shape its answer, not its prompt."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What a draft is made from."""

    session_id: str
    at: Station
    request: ChatRequest
    view: View
    marks: Marks
    policy: Policy
    keep: Keep | None
    """What the engine was told of the session; a draft must not make it forget that."""
    cache_fields: Mapping[str, Any]
    """Those of the turn: the same cache."""


class Scribe(Spare[Draft]):
    """The drafts of one gateway."""

    def after_turn(
        self,
        session_id: str,
        at: Station,
        request: ChatRequest,
        view: View,
        marks: Marks,
        policy: Policy,
        keep: Keep | None = None,
        cache_fields: Mapping[str, Any] | None = None,
    ) -> None:
        """A turn has ended, and the engine has counted its `view`. Starts a draft if one is due."""
        draft = self._kept.get(session_id)
        if session_id in self._tasks or (draft is not None and fits(draft, view)):
            return
        if summary_due(view, view.known_tokens, marks, policy):
            work = _Work(session_id, at, request, view, marks, policy, keep, cache_fields or {})
            self._begin(session_id, at, lambda: self._drafted(work), lambda _: self._ended(None))

    async def before_turn(self, session_id: str, at: Station) -> Draft | None:
        """The draft for a session whose next turn begins. It stays until the view that it was made for is gone."""
        if at.info.dialect in SLOTTED:
            await self._give_up(session_id)
        return self._kept.get(session_id)

    def _count(self, outcome: str) -> None:
        self._steward.telemetry.summaries.labels(outcome).inc()

    def _ended(self, draft: Draft | None) -> Draft | None:
        self._count("prepared" if draft else "failed")
        return draft

    async def _drafted(self, work: _Work) -> Draft | None:
        steward = self._steward
        structured = steward.asking.structured(work.at)
        tools_tokens = steward.desk.estimator.json(work.request.tools)
        questions = summarise(
            *(work.view, work.marks, work.policy, steward.desk.estimator, tools_tokens),
            structured=structured,
        )
        try:
            question = next(questions)
            questions.send(await self._answer(work, question))
        except StopIteration as stop:
            return self._ended(stop.value)
        raise AssertionError("a summary is one question")

    async def _answer(self, work: _Work, question: Summarise) -> tuple[str, bool] | None:
        """The engine's words, and whether they came to their end. None without room, for an error or for a call."""
        steward = self._steward
        messages = for_engine(work.at.info, question.messages)
        base = _base(work.request, question)
        hints = work.at.engine.hint_fields(work.keep, base.body) if work.keep is not None else {}
        fields = {**hints, **work.cache_fields}
        body = encode(base, messages=messages, stream=True, max_tokens=question.max_tokens, fields=fields)
        demand = Demand(work.view.known_tokens + question.max_tokens, question.max_tokens, returning=True)
        request = EngineRequest(PATH, body, f"{steward.desk.ids.new()}-summary", work.session_id)
        async with work.at.gate.spare(demand) as has_room:
            if not has_room:
                return None
            status, reader = await heard(work.at.engine, request)
        if reader is None:
            if question.schema is not None:
                steward.asking.schema_refused(work.at, status)
            return None
        text, _ = said(reader)
        return None if text is None else (text, reader.finish != "length")


def _base(request: ChatRequest, question: Summarise) -> ChatRequest:
    """The request's own fields, so that the engine finds the same prefix; without those that shape an answer."""
    body: dict[str, Any] = {k: v for k, v in request.body.items() if k not in _SHAPING}
    if body.get("tool_choice") not in {None, "auto", "none"}:
        del body["tool_choice"]  # a call would be forced
    body["temperature"] = 0
    if question.schema is not None:
        body["response_format"] = format_of("summary", question.schema)
    return ChatRequest(body, (), request.model, True, True)

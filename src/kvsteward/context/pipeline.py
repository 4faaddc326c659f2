"""The pipeline of one turn: reduce what is new, once; compact if the high-water mark is reached; else only append.

`prepare` is a generator. Where it needs the engine it yields a question and is sent the answer, so that it knows no
sockets and can be driven by a gateway, a simulator or a test:

    questions = prepare(...)
    question = next(questions)
    while True: question = questions.send(answer)      # until StopIteration carries the Prepared

Invariant: between compactions the rendered view of a turn is a prefix of the rendered view of the next.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import orjson

from kvsteward.context.ask import Ask, Asked
from kvsteward.context.block import SUMMARY_SHARE, checked
from kvsteward.context.compact import compact, droppable_tokens
from kvsteward.context.distill.base import Distillate, Hints
from kvsteward.context.distill.layout import laid_out
from kvsteward.context.distill.registry import distil
from kvsteward.context.entry import SELECTIVE, chosen
from kvsteward.context.hints import calls_of, hints_of
from kvsteward.context.hygiene import Moved, note_of
from kvsteward.context.images import hashes
from kvsteward.context.layout import (
    ACKNOWLEDGEMENT,
    HASH_CHARS,
    Arrival,
    Epoch,
    Item,
    Message,
    Verdict,
    View,
    note_holder,
)
from kvsteward.context.marks import Marks, Policy, compaction_near
from kvsteward.context.paraphrase import KIND as PARAPHRASE
from kvsteward.context.plan import PLAN, PlanRules, Room, kept_words, plan_of, raised
from kvsteward.context.selective import Score
from kvsteward.context.summary import SCHEMA, Checked, Draft, ask
from kvsteward.context.tokens import Estimator
from kvsteward.context.unsure import Classified, by_rules_alone, unasked, with_classes
from kvsteward.errors import ContextOverflowError
from kvsteward.wire.chat import class_of

_DOUBT = 0.25
"""How far an estimate of new tokens may be off before the engine is asked."""
_WORD_FOR_WORD = "[kvsteward: and word for word]"
_LEAST_SUMMARY_TOKENS = 48
_LAY_OUT_TOKENS, _LAY_OUT_RATIO = 120, 0.85
"""JSON from this length on is laid out as lines and tables, if it is not longer than this share of it then."""
_LAID_OUT = "\n[kvsteward: JSON as lines and tables, nothing left out; as it came: {hash}]"
_WORTH_RATIO = 0.10
"""A compaction that would free less than this share of the budget is not made while the prompt still fits."""


@dataclass(frozen=True, slots=True)
class Count:
    """Question: how long is this prompt exactly? Answer: int, or None if the engine cannot say."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Summarise:
    """Question: the engine's answer to these messages. They extend the view that is cached. `schema`: what the answer
    is held to, where the engine can do that. Answer: (text, whether it came to its end), or None."""

    messages: Sequence[Message]
    max_tokens: int
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Reduction:
    """What was made shorter, why, and by how much."""

    hash: str
    kind: str
    why: str
    tokens_before: int
    tokens_after: int
    text: str = ""
    selective: bool = False
    """The engine's log-probabilities chose what is kept."""
    written: bool = False
    """The engine's model wrote what is shown."""


@dataclass(frozen=True, slots=True)
class Note:
    """What is shown after the message `hash` of what left the system prompt, and all that left it. `text` may be
    empty: then nothing of it is to be shown."""

    hash: str
    text: str
    moved: tuple[Moved, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """The view of this turn. `tokens` is its length, the engine's count if `exact`. `epoch` is set if this turn
    compacted."""

    view: View
    tokens: int
    exact: bool
    reductions: tuple[Reduction, ...] = ()
    epoch: Epoch | None = None
    note: Note | None = None
    asked: tuple[Asked, ...] = ()
    """What the engine's model was asked on entry, and what became of it."""
    classified: Classified | None = None
    """What its model said of sentences since the last turn."""
    unsorted: int = 0
    """Sentences that rules were unsure of and that left before the model was asked: the rules' word counts."""
    marks: Marks = field(kw_only=True)


def prepare(
    view: View,
    arrivals: Sequence[Arrival],
    *,
    tools: Any,
    known_for: str,
    marks: Marks,
    policy: Policy,
    estimator: Estimator,
    force: bool = False,
    moved: Sequence[Moved] | None = None,
    draft: Draft | None = None,
    classified: Classified | None = None,
) -> Generator[Count | Score | Ask, Any, Prepared]:
    """The view with `arrivals` in it. `force` compacts in any case: the engine refused what the estimate allowed.
    `moved` is what hygiene took out of this request's system prompt; None where the request has none. `draft` is the
    summary that was prepared for the next compaction (`summarise`), `classified` what was asked about sentences since
    the last turn (`unsure.classify`). Raises ContextOverflowError if it cannot be made to fit."""
    prior, classified = with_classes(view.for_tools(known_for), classified)
    tools_tokens = estimator.json(tools)
    limits = marks if policy.reduce else marks.unlimited()
    engines = yield from chosen(prior, arrivals, limits, policy, estimator)
    items, reductions = admit(prior, arrivals, limits, estimator, policy.plan, engines.texts)
    items, note = _noted(prior, items, moved, estimator)
    view = prior.with_items(items)
    view = view if note is None else replace(view, moved=note.moved)
    tokens, exact = view.estimate_tokens(tools_tokens), False
    doubt = int((view.unknown_tokens() if view.known_tokens else tokens) * _DOUBT)
    if force or tokens + doubt > marks.high:
        counted = yield Count(view.render())
        if counted is not None:
            tokens, exact = counted, True
            view = view.counted(counted, known_for)
        else:
            tokens += doubt
    if not policy.compact and (force or tokens > marks.hard):
        raise _no_window(tokens, marks)
    if not policy.compact or (not force and not _must_compact(view, tokens, marks)):
        if tokens > marks.hard:
            raise _overflow(tokens, marks)
        return Prepared(
            view, tokens, exact, tuple(reductions), note=note, asked=engines.asked, classified=classified, marks=marks
        )
    view, note = _noted_again(view, note, estimator)
    held = checked(draft, view) if draft is not None and fits(draft, prior) else None
    fixed = (tokens, reductions, tools_tokens, known_for, marks)
    try:
        prepared = yield from _compacted(held, view, *fixed, policy, estimator)
    except ContextOverflowError:
        if policy.plan.unsure != "engine":
            raise
        plain, rules = by_rules_alone(view, policy.plan)
        prepared = yield from _compacted(held, plain, *fixed, replace(policy, plan=rules), estimator)
    left = unasked(view, prepared.view.epoch.through, marks, policy.plan)
    return replace(prepared, note=note, asked=engines.asked, classified=classified, unsorted=left)


def _noted(
    prior: View, items: list[Item], moved: Sequence[Moved] | None, estimator: Estimator
) -> tuple[list[Item], Note | None]:
    """New items, the newest with a note of what changed in the system prompt since the last one."""
    holder = note_holder(items)
    if moved is None or tuple(moved) == prior.moved or holder is None:
        return items, None
    text = note_of(moved, prior.moved)
    return _with_note(items, holder, text, estimator), Note(items[holder].hash, text, tuple(moved))


def _noted_again(view: View, note: Note | None, estimator: Estimator) -> tuple[View, Note | None]:
    """Before a compaction: the newest item gets all that is to be noted, since the items that had it may leave."""
    text, holder = note_of(view.moved), note_holder(view.items)
    if not text or holder is None:
        return view, note
    items = _with_note(view.items, holder, text, estimator)
    return replace(view, items=tuple(items)), Note(items[holder].hash, text, view.moved)


def _with_note(items: Sequence[Item], holder: int, text: str, estimator: Estimator) -> list[Item]:
    found = list(items)
    more = estimator.text(text) if text else 0
    less = estimator.text(found[holder].note) if found[holder].note else 0
    found[holder] = replace(found[holder], note=text, tokens=found[holder].tokens + more - less)
    return found


def _must_compact(view: View, tokens: int, marks: Marks) -> bool:
    if tokens <= marks.high:
        return False
    return tokens > marks.hard or droppable_tokens(view, marks) >= marks.budget * _WORTH_RATIO


def _compacted(
    draft: Checked | None,
    view: View,
    tokens: int,
    reductions: list[Reduction],
    tools_tokens: int,
    known_for: str,
    marks: Marks,
    policy: Policy,
    estimator: Estimator,
) -> Generator[Count, Any, Prepared]:
    """One compaction. The estimate is corrected by the engine's count; a second, stricter pass is the last."""
    shorten = _shortener(view, marks, estimator, policy.plan)
    factor = view.estimate_tokens(tools_tokens) if not view.known_tokens else _estimated(view, tools_tokens)
    correction = min(1.0, factor / tokens) if tokens else 1.0
    for strictness in (1.0, 0.7):
        after = compact(
            view,
            marks.scaled(correction * strictness),
            draft,
            policy.keep_rounds,
            estimator,
            tools_tokens,
            shorten,
            policy.plan,
            policy.keep,
        )
        counted = yield Count(after.render())
        length = counted if counted is not None else int(after.estimate_tokens(tools_tokens) / correction)
        if length <= marks.high:
            break
    if length > marks.hard:
        raise _overflow(length, marks)
    if counted is not None:
        after = after.counted(counted, known_for)
    if policy.summary == "engine" and after.epoch.judged is None:
        after = replace(after, epoch=replace(after.epoch, judged=Verdict("late", "none was ready")))
    reductions.append(Reduction(after.head, "compact", "high-water mark", tokens, length, after.epoch.block))
    return Prepared(after, length, counted is not None, tuple(reductions), after.epoch, marks=marks)


def _estimated(view: View, tools_tokens: int) -> int:
    """The whole view by the estimate alone, to compare with the engine's count."""
    return tools_tokens + view.message_tokens


def _overflow(tokens: int, marks: Marks) -> ContextOverflowError:
    return ContextOverflowError(
        f"the prompt has {tokens} tokens and nothing more can be condensed; "
        f"the budget of {marks.budget} tokens leaves {marks.hard} for a prompt"
    )


def _no_window(tokens: int, marks: Marks) -> ContextOverflowError:
    return ContextOverflowError(
        f"the conversation has {tokens} tokens, the budget of {marks.budget} leaves {marks.hard} for a prompt, and "
        f"this policy condenses nothing",
        hint="Begin a new session, give this one a larger budget, or use a policy that may condense.",
    )


def summary_due(view: View, tokens: int, marks: Marks, policy: Policy) -> bool:
    """Whether the summary for the next compaction is to be asked for, after a turn that left `tokens` in the view. What
    the next rounds bring stays verbatim at the compaction, so that a summary of all before them, asked now, covers
    what will leave."""
    return policy.summary == "engine" and compaction_near(view, tokens, marks, policy)


def summarise(
    view: View, marks: Marks, policy: Policy, estimator: Estimator, tools_tokens: int, *, structured: bool
) -> Generator[Summarise, Any, Draft | None]:
    """The engine's summary of a view, asked by appending to what it has cached. None if there is nothing to summarise,
    no room to ask, or no answer. The newest answer is left out: it stays verbatim at the compaction, a client may
    replace it by another, and where it is a call, no template wants a question between the call and its result."""
    items = list(view.items)
    while items and items[-1].role == "assistant":
        items.pop()
    if policy.summary != "engine" or len(items) < 2:
        return None
    room = max(64, int(marks.block * SUMMARY_SHARE))
    since = bool(view.epoch.block)
    question: list[Message] = [
        {"role": "assistant", "content": ACKNOWLEDGEMENT},  # many templates want roles to alternate
        {"role": "user", "content": ask(room // (3 if since else 2), structured=structured, since=since)},
    ]
    cost = sum(estimator.message(message) for message in question)
    limit = room + room // 2 if structured else room  # JSON's own marks take some
    limit = min(limit, marks.budget - view.estimate_tokens(tools_tokens) - cost)
    if limit < _LEAST_SUMMARY_TOKENS:
        return None
    shown = replace(view, items=tuple(items)).render()
    answer = yield Summarise([*shown, *question], limit, SCHEMA if structured else None)
    if answer is None:
        return None
    text, finished = answer
    return Draft(view.epoch.through, items[-1].depth, items[-1].hash, text, finished)


def fits(draft: Draft, view: View) -> bool:
    """Whether a draft speaks of this view: no compaction since, and what it covers is still part of the history."""
    return draft.epoch == view.epoch.through and any(item.hash == draft.at for item in view.items)


def admit(
    view: View,
    arrivals: Sequence[Arrival],
    marks: Marks,
    estimator: Estimator,
    rules: PlanRules | None = None,
    given: Mapping[str, Distillate] | None = None,
) -> tuple[list[Item], list[Reduction]]:
    """Turns new messages into items, each reduced once if it is over its limit. Its Plan stays word for word.
    `given`: what takes the place of the distillers' work."""
    rules = PlanRules() if rules is None else rules
    spoken = view.epoch.spoken or any(item.role == "user" for item in view.items)
    items: list[Item] = []
    reductions: list[Reduction] = []
    calls = calls_of((*(i.message for i in view.items), *(a.message for a in arrivals)))
    seen = {name for item in (*view.pinned, *view.items) for name in item.images if name}
    for arrival in arrivals:
        made = (given or {}).get(arrival.hash)
        item, reduction = _admit(arrival, view, arrivals, calls, marks, estimator, rules, made, first=not spoken)
        spoken = spoken or item.role == "user"
        if item.images:
            item = view.epoch.recounted(item, seen, estimator)
        items.append(item)
        if reduction:
            reductions.append(reduction)
    return items, reductions


def _admit(
    arrival: Arrival,
    view: View,
    arrivals: Sequence[Arrival],
    calls: Mapping[str, tuple[str, str]],
    marks: Marks,
    estimator: Estimator,
    rules: PlanRules,
    given: Distillate | None,
    *,
    first: bool,
) -> tuple[Item, Reduction | None]:
    before = estimator.message(arrival.message)
    item = Item(arrival.hash, arrival.depth, arrival.message, before, before, hashes(arrival.message))
    role = item.role
    limit = marks.tool_limit if role == "tool" else marks.text_limit
    text_tokens = estimator.text(item.text)
    if role in {"system", "developer"} or class_of(arrival.message) == PLAN:
        return item, None
    if text_tokens <= limit:
        return _laid_out(item, text_tokens, limit, estimator) if role == "tool" else (item, None)
    plan = plan_of(arrival.message, first=first, room=Room.of(marks.budget), rules=rules)
    hints = hints_of(item, view, arrivals, calls)
    text = _distilled(item, limit, hints, estimator, [text for _, text in plan], given)
    if text is None:
        return item, None
    reduced = item.shortened(text, estimator)
    why = f"{role} message over {limit} tokens" + (f"; {given.note}" if given else "")
    by = (given.kind == SELECTIVE, given.kind == PARAPHRASE) if given else (False, False)
    return reduced, Reduction(arrival.hash, "distil", why, before, reduced.tokens, text, *by)


def _laid_out(item: Item, tokens: int, limit: int, estimator: Estimator) -> tuple[Item, Reduction | None]:
    """A tool result within its limit: JSON in one line is shown as lines and tables where that saves enough."""
    whole = item.text if limit and tokens >= _LAY_OUT_TOKENS and class_of(item.message) is None else ""
    text = laid_out(whole) if whole else None
    if text is None:
        return item, None
    text += _LAID_OUT.format(hash=item.hash[:HASH_CHARS])
    if estimator.text(text) > _LAY_OUT_RATIO * tokens:
        return item, None
    shown = item.shortened(text, estimator)
    return shown, Reduction(item.hash, "distil", "JSON in one line, nothing left out", item.tokens, shown.tokens, text)


def _distilled(
    item: Item,
    limit: int,
    hints: Hints,
    estimator: Estimator,
    plan: Sequence[str] = (),
    given: Distillate | None = None,
) -> str | None:
    """The reduced text with its note, or None if it would not be shorter. `plan` stands in it word for word; `given`
    takes the place of what the distillers would make."""
    limit -= sum(estimator.text(text) + 1 for text in plan)
    footer = "\n[kvsteward: {kind}, {before} tokens reduced; {note}; whole text: {hash}]"
    room = limit - estimator.text(footer) - 16
    result = given or distil(item.text, max(32, room), hints, estimator.text)
    missing = kept_words(result.text, plan)
    text = "\n".join([result.text, *([_WORD_FOR_WORD, *missing] if missing else ())]) + footer.format(
        kind=result.kind, before=estimator.text(item.text), note=result.note, hash=item.hash[:HASH_CHARS]
    )
    return text if estimator.text(text) < estimator.text(item.text) else None


def _shortener(view: View, marks: Marks, estimator: Estimator, rules: PlanRules) -> Any:
    calls = calls_of(i.message for i in view.items)
    opening = None if view.epoch.spoken else next((i.hash for i in view.items if i.role == "user"), None)

    def shorten(item: Item, tokens: int) -> str | None:
        if estimator.text(item.text) <= tokens:
            return None
        room = Room.of(marks.budget)
        plan = [*plan_of(item.said, first=item.hash == opening, room=room, rules=rules), *raised(item, room, rules)]
        return _distilled(item, tokens, hints_of(item, view, (), calls), estimator, [text for _, text in plan])

    return shorten


def encode_epoch(epoch: Epoch) -> bytes:
    """An epoch as a decision's payload."""
    return orjson.dumps(epoch)


def decode_epoch(payload: bytes) -> Epoch:
    return msgspec.json.decode(payload, type=Epoch)

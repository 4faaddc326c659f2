"""Compaction: one big step from the high-water mark down to the low-water mark.

System messages stay byte for byte, and so does the Plan of what is condensed (`context.plan`). The last rounds stay
verbatim. All between is condensed into one block: the Plan, what the user asked for, a rolling summary, and for each
message that left a line with its hash and the values that later turns may need. Calls and their results are never
split. The steps are a ladder that ends: fewer rounds, then shorter texts in the rounds that stay, then a refusal that
says what is too long.

Pure. Invariant: the view that comes out is not over `marks.hard` by the estimate, or ContextOverflowError is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import orjson

from kvsteward.context.images import stale
from kvsteward.context.layout import (
    ACKNOWLEDGEMENT,
    HASH_CHARS,
    Epoch,
    Fact,
    Item,
    PlanItem,
    Stub,
    Verdict,
    View,
    cuts,
)
from kvsteward.context.marks import Marks
from kvsteward.context.memory import collect, firm, stands_in, values
from kvsteward.context.plan import PLAN, TRACE, PlanRules, Room, after, carried
from kvsteward.context.summary import Draft, verify
from kvsteward.context.tokens import Estimator
from kvsteward.errors import ContextOverflowError
from kvsteward.wire.chat import PINNED_ROLES, class_of, image_marks

Shorten = Callable[[Item, int], str | None]
"""Shortens an item's text to about so many tokens; None if it cannot."""

MAX_FACTS, MAX_STUBS, MAX_REQUESTS = 1_000, 400, 200
_HEADER = "[kvsteward] Earlier messages are condensed here. Nothing is lost: each hash names a full message."
"""What stands first is the same after each compaction: the engine has it cached, and the Plan that follows."""
_REQUEST_SHARE, _EXTRACT_SHARE, _MIN_BLOCK_TOKENS = 0.3, 0.15, 160
SUMMARY_SHARE = 0.3
"""Of the condensed block, for a summary that the engine writes; the extractive one has less to say."""
_REQUEST_CHARS, _LABEL_CHARS = 600, 48
_PLAN_HEADERS = {
    "system": "From the system prompt, word for word:",
    "developer": "From the developer, word for word:",
    "user": "From the user, word for word:",
    "assistant": "From the assistant (plan, to-do list, promises), word for word:",
    "tool": "From tools (data), word for word:",
}
_LEFT = "Of the {dropped} messages that left (hash, what it was, values in it):"
_SLACK_TOKENS = 16
_VALUE_TOKENS = 2
"""What a value costs beside its text."""
_MAX_MISSES = 20
"""Facts that do not fit any more before the others are not tried."""


def droppable_tokens(view: View, marks: Marks) -> int:
    """What a compaction could take out: everything before the last place where a view may begin."""
    options = cuts(view.items)
    last = options[-1] if options else 0
    return sum(item.tokens for item in view.items[:last])


def compact(
    view: View,
    marks: Marks,
    draft: Draft | None,
    keep_rounds: int,
    estimator: Estimator,
    tools_tokens: int,
    shorten: Shorten,
    rules: PlanRules | None = None,
    keep: Sequence[str] = (),
) -> View:
    """The view of the next epoch. `draft` is the engine's summary; where there is none, or it is not fit to be shown,
    an extractive one takes its place. Raises ContextOverflowError where even the last step of the ladder does not get
    under `marks.hard`. `keep` are patterns of values that stay."""
    rules = PlanRules() if rules is None else rules
    room_for_rules = Room.of(marks.budget)  # `scaled` leaves the budget as it is
    base = tools_tokens + sum(item.tokens for item in view.pinned) + estimator.text(ACKNOWLEDGEMENT) + 10
    everything = after(view.epoch.plan, view.items, spoken=view.epoch.spoken, room=room_for_rules, rules=rules)
    most = sum(estimator.text(item.text) for item in everything)
    start = _cut(view.items, marks.low - base - most - _MIN_BLOCK_TOKENS, keep_rounds)
    dropped, kept = view.items[:start], view.items[start:]
    standing = carried(everything, kept)
    plan_text = _plan_text(standing)
    plan_tokens = estimator.text(plan_text) if plan_text else 0
    fixed = base + plan_tokens
    if plan_tokens and fixed > marks.hard:
        raise _plan_overflow(plan_tokens, len(standing), base, marks)
    images = Epoch(
        hidden_images=stale([(item.message, item.images) for item in kept]),
        hidden_through=kept[-1].depth if kept else 0,
    )
    kept = _recounted(kept, images, estimator)
    kept, overrides = _squeeze(kept, marks.low - fixed - _MIN_BLOCK_TOKENS, estimator, shorten)
    kept = _recounted(kept, images, estimator)
    kept_tokens = sum(item.tokens for item in kept)
    room = min(
        marks.block,
        max(_MIN_BLOCK_TOKENS, marks.low - fixed - kept_tokens),
        marks.hard - fixed - kept_tokens - _SLACK_TOKENS,
    )
    still = {h: t for h, t in view.epoch.overrides.items() if any(item.hash == h for item in kept)}
    epoch = _condense(view, dropped, kept, draft, room, estimator, standing, keep)
    spoken = view.epoch.spoken
    epoch = replace(
        epoch,
        plan=after(view.epoch.plan, dropped, spoken=spoken, room=room_for_rules, rules=rules),
        spoken=spoken or any(item.role == "user" for item in dropped),
        overrides={**still, **overrides},
        hidden_images=images.hidden_images,
        hidden_through=images.hidden_through,
    )
    made = View(view.pinned, epoch, kept, known_for=view.known_for, moved=view.moved, tools=view.tools)
    total = made.estimate_tokens(tools_tokens)
    if total > marks.hard:
        raise ContextOverflowError(
            f"the conversation does not fit: {base} tokens of system prompt and tools, {plan_tokens} of plan, "
            f"{kept_tokens} in the newest messages and {epoch.block_tokens - plan_tokens} condensed are over the "
            f"{marks.hard} that the budget of {marks.budget} leaves for a prompt"
        )
    return made


def _plan_text(plan: Sequence[PlanItem]) -> str:
    """The Plan, each text under the name of who said it: nothing becomes an order of somebody else."""
    lines: list[str] = []
    for role, header in _PLAN_HEADERS.items():
        said = [item.text for item in plan if item.role == role or (role == "tool" and item.role not in _PLAN_HEADERS)]
        lines += [header, *said] if said else []
    return "\n".join(lines)


def _plan_overflow(tokens: int, count: int, base: int, marks: Marks) -> ContextOverflowError:
    return ContextOverflowError(
        f"the plan does not fit: {count} texts that stay word for word have {tokens} tokens, system prompt and tools "
        f"{base}; the budget of {marks.budget} tokens leaves {marks.hard} for a prompt",
        hint="Mark fewer messages as plan, narrow the policy's plan patterns, or give the session a larger budget.",
    )


def _recounted(kept: Sequence[Item], epoch: Epoch, estimator: Estimator) -> tuple[Item, ...]:
    """Items with images or notes, counted as the new epoch shows them."""
    seen: set[str] = set()
    return tuple(epoch.recounted(item, seen, estimator) if item.images or item.note else item for item in kept)


def _cut(items: Sequence[Item], room_tokens: int, keep_rounds: int) -> int:
    """Where the verbatim part begins: as early as `keep_rounds` and the room allow, at the last place at the latest."""
    options = cuts(items) or [0]
    for index in options:
        rounds = sum(item.role == "assistant" for item in items[index:])
        if rounds <= keep_rounds and sum(item.tokens for item in items[index:]) <= room_tokens:
            return index
    return options[-1]


def _squeeze(
    kept: Sequence[Item], room_tokens: int, estimator: Estimator, shorten: Shorten
) -> tuple[tuple[Item, ...], dict[str, str]]:
    """Shortens the longest texts of what stays until it fits, tool results before others, never a system message or
    what the caller marked as plan. Does not promise to."""
    items = list(kept)
    overrides: dict[str, str] = {}
    order = sorted(range(len(items)), key=lambda i: (_worth(items[i]), -items[i].tokens))
    for index in order:
        excess = sum(item.tokens for item in items) - max(room_tokens, 0)
        if excess <= 0:
            break
        item = items[index]
        if item.role in PINNED_ROLES or class_of(item.message) == PLAN:
            continue
        text = shorten(item, max(48, item.tokens - excess))
        if text is not None:
            items[index] = item.shortened(text, estimator)
            overrides[item.hash] = text
    return tuple(items), overrides


def _worth(item: Item) -> int:
    """Trace is shortened first, then tool results, then the rest."""
    given = class_of(item.message)
    return 0 if given == TRACE else 1 if item.role == "tool" and given is None else 2


def _condense(
    view: View,
    dropped: Sequence[Item],
    kept: Sequence[Item],
    draft: Draft | None,
    room: int,
    estimator: Estimator,
    plan: Sequence[PlanItem] = (),
    keep: Sequence[str] = (),
) -> Epoch:
    """The block and the state that the next compaction starts from. `plan` takes its own room."""
    plan_text = _plan_text(plan)
    planned = {item.text for item in plan}
    before = view.epoch
    labels = _labels((*dropped, *kept))
    requests = (*before.requests, *((i.depth, _said(i)) for i in dropped if i.role in {"user", "system", "developer"}))
    requests = requests[:1] + requests[1:][-MAX_REQUESTS:]
    wanted = {fact.value: fact for fact in firm(dropped, before.facts, keep)}
    others = (fact for fact in collect(dropped, before.facts, kept) if fact.value not in wanted)
    found = [*wanted.values(), *others]
    facts = found[:MAX_FACTS]
    stubs = (*before.stubs, *(_stub(item, labels) for item in dropped if item.role != "user"))[-MAX_STUBS:]
    total = before.dropped + len(dropped)
    through = dropped[-1].depth if dropped else before.through
    head = [_HEADER]
    plain = [(depth, said) for depth, said in requests if said.strip() not in planned]
    asked = _request_lines(plain, int(room * _REQUEST_SHARE), estimator)
    if asked:
        head += ["Asked so far, oldest first:", *asked]
    shown = "\n".join([plan_text, *head])
    written, judged = _written(view, dropped, draft, found, plan, shown, room, estimator)
    if written:
        head += ["Summary:", written]
    text = "\n".join(head)
    shown_elsewhere = "\n".join(
        [text, plan_text, *(i.text for i in (*view.pinned, *kept)), *(_arguments(i) for i in kept)]
    )
    listed = _LEFT.format(dropped=total)
    left = room - estimator.text(text) - estimator.text(listed)
    lines = _value_lines(facts, stubs, shown_elsewhere, left, estimator)
    block = "\n".join([text, listed, *lines]) if lines else text
    if estimator.text(block) > room + _SLACK_TOKENS:
        block = head[0]  # so little room is left that only the note fits; the log has the rest
    if plan_text:
        first, newline, rest = block.partition("\n")
        block = f"{first}\n{plan_text}{newline}{rest}"
    return Epoch(
        through=through,
        block=block,
        block_tokens=estimator.text(block) + 5,
        summary=written,
        requests=requests,
        facts=tuple(facts),
        stubs=stubs,
        dropped=total,
        judged=judged,
    )


def _written(
    view: View,
    dropped: Sequence[Item],
    draft: Draft | None,
    found: Sequence[Fact],
    plan: Sequence[PlanItem],
    shown: str,
    room: int,
    estimator: Estimator,
) -> tuple[str, Verdict | None]:
    """The summary that the block shows: the engine's if it stands the test, with lines for what came after it was
    asked; else the extractive one. `found`: all facts, the first `MAX_FACTS` of which are kept in the table; `room`:
    the whole block's."""
    extract_room, room = int(room * _EXTRACT_SHARE), int(room * SUMMARY_SHARE)
    if draft is None:
        return _extract(view.epoch.summary, dropped, extract_room, estimator), None
    sources = [view.epoch.block, *(f"{i.text}\n{_arguments(i)}" for i in (*view.pinned, *view.items))]
    left = {item.hash for item in dropped}
    judged = verify(
        draft.answer,
        finished=draft.finished,
        sources="\n".join(sources),
        plan=[item.text for item in plan],
        shown=shown,
        facts={f.value: f"- {f.source[:HASH_CHARS]}: {f.value}" for f in found if f.source in left},
        table={f.value for f in found[:MAX_FACTS]},
        room_tokens=room,
        estimator=estimator,
    )
    if judged.outcome == "replaced":
        return _extract(view.epoch.summary, dropped, extract_room, estimator), judged
    later = [item for item in dropped if item.depth > draft.through]
    rest = _extract("", later, max(32, room - estimator.text(judged.text)), estimator).splitlines() if later else []
    said = set(judged.text.splitlines())
    return "\n".join([judged.text, *(line for line in rest if line not in said)]), replace(judged, text="")


def _said(item: Item) -> str:
    """The text of a message, and where it had images, their hashes."""
    return "\n".join([item.text, *image_marks(item.message)]) if item.images else item.text


def _labels(items: Iterable[Item]) -> dict[str, str]:
    """What each call id was: the tool's name and the beginning of its arguments."""
    labels: dict[str, str] = {}
    for item in items:
        for call in item.message.get("tool_calls") or ():
            function = call.get("function") or {}
            brief = _brief(str(function.get("arguments") or ""))
            brief = brief if len(brief) <= _LABEL_CHARS else brief[: _LABEL_CHARS - 3] + "..."
            labels[call["id"]] = f"{function.get('name', 'call')} {brief}".strip()
    return labels


def _brief(arguments: str) -> str:
    """Arguments without JSON's marks; where there is one, its value alone: the tool's name says what it is."""
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        given = None
    if isinstance(given, dict):
        told = {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in given.items()}
        arguments = next(iter(told.values())) if len(told) == 1 else ", ".join(f"{k}={v}" for k, v in told.items())
    return " ".join(arguments.split())


def _stub(item: Item, labels: Mapping[str, str]) -> Stub:
    label = labels.get(str(item.message.get("tool_call_id")), "result") if item.role == "tool" else item.role
    return Stub(item.hash, item.depth, label, item.log_tokens)


def _arguments(item: Item) -> str:
    calls = item.message.get("tool_calls")
    return orjson.dumps(calls).decode() if calls else ""


def _request_lines(requests: Sequence[tuple[int, str]], room: int, estimator: Estimator) -> list[str]:
    """The goal first, then the newest that fit. A long request is cut in the middle; the log has it whole."""
    lines = [f"- {_middle_cut(' '.join(text.split()), _REQUEST_CHARS)}" for _, text in requests if text.strip()]
    if not lines:
        return []
    first, rest = lines[0], lines[1:]
    room -= estimator.text(first)
    chosen: list[str] = []
    for line in reversed(rest):
        room -= estimator.text(line)
        if room < 0:
            break
        chosen.append(line)
    left_out = len(rest) - len(chosen)
    return [first, *([f"- ({left_out} more in the log)"] if left_out else []), *reversed(chosen)]


def _middle_cut(text: str, chars: int) -> str:
    if len(text) <= chars:
        return text
    return f"{text[: chars * 2 // 3]} … {text[-chars // 3 :]}"


def _extract(earlier: str, dropped: Sequence[Item], room: int, estimator: Estimator) -> str:
    """The extractive summary: the first sentence of what the assistant said, each once. If not all fit, those with
    values are kept first, the newest of them."""
    lines = [line for line in earlier.splitlines() if line.strip()]
    for item in dropped:
        if item.role == "assistant" and (first := _first_sentence(item.text)):
            lines.append(f"- {_middle_cut(first, 160)}")
    lines = list(dict.fromkeys(reversed(lines)))  # newest first, what was said again only once
    chosen: set[str] = set()
    for line in sorted(lines, key=lambda line: not values(line)):
        cost = estimator.text(line)
        if cost > room and not chosen:
            short = _middle_cut(line, len(line) * room // cost)
            lines[lines.index(line)], line = short, short
        elif cost > room:
            break
        room -= cost
        chosen.add(line)
    return "\n".join(line for line in reversed(lines) if line in chosen)


def _first_sentence(text: str) -> str:
    """The first line that says something: of three words at least, and no mark-up."""
    for line in text.splitlines():
        if len(line.split()) >= 3 and line.lstrip()[0] not in "<`{[":
            return line.strip()
    return ""


def _value_lines(
    facts: Sequence[Fact], stubs: Sequence[Stub], shown_elsewhere: str, room: int, estimator: Estimator
) -> list[str]:
    """One line for each message that left, with its values: those worth most for a token until the room is used, then
    the newest messages without values."""
    by_hash = {stub.hash: stub for stub in stubs}
    chosen: dict[str, list[str]] = {}
    misses = 0
    for fact in sorted(facts, key=lambda f: -f.score / (_VALUE_TOKENS + estimator.text(f.value))):
        if stands_in(fact.value, shown_elsewhere):
            continue
        head = _line_head(fact.source, by_hash.get(fact.source))
        in_label = stands_in(fact.value, head)  # a call's arguments stand in the label of its result
        cost = (0 if in_label else estimator.text(f", {fact.value}")) + (
            0 if fact.source in chosen else estimator.text(head)
        )
        if cost > room:
            misses += 1
            if misses > _MAX_MISSES:
                break
            continue
        room -= cost
        line = chosen.setdefault(fact.source, [])
        if not in_label:
            line.append(fact.value)
    for stub in reversed(stubs):
        if stub.hash in chosen or stub.label == "assistant":
            continue
        room -= estimator.text(_line_head(stub.hash, stub))
        if room < 0:
            break
        chosen[stub.hash] = []
    depth = {fact.source: fact.depth for fact in facts} | {stub.hash: stub.depth for stub in stubs}
    order = sorted(chosen, key=lambda h: depth[h])
    return [_line_head(h, by_hash.get(h)) + ", ".join(chosen[h]) for h in order]


def _line_head(source: str, stub: Stub | None) -> str:
    return f"- {source[:HASH_CHARS]} {stub.label if stub else 'message'}: "

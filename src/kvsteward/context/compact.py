"""Compaction: one big step from the high-water mark down to the low-water mark.

System messages stay byte for byte, and so does the Plan of what is condensed (`context.plan`). The last rounds stay
verbatim. All between is condensed into one block: the Plan, what the user asked for, a rolling summary, and for each
message that left a line with its hash and the values that later turns may need. Calls and their results are never
split. The steps are a ladder that ends: fewer rounds, then shorter texts in the rounds that stay, then a refusal that
says what is too long.

Pure. Invariant: the view that comes out is not over `marks.hard` by the estimate, or ContextOverflowError is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvsteward.context.block import MIN_BLOCK_TOKENS, SLACK_TOKENS, Leaving, condense, plan_text
from kvsteward.context.images import stale
from kvsteward.context.layout import ACKNOWLEDGEMENT, Epoch, Item, View, cuts
from kvsteward.context.marks import Marks
from kvsteward.context.plan import PLAN, TRACE, PlanRules, Room, after, carried
from kvsteward.context.summary import Checked
from kvsteward.context.tokens import Estimator
from kvsteward.errors import ContextOverflowError
from kvsteward.wire.chat import PINNED_ROLES, class_of

Shorten = Callable[[Item, int], str | None]
"""Shortens an item's text to about so many tokens; None if it cannot."""


def droppable_tokens(view: View, marks: Marks) -> int:
    """What a compaction could take out: everything before the last place where a view may begin."""
    options = cuts(view.items)
    last = options[-1] if options else 0
    return sum(item.tokens for item in view.items[:last])


def compact(
    view: View,
    marks: Marks,
    draft: Checked | None,
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
    start = _cut(view.items, marks.low - base - most - MIN_BLOCK_TOKENS, keep_rounds)
    dropped, kept = view.items[:start], view.items[start:]
    standing = carried(everything, kept)
    planned = plan_text(standing)
    plan_tokens = estimator.text(planned) if planned else 0
    fixed = base + plan_tokens
    if plan_tokens and fixed > marks.hard:
        raise _plan_overflow(plan_tokens, len(standing), base, marks)
    images = Epoch(
        hidden_images=stale([(item.message, item.images) for item in kept]),
        hidden_through=kept[-1].depth if kept else 0,
    )
    kept = _recounted(kept, images, estimator)
    kept, overrides = _squeeze(kept, marks.low - fixed - MIN_BLOCK_TOKENS, estimator, shorten)
    kept = _recounted(kept, images, estimator)
    kept_tokens = sum(item.tokens for item in kept)
    limit = marks.hard - fixed - kept_tokens - SLACK_TOKENS
    room = min(marks.block, max(MIN_BLOCK_TOKENS, marks.low - fixed - kept_tokens), limit)
    still = {h: t for h, t in view.epoch.overrides.items() if any(item.hash == h for item in kept)}
    epoch = condense(Leaving(view, dropped, kept, everything, standing, draft, keep), room, limit, estimator)
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

"""The condensed block: one text that stands for all messages that left a view.

It grows by sections. A compaction leaves what the one before wrote byte for byte, so that an engine which has it cached
does not prefill it again, and appends a section for what left since: texts that are new in the Plan, which of the older
ones are outdated, requests, a summary, and a line for each message with its hash and the values in it. Where there is
no room for a section, or the values in view would be worth less than those of a block that is written anew, it is; it
is shorter than its room then, so that a section will fit (docs/marks.md).

Pure. It does not know which messages leave, nor how long a view may be. Invariants: the Plan stands in the block word
for word; a block that was appended to begins with the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvsteward.context.layout import HASH_CHARS, Epoch, Fact, Item, PlanItem, Stub, Verdict, View
from kvsteward.context.lines import (
    arguments_of,
    extract,
    labels_of,
    middle_cut,
    request_lines,
    said_by,
    stub_of,
    value_lines,
)
from kvsteward.context.memory import collect, firm, stands_in
from kvsteward.context.plan import outdated
from kvsteward.context.summary import Checked, Draft, verify
from kvsteward.context.tokens import Estimator

MAX_FACTS, MAX_STUBS, MAX_REQUESTS = 1_000, 400, 200
MIN_BLOCK_TOKENS, SLACK_TOKENS = 160, 16
_MIN_SECTION_TOKENS = 80
SUMMARY_SHARE = 0.3
"""Of the condensed block, for a summary that the engine writes; the extractive one has less to say."""
_REQUEST_SHARE, _EXTRACT_SHARE, _LATER_SUMMARY_SHARE = 0.3, 0.15, 0.4
_ANEW_SHARE = 0.8
"""Of its room, what a block takes that is written anew. The rest is for sections."""
_GROWN_SHARE = 1.1
"""Of its room, how long a block may become by sections."""
_SECTION_SHARES = (0.2, 0.35)
"""Of the block's room, the least that a section is appended for, and the most that it takes."""
_HEADER = "[kvsteward] Earlier messages are condensed here. Nothing is lost: each hash names a full message."
"""What stands first is the same after each compaction: the engine has it cached, and the Plan that follows."""
_LATER = "[kvsteward] Condensed later:"
_PLAN_HEADERS = {
    "system": "From the system prompt, word for word:",
    "developer": "From the developer, word for word:",
    "user": "From the user, word for word:",
    "assistant": "From the assistant (plan, to-do list, promises), word for word:",
    "tool": "From tools (data), word for word:",
}
_OUTDATED, _OUTDATED_CHARS = "No longer valid, done or replaced by a newer one:", 80
_LEFT = "Of the {dropped} messages that left (hash, what it was, values in it):"
_LEFT_LATER = "Of the {dropped} messages that left since:"


@dataclass(frozen=True, slots=True)
class Leaving:
    """What a compaction condenses: `dropped` leaves `view`, `kept` stays. `plan` is all of the Plan, `standing` what of
    it no kept message says; `keep` are patterns of values that stay."""

    view: View
    dropped: Sequence[Item]
    kept: Sequence[Item]
    plan: Sequence[PlanItem]
    standing: Sequence[PlanItem]
    draft: Checked | None
    keep: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Known:
    """What there is to show. `found` are all facts, `facts` those that are kept. `former`: the block that this is
    appended to, which has shown all up to the depth `through`; empty where it is written anew."""

    requests: tuple[tuple[int, str], ...]
    found: Sequence[Fact]
    stubs: tuple[Stub, ...]
    dropped: int
    former: str = ""
    through: int = 0

    @property
    def facts(self) -> tuple[Fact, ...]:
        return tuple(self.found[:MAX_FACTS])


@dataclass(frozen=True, slots=True)
class _Written:
    text: str
    summary: str
    judged: Verdict | None


def stages(room: float) -> tuple[tuple[float, float], ...]:
    """What becomes of a block in `room` from one rewriting to the next, if nothing interferes: after each compaction
    its length, and how much of it was written then. Without the Plan; all in tokens."""
    length = room * _ANEW_SHARE if room * _SECTION_SHARES[0] >= _MIN_SECTION_TOKENS else room
    found = [(length, length)]
    least, longest = (max(_MIN_SECTION_TOKENS, room * share) for share in _SECTION_SHARES)
    while (left := room * _GROWN_SHARE - length) >= least:
        written = min(left, longest)
        length += written
        found.append((length, written))
    return tuple(found)


def checked(draft: Draft, view: View) -> Checked:
    """A draft to be held against all that its view shows."""
    shown = (f"{item.text}\n{arguments_of(item)}" for item in (*view.pinned, *view.items))
    return Checked(draft, "\n".join([view.epoch.block, *shown]))


def plan_text(plan: Sequence[PlanItem]) -> str:
    """The Plan, each text under the name of who said it: nothing becomes an order of somebody else."""
    lines: list[str] = []
    for role, header in _PLAN_HEADERS.items():
        said = [item.text for item in plan if item.role == role or (role == "tool" and item.role not in _PLAN_HEADERS)]
        lines += [header, *said] if said else []
    return "\n".join(lines)


def condense(leaving: Leaving, room: int, most: int, estimator: Estimator) -> Epoch:
    """The block and the state that the next compaction starts from. `room` and `most` are tokens of the block without
    the Plan, which takes its own: what it should and what it can take."""
    before, dropped, kept = leaving.view.epoch, leaving.dropped, leaving.kept
    labels = labels_of((*dropped, *kept))
    requests = (
        *before.requests,
        *((i.depth, said_by(i)) for i in dropped if i.role in {"user", "system", "developer"}),
    )
    wanted = {fact.value: fact for fact in firm(dropped, before.facts, leaving.keep)}
    others = (fact for fact in collect(dropped, before.facts, kept) if fact.value not in wanted)
    known = _Known(
        requests=requests[:1] + requests[1:][-MAX_REQUESTS:],
        found=[*wanted.values(), *others],
        stubs=(*before.stubs, *(stub_of(item, labels) for item in dropped if item.role != "user"))[-MAX_STUBS:],
        dropped=before.dropped + len(dropped),
    )
    grown = _appended(leaving, known, room, min(most, int(room * _GROWN_SHARE)), estimator)
    made = _anew(leaving, known, room, estimator)
    if grown and _worth(grown.text, known.facts) >= _worth(made.text, known.facts):
        made = grown
    return Epoch(
        through=dropped[-1].depth if dropped else before.through,
        block=made.text,
        block_tokens=estimator.text(made.text) + 5,
        summary=made.summary,
        requests=known.requests,
        facts=known.facts,
        stubs=known.stubs,
        dropped=known.dropped,
        judged=made.judged,
        sections=before.sections + 1 if made is grown else 0,
    )


def _worth(text: str, facts: Sequence[Fact]) -> float:
    """Of the values that a block says: the sum of their scores."""
    return sum(fact.score for fact in facts if stands_in(fact.value, text))


def _anew(leaving: Leaving, known: _Known, room: int, estimator: Estimator) -> _Written:
    length = int(stages(room)[0][0])
    return _section(leaving, known, [_HEADER], plan_text(leaving.standing), length, estimator)


def _appended(leaving: Leaving, known: _Known, room: int, most: int, estimator: Estimator) -> _Written | None:
    """The block of before with one more section, or None if there is no room for it."""
    before = leaving.view.epoch
    if not before.block or not leaving.dropped:
        return None
    told = set(before.block.splitlines())
    # a line that says "outdated" is not repeated, unless what it is about is valid again: a history may be edited
    planned = plan_text(
        [
            item
            for item in leaving.standing
            if item.depth > before.through or item.text not in before.block or _outdated_line(item) in told
        ]
    )
    gone = outdated(before.plan, leaving.plan, (*leaving.dropped, *leaving.kept))
    struck = [_outdated_line(item) for item in gone if item.text in before.block]
    struck = [line for line in struck if line not in told]
    left = (
        most
        + estimator.text(plan_text(leaving.standing))
        - estimator.text(before.block)
        - (estimator.text(planned) if planned else 0)
    )
    least, longest = (max(_MIN_SECTION_TOKENS, int(room * share)) for share in _SECTION_SHARES)
    if left < least:
        return None
    known = replace(known, former=before.block, through=before.through, dropped=len(leaving.dropped))
    head = [_LATER, *([_OUTDATED, *struck] if struck else [])]
    section = _section(leaving, known, head, planned, min(left, longest), estimator)
    if struck and struck[-1] not in section.text:
        return None
    summary = "\n".join(part for part in (before.summary, section.summary) if part)
    return replace(section, text=f"{before.block}\n{section.text}", summary=summary)


def _outdated_line(item: PlanItem) -> str:
    return f"* {middle_cut(' '.join(item.text.split()), _OUTDATED_CHARS)}"


def _section(
    leaving: Leaving, known: _Known, head: Sequence[str], planned: str, room: int, estimator: Estimator
) -> _Written:
    """One section in about `room` tokens without `planned`, the part of the Plan that stands after its first line."""
    lines = list(head)
    told = {item.text for item in leaving.standing}
    plain = [said for depth, said in known.requests if depth > known.through and said.strip() not in told]
    asked = request_lines(plain, int(room * _REQUEST_SHARE), estimator)
    if asked:
        lines += ["Asked since:" if known.former else "Asked so far, oldest first:", *asked]
    shown = "\n".join([known.former, planned, *lines])
    summary, judged = _summary(leaving, known, shown, room, estimator)
    if summary:
        lines += ["Since then:" if known.former else "Summary:", summary]
    text = "\n".join(lines)
    others = (*leaving.view.pinned, *leaving.kept)
    elsewhere = [known.former, planned, text, *(i.text for i in others), *(arguments_of(i) for i in leaving.kept)]
    listed = (_LEFT_LATER if known.former else _LEFT).format(dropped=known.dropped)
    left = room - estimator.text(text) - estimator.text(listed)
    listing = value_lines(known.facts, known.stubs, "\n".join(elsewhere), left, estimator, known.former)
    text = "\n".join([text, listed, *listing]) if listing else text
    if estimator.text(text) > room + SLACK_TOKENS:
        text = head[0]  # so little room is left that only the note fits; the log has the rest
    if planned:
        first, newline, rest = text.partition("\n")
        text = f"{first}\n{planned}{newline}{rest}"
    return _Written(text, summary, judged)


def _summary(
    leaving: Leaving, known: _Known, shown: str, room: int, estimator: Estimator
) -> tuple[str, Verdict | None]:
    """The summary that a section shows: the engine's if it stands the test, with lines for what came after it was
    asked; else the extractive one. A block that is written anew goes on from the summary of before. `room`: all of the
    section's."""
    dropped, draft = leaving.dropped, leaving.draft
    earlier = "" if known.former else leaving.view.epoch.summary
    extract_room = int(room * _EXTRACT_SHARE)
    room = int(room * (_LATER_SUMMARY_SHARE if known.former else SUMMARY_SHARE))
    if draft is None:
        return extract(earlier, dropped, extract_room, estimator, shown), None
    left = {item.hash for item in dropped}
    judged = verify(
        draft,
        plan=[item.text for item in leaving.standing],
        shown=shown,
        facts={f.value: f"- {f.source[:HASH_CHARS]}: {f.value}" for f in known.found if f.source in left},
        table={f.value for f in known.facts},
        room_tokens=room,
        estimator=estimator,
        earlier=earlier,
    )
    if judged.outcome == "replaced":
        return extract(earlier, dropped, extract_room, estimator, shown), judged
    later = [item for item in dropped if item.depth > draft.draft.through]
    spare = room - estimator.text(judged.text)
    rest = extract("", later, max(32, spare), estimator).splitlines() if later else []
    said = set(judged.text.splitlines())
    return "\n".join([judged.text, *(line for line in rest if line not in said)]), replace(judged, text="")

"""The lines of a condensed block: what the user asked, an extractive summary, and one for each message that left.

Pure, bounded by the room that is given in tokens. It does not know what stands before or after the lines, but for the
text that it is told is shown already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set

import orjson

from kvsteward.context.layout import HASH_CHARS, Fact, Item, Stub
from kvsteward.context.memory import stands_in, values
from kvsteward.context.plan import is_list_item, without_lists
from kvsteward.context.tokens import Estimator
from kvsteward.wire.chat import image_marks

_REQUEST_CHARS, _LABEL_CHARS = 600, 48
_VALUE_TOKENS = 2
"""What a value costs beside its text."""
_MAX_MISSES = 20
"""Facts that do not fit any more before the others are not tried."""
_LINE_HEAD = re.compile(rf"^- ([0-9a-f]{{{HASH_CHARS}}})[ :]", re.M)


def said_by(item: Item) -> str:
    """The text of a message, and where it had images, their hashes."""
    return "\n".join([item.text, *image_marks(item.message)]) if item.images else item.text


def labels_of(items: Iterable[Item]) -> dict[str, str]:
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


def stub_of(item: Item, labels: Mapping[str, str]) -> Stub:
    """The line that stands for a message."""
    label = labels.get(str(item.message.get("tool_call_id")), "result") if item.role == "tool" else item.role
    return Stub(item.hash, item.depth, label, item.log_tokens)


def arguments_of(item: Item) -> str:
    """Its calls as text."""
    calls = item.message.get("tool_calls")
    return orjson.dumps(calls).decode() if calls else ""


def request_lines(requests: Sequence[str], room: int, estimator: Estimator) -> list[str]:
    """The first, then the newest that fit. A long request is cut in the middle; the log has it whole."""
    lines = [f"- {middle_cut(' '.join(text.split()), _REQUEST_CHARS)}" for text in requests if text.strip()]
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


def middle_cut(text: str, chars: int) -> str:
    """The head and the tail of a text that is too long."""
    if len(text) <= chars:
        return text
    return f"{text[: chars * 2 // 3]} … {text[-chars // 3 :]}"


def extract(earlier: str, dropped: Sequence[Item], room: int, estimator: Estimator, shown: str = "") -> str:
    """The extractive summary: the first sentence of what the assistant said, each once and none that is `shown`. If not
    all fit, those with values are kept first, the newest of them. Checklists are left to the Plan, which has the newest
    as a whole: a line of an old one would read as if it still held."""
    lines = [line for line in earlier.splitlines() if line.strip() and not _is_listed(line)]
    for item in dropped:
        if item.role == "assistant" and (first := _first_sentence(without_lists(item.text))):
            lines.append(f"- {middle_cut(first, 160)}")
    told = set(shown.splitlines())
    lines = [line for line in dict.fromkeys(reversed(lines)) if line not in told]  # newest first, each once
    chosen: set[str] = set()
    for line in sorted(lines, key=lambda line: not values(line)):
        cost = estimator.text(line)
        if cost > room and not chosen:
            short = middle_cut(line, len(line) * room // cost)
            lines[lines.index(line)], line = short, short
        elif cost > room:
            break
        room -= cost
        chosen.add(line)
    return "\n".join(line for line in reversed(lines) if line in chosen)


def _is_listed(line: str) -> bool:
    return is_list_item(line) or is_list_item(line.removeprefix("- "))


def _first_sentence(text: str) -> str:
    """The first line that says something: of three words at least, and no mark-up."""
    for line in text.splitlines():
        if len(line.split()) >= 3 and line.lstrip()[0] not in "<`{[":
            return line.strip()
    return ""


def value_lines(
    facts: Sequence[Fact], stubs: Sequence[Stub], shown: str, room: int, estimator: Estimator, former: str = ""
) -> list[str]:
    """One line for each message that left, with its values: those worth most for a token until the room is used, then
    the newest messages without values. `shown`: where a value need not stand again; `former`: the block before it. A
    message that has a line there is named by its hash alone."""
    by_hash: dict[str, Stub | None] = {stub.hash: stub for stub in stubs}
    named = set(_LINE_HEAD.findall(former))
    chosen: dict[str, list[str]] = {}
    misses = 0
    for fact in sorted(facts, key=lambda f: -f.score / (_VALUE_TOKENS + estimator.text(f.value))):
        if stands_in(fact.value, shown):
            continue
        head = _line_head(fact.source, by_hash.get(fact.source), named)
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
        if stub.hash in chosen or stub.label == "assistant" or stub.hash[:HASH_CHARS] in named:
            continue
        room -= estimator.text(_line_head(stub.hash, stub, named))
        if room < 0:
            break
        chosen[stub.hash] = []
    depth = {fact.source: fact.depth for fact in facts} | {stub.hash: stub.depth for stub in stubs}
    order = sorted(chosen, key=lambda h: depth[h])
    return [_line_head(h, by_hash.get(h), named) + ", ".join(chosen[h]) for h in order]


def _line_head(source: str, stub: Stub | None, named: Set[str]) -> str:
    short = source[:HASH_CHARS]
    return f"- {short}: " if short in named else f"- {short} {stub.label if stub else 'message'}: "

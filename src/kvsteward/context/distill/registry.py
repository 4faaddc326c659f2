"""The ordered list of distillers and the one door to them.

Invariants of `distil`: pure and deterministic; never more tokens than it was given; at most the limit; never empty
for a text that is not blank; the first distiller that understands the text and stays within the limit wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.blobs import Blobs
from kvsteward.context.distill.code import Code
from kvsteward.context.distill.delimited import Delimited
from kvsteward.context.distill.diffs import Diffs
from kvsteward.context.distill.html import Html
from kvsteward.context.distill.json_data import JsonData, JsonLines
from kvsteward.context.distill.lines import Lines
from kvsteward.context.distill.listings import Hits, Listings
from kvsteward.context.distill.logs import Logs
from kvsteward.context.distill.markdown import Markdown
from kvsteward.context.distill.prose import Prose
from kvsteward.context.distill.traces import Traces
from kvsteward.context.distill.window import windowed

_TRIES = 4
_HUGE_CHARS = 1_000_000
_FULL_ENOUGH = 0.88


def distillers() -> tuple[Distiller, ...]:
    """All kinds, most particular first."""
    return (
        JsonLines(),
        JsonData(),
        Html(),
        Diffs(),
        Blobs(),
        Traces(),
        Hits(),
        Listings(),
        Delimited(),
        Logs(),
        Code(),
        Markdown(),
        Prose(),
        Lines(),
    )


def distil(
    text: str,
    limit_tokens: int,
    hints: Hints,
    count: CountTokens,
    kinds: Sequence[Distiller] | None = None,
) -> Distillate:
    """At most `limit_tokens` tokens of the text, or the text itself if it is within the limit already."""
    given = count(text)
    if given <= limit_tokens or not text.strip():
        return Distillate("whole", text, "nothing")
    bounded, unread = windowed(text, hints)
    for kind in distillers() if kinds is None else kinds:
        source = text if kind.kind in ("json", "html") else bounded
        if kind.matches(source):
            found = _fitted(kind, source, limit_tokens, hints, count)
            if found is not None:
                note = f"{found.note}; {unread}" if unread and source is bounded else found.note
                return replace(found, note=note)
    return _cut(text, min(limit_tokens, given), count)


def encodable(text: str) -> str:
    """The text without lone surrogates: an escape such as \\ud83d alone is no character, and a body with it cannot be
    sent. Two that belong together become the character that they mean. Never longer in bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _fitted(kind: Distiller, text: str, limit: int, hints: Hints, count: CountTokens) -> Distillate | None:
    """The best of a few tries: the distiller works with estimates, so its limit is moved until the count fits."""
    best: Distillate | None = None
    best_tokens = 0
    low, high, aim = 0.0, float("inf"), float(limit)
    for _ in range(_TRIES):
        found = kind.distil(text, max(1, int(aim)), hints, count)
        if found is None:
            return best
        found = replace(found, text=encodable(found.text))
        tokens = count(found.text)
        if tokens <= limit:
            if found.text.strip() and tokens > best_tokens:
                best, best_tokens = found, tokens
            if tokens >= _FULL_ENOUGH * limit or len(text) >= _HUGE_CHARS:
                break
            low = aim
        else:
            high = aim
        aim = min(aim * limit / max(1, tokens) * 0.98, 0.5 * (aim + high) if high < float("inf") else aim * 3)
        if aim <= low * 1.02:
            break
    return best


def _cut(text: str, limit: int, count: CountTokens) -> Distillate:
    """Head and tail by characters: the last resort, for any text and any counter."""
    chars = min(len(text), limit * 8)
    while chars > 2:
        head, tail = text[: chars * 2 // 3], text[len(text) - chars // 3 :]
        shown = f"{head.rstrip()} … {tail.lstrip()}"
        if count(shown) <= limit:
            return Distillate("cut", shown, f"{len(text) - len(head) - len(tail)} of {len(text)} chars")
        chars = int(chars * 0.7)
    return Distillate("cut", text.strip()[:1], f"{len(text) - 1} of {len(text)} chars")

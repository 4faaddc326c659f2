"""Markdown: headings, links, tables, code fences and list heads before running text.

It does not render. Invariant: lines or sentences stay whole, in order.
"""

from __future__ import annotations

import re

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.lines import squeezed
from kvsteward.context.distill.meter import calibrated
from kvsteward.context.distill.pack import Unit, pack
from kvsteward.context.distill.prose import sentences
from kvsteward.context.distill.salience import focus_of

_HEADING = re.compile(r"^#{1,6} \S", re.MULTILINE)
_MARK = re.compile(r"^(?:#{1,6} |[-*] |\d+\. |\|.*\||```|> )|\]\(", re.MULTILINE)
_LONG_LINE_CHARS = 240


class Markdown(Distiller):
    """A document with Markdown headings."""

    kind = "markdown"

    def matches(self, text: str) -> bool:
        sample = text[:20_000]
        return len(_HEADING.findall(sample)) >= 2 and len(_MARK.findall(sample)) * 400 > len(sample)

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        units: list[Unit] = []
        for line in squeezed(text.split("\n")):
            parts = sentences(line) if len(line) > _LONG_LINE_CHARS else [line.rstrip()]
            units += [Unit(part, _prior(part)) for part in parts]
        packed = pack(units, limit_tokens, focus_of(hints), calibrated(text, count), "lines")
        return Distillate(self.kind, packed.text, f"{packed.total - packed.kept} of {packed.total} lines")


def _prior(line: str) -> float:
    if line.startswith("#"):
        return 2.4 - 0.3 * min(6, len(line) - len(line.lstrip("#")))
    return 0.4 if "](" in line or line.startswith("|") else 0.0

"""Long prose, extracted: the sentences with names, numbers and asked words, in their order.

It does not rewrite a sentence. Invariant: linear; a sentence is kept whole or left out.
"""

from __future__ import annotations

import re

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.meter import calibrated
from kvsteward.context.distill.pack import Unit, pack
from kvsteward.context.distill.salience import focus_of

_END = re.compile(r"(?<=[.!?;])\s+|\n\s*\n|\n(?=[-*#•])")
_CAPITALISED = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+")
_MAX_SENTENCE_CHARS = 400
_SAMPLE_CHARS = 20_000
_MEAN_LINE_CHARS = 45


def sentences(text: str) -> list[str]:
    """Sentences of a text with their space folded; a very long one is cut at spaces."""
    found: list[str] = []
    for part in _END.split(text):
        folded = " ".join(part.split())
        while len(folded) > _MAX_SENTENCE_CHARS:
            at = folded.rfind(" ", 0, _MAX_SENTENCE_CHARS)
            at = at if at > _MAX_SENTENCE_CHARS // 2 else _MAX_SENTENCE_CHARS
            found.append(folded[:at])
            folded = folded[at:].lstrip()
        if folded:
            found.append(folded)
    return found


class Prose(Distiller):
    """Running text: long lines or wrapped paragraphs with sentence ends."""

    kind = "prose"

    def matches(self, text: str) -> bool:
        sample = text[:_SAMPLE_CHARS]
        letters = sum(map(str.isalpha, sample)) + sample.count(" ")
        ends = len(re.findall(r"[a-z\"'’)][.!?][\s\"'’]", sample))
        lines = [line for line in sample.split("\n") if line.strip()]
        plain = sum(1 for line in lines if line[:1].isalpha() or line[:1] in "\"'“‘(")
        if sum(map(len, lines)) < _MEAN_LINE_CHARS * len(lines) or plain * 10 < 7 * len(lines):
            return False
        return letters > 0.88 * len(sample) and ends * 400 > len(sample)

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        units = [Unit(s, 0.25 * min(4, len(_CAPITALISED.findall(s)))) for s in sentences(text)]
        packed = pack(units, limit_tokens, focus_of(hints), calibrated(text, count), "sentences", " ")
        return Distillate(self.kind, packed.text, f"{packed.total - packed.kept} of {packed.total} sentences")

"""What a piece of text costs in tokens, cheaply: an estimate that is scaled to the caller's own counter.

It does not know any tokenizer. Invariant: linear in the text, and the caller's counter is asked only about
bounded samples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsteward.context.distill.base import CountTokens

_PIECE = re.compile(r" ?[A-Za-z]{1,7}|\d| ?[^\sA-Za-z\d]{1,2}|\s+")
_SAMPLE_CHARS = 3_000


def pieces(text: str) -> int:
    """The number of word parts, digits, signs and gaps: close to a BPE tokenizer that splits digits."""
    return len(_PIECE.findall(text))


@dataclass(frozen=True, slots=True)
class Meter:
    """Estimated tokens of short texts. `scale` = tokens of a sample of the text / pieces of that sample."""

    scale: float = 1.0

    def tokens(self, text: str) -> float:
        """Estimated tokens."""
        return len(_PIECE.findall(text)) * self.scale


def calibrated(text: str, count: CountTokens) -> Meter:
    """A meter for texts like this one: three samples (head, middle, tail) are counted for real."""
    if len(text) <= 3 * _SAMPLE_CHARS:
        sample = text
    else:
        middle = len(text) // 2
        sample = text[:_SAMPLE_CHARS] + text[middle : middle + _SAMPLE_CHARS] + text[-_SAMPLE_CHARS:]
    estimate = pieces(sample)
    if not estimate:
        return Meter()
    return Meter(min(4.0, max(0.25, count(sample) / estimate)))

"""A text as the passages that are embedded: models of embeddings read some hundred tokens, messages may have thousands.

Pure. Invariants: a passage has at most `PASSAGE_TOKENS` by the estimate and is not blank; a text has at most
`MAX_PASSAGES`; the same text gives the same passages, whatever an engine has counted since.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvsteward.context.tokens import Estimator

PASSAGE_TOKENS = 240
"""Fits the 256 tokens that the smallest models in use read."""
MIN_TOKENS = 4
"""A shorter text ("ok", "done") has no meaning of its own, and a model puts it near to everything. Words find it."""
MAX_PASSAGES = 64
_TAIL = MAX_PASSAGES // 4
_MAX_CHARS = 1_000
"""No passage is longer: a letter is at least one unit of the estimate."""
_FIXED = Estimator()
RECIPE = "p1"
"""Changes with the rules of this module: vectors of other passages are not mixed with these."""


def passages(text: str) -> list[str]:
    """The passages of a text in order, whole lines where they fit. Where there are too many, the first and the last."""
    if len(text) < _MAX_CHARS and _FIXED.text(text.strip()) < MIN_TOKENS:
        return []
    if len(text) <= MAX_PASSAGES * _MAX_CHARS:
        found = list(_packed(text))
        return found if len(found) <= MAX_PASSAGES else [*found[: MAX_PASSAGES - _TAIL], *found[-_TAIL:]]
    head = list(_packed(text[: (MAX_PASSAGES - _TAIL) * _MAX_CHARS]))
    tail = list(_packed(text[-_TAIL * _MAX_CHARS :]))
    return [*head[: MAX_PASSAGES - _TAIL], *tail[-_TAIL:]]


def _packed(text: str) -> Iterator[str]:
    """Lines put together as long as they fit."""
    held: list[str] = []
    used = 0
    for line in text.splitlines():
        for piece in _pieces(line):
            tokens = _FIXED.text(piece) + 1
            if held and used + tokens > PASSAGE_TOKENS:
                yield "\n".join(held)
                held, used = [], 0
            held.append(piece)
            used += tokens
    if held:
        yield "\n".join(held)


def _pieces(line: str) -> Iterator[str]:
    """A line in parts that fit, cut after a sentence or a word where one ends in the last third."""
    rest = line.strip()
    while rest:
        length = min(len(rest), _MAX_CHARS)
        while length > 1 and _FIXED.text(rest[:length]) + 1 > PASSAGE_TOKENS:
            length = length * 3 // 4
        if length < len(rest):
            ends = (rest.rfind(mark, length * 2 // 3, length) for mark in (". ", "; ", ", ", " "))
            length = next((end + 1 for end in ends if end > 0), length)
        yield rest[:length].rstrip()
        rest = rest[length:].lstrip()

"""Selective context: of a long text, the sentences that a model finds least predictable.

After Li et al., "Compressing Context to Enhance Inference Efficiency of Large Language Models" (EMNLP 2023): the
self-information of a token is -log p(token | what stands before it), that of a unit the sum over its tokens, and what
lies under a percentile is left out. Here a unit is a sentence and its score the mean over its tokens, since the room is
in tokens and a sum would prefer what is long; what stands before is the newest question and the text so far.

A generator: it yields `Score` and is sent the engine's log-probabilities. Pure but for that, linear in the text.
Invariant: what is kept is kept word for word and in order; None wherever the engine's answer cannot be trusted.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence, Set
from dataclasses import dataclass

from kvsteward.context.distill.prose import Prose
from kvsteward.context.tokens import Estimator

Pieces = Sequence[tuple[str, float | None]]
"""The text of each token of a prompt, and its log-probability; None where there is none (the first)."""

WINDOW_TOKENS, MAX_WINDOWS = 1_024, 16
"""What is asked about at a time, and how often: longer texts are the distillers' matter."""
_QUESTION_CHARS = 600
_GAP = " […] "
_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[^a-z\s])|\n\s*\n")
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_BROKEN = 4
"""Tokens that share one character."""


@dataclass(frozen=True, slots=True)
class Score:
    """Question: how likely is each token of `before + text`? Answer: `Pieces`, or None if the engine cannot say."""

    before: str
    text: str


@dataclass(frozen=True, slots=True)
class Selected:
    """What is left of a text. `asked_tokens`: what the engine had to read, by the estimate."""

    text: str
    kept: int
    sentences: int
    asked_tokens: int

    @property
    def note(self) -> str:
        return f"the {self.kept} of {self.sentences} sentences that tell most"


@dataclass(frozen=True, slots=True)
class _Sentence:
    start: int
    end: int
    tokens: int
    information: float = 0.0
    """Mean self-information of its tokens in nats."""


def applies_to(text: str) -> bool:
    """Running prose only: of data, each line is as surprising as the next, and structure is what tells."""
    return Prose().matches(text)


def select(
    text: str, *, question: str, mentions: Set[str], ratio: float, room_tokens: int, estimator: Estimator
) -> Generator[Score, Pieces | None, Selected | None]:
    """At most `ratio` of the text's tokens, and at most `room_tokens`. Sentences that name one of `mentions` come
    first, then those with most information. None if the text is too long to ask about or cannot be scored."""
    sentences = _sentences(text, estimator)
    windows = _windows(sentences)
    if len(sentences) < 3 or len(windows) > MAX_WINDOWS:
        return None
    before = f"{question.strip()[:_QUESTION_CHARS]}\n\n"
    scored: list[_Sentence] = []
    asked = 0
    for window in windows:
        part = text[window[0].start : window[-1].end]
        asked += estimator.text(before) + estimator.text(part)
        pieces = yield Score(before, part)
        told = _placed(pieces, before, part) if pieces is not None else None
        if told is None:
            return None
        scored += _informed(window, told, window[0].start)
    room = min(room_tokens, int(sum(s.tokens for s in sentences) * ratio))
    chosen = _chosen(scored, text, mentions, room, estimator.text(_GAP))
    if not chosen or len(chosen) == len(scored):
        return None
    return Selected(_joined(text, scored, chosen), len(chosen), len(scored), asked)


def _sentences(text: str, estimator: Estimator) -> list[_Sentence]:
    found, start = [], 0
    for match in _END.finditer(text):
        if text[start : match.start()].strip():
            found.append(_Sentence(start, match.end(), estimator.text(text[start : match.end()])))
            start = match.end()
    if text[start:].strip():
        found.append(_Sentence(start, len(text), estimator.text(text[start:])))
    return found


def _windows(sentences: Sequence[_Sentence]) -> list[list[_Sentence]]:
    windows: list[list[_Sentence]] = []
    size = WINDOW_TOKENS
    for sentence in sentences:
        if size + sentence.tokens > WINDOW_TOKENS:
            windows.append([])
            size = 0
        windows[-1].append(sentence)
        size += sentence.tokens
    return windows


def _placed(pieces: Pieces, before: str, text: str) -> list[tuple[int, float]] | None:
    """(place in `text`, log-probability) of each token of it. None if the pieces are not this text's: a tokenizer may
    begin with marks of its own and cut a character into several tokens, but it leaves nothing out."""
    whole, at, broken = before + text, 0, 0
    placed: list[tuple[int, float]] = []
    for number, (piece, logprob) in enumerate(pieces):
        if not piece:
            continue
        if _BROKEN in piece:
            broken += 1
            if broken > _MAX_BROKEN * 8:
                return None
            place = at
        else:
            reach = whole.find(piece, at, at + len(piece) + 1 + broken)
            if reach < 0:
                if number == 0:
                    continue  # the mark at the beginning of a prompt
                return None
            place, at, broken = reach, reach + len(piece), 0
        if logprob is not None and place >= len(before):
            placed.append((place - len(before), logprob))
    return placed if at >= len(whole.rstrip()) - _MAX_BROKEN and placed else None


def _informed(window: Sequence[_Sentence], placed: Sequence[tuple[int, float]], offset: int) -> list[_Sentence]:
    found, index = [], 0
    for sentence in window:
        total, count = 0.0, 0
        while index < len(placed) and placed[index][0] + offset < sentence.end:
            total -= placed[index][1]
            count += 1
            index += 1
        found.append(_Sentence(sentence.start, sentence.end, sentence.tokens, total / count if count else 0.0))
    return found


def _chosen(sentences: Sequence[_Sentence], text: str, mentions: Set[str], room: int, gap_tokens: int) -> set[int]:
    """Numbers of the sentences that are kept, the best first while there is room. A gap before a sentence costs too."""
    named = {
        n for n, s in enumerate(sentences) if any(mention in text[s.start : s.end] for mention in _words(mentions))
    }
    order = sorted(range(len(sentences)), key=lambda n: (n not in named, -sentences[n].information, n))
    chosen: set[int] = set()
    for number in order:
        cost = sentences[number].tokens + (0 if number - 1 in chosen else gap_tokens)
        if cost <= room:
            room -= cost
            chosen.add(number)
    return chosen


def _words(mentions: Iterable[str]) -> list[str]:
    return [mention for mention in mentions if len(mention) >= 4]


def _joined(text: str, sentences: Sequence[_Sentence], chosen: set[int]) -> str:
    parts: list[str] = []
    last = -1
    for number in sorted(chosen):
        part = text[sentences[number].start : sentences[number].end]
        if number != last + 1:
            parts = [*parts[:-1], parts[-1].rstrip()] if parts else parts
            parts.append(_GAP.lstrip() if not parts else _GAP)
        parts.append(part)
        last = number
    if last != len(sentences) - 1:
        parts = [*parts[:-1], parts[-1].rstrip(), _GAP.rstrip()]
    return "".join(parts).strip()

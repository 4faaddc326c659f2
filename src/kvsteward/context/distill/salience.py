"""Which parts of a text are worth their tokens: values (ids, numbers, paths), errors, what was named, what is new.

It knows no kind of content. Invariant: linear in the text; every pattern here consumes each character a
bounded number of times.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvsteward.context.distill.base import Hints

GROUPED_NUMBER = r"(?<![\w.,\[/])[-+]?[$€£¥]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!,?\w)"
"""A number with commas between its thousands. Cut at them it would be another number; a list in brackets is none."""
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d[\d,]*\.?\d*")
_CHUNK = re.compile(rf"{GROUPED_NUMBER}|[^\s\"'`<>()\[\]{{}},;|=]+")
_SIGN = re.compile(r"\W")
_CAMEL = re.compile(r"[a-z][A-Z]")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ERROR = re.compile(
    r"error|exception|fatal|fail|panic|critical|traceback|denied|refused|timed? ?out|not found|no such|cannot"
    r"|undefined|invalid|unexpected|missing|corrupt|abort|killed|segfault|assert|warn",
    re.IGNORECASE,
)
_ERROR_STRONG = re.compile(r"\b\w*(?:Error|Exception)\b|\b(?:ERROR|FATAL|CRITICAL|PANIC|FAILED|Traceback)\b")
_STOP = frozenset(
    [
        "the",
        "a",
        "an",
        "and",
        "or",
        "of",
        "to",
        "in",
        "on",
        "for",
        "with",
        "is",
        "are",
        "was",
        "were",
        "be",
        "been",
        "what",
        "which",
        "who",
        "whom",
        "when",
        "where",
        "why",
        "how",
        "do",
        "does",
        "did",
        "can",
        "could",
        "should",
        "would",
        "will",
        "i",
        "me",
        "my",
        "you",
        "your",
        "it",
        "its",
        "this",
        "that",
        "these",
        "those",
        "there",
        "their",
        "them",
        "they",
        "we",
        "our",
        "us",
        "from",
        "by",
        "as",
        "at",
        "if",
        "then",
        "than",
        "so",
        "not",
        "no",
        "yes",
        "all",
        "any",
        "some",
        "each",
        "please",
        "show",
        "give",
        "tell",
        "list",
        "find",
        "get",
        "let",
        "know",
        "need",
        "want",
        "have",
        "has",
        "had",
        "about",
        "into",
        "out",
        "up",
        "down",
        "over",
        "under",
        "more",
        "most",
        "other",
        "just",
        "also",
        "only",
        "now",
        "using",
        "use",
        "used",
        "via",
        "per",
        "help",
    ]
)
_MAX_VALUE_CHARS = 160
_ACRONYM_WEIGHT = 0.4
_MAX_WORD_CHARS = 64


def is_value(word: str) -> bool:
    """True for a word that stands for one thing: an id, a number of three digits, a camelCase name, a code."""
    if word.isdigit():
        return len(word) >= 3
    if len(word) < 3 or len(word) > _MAX_WORD_CHARS:
        return False
    if word.isalpha():
        return (word.isupper() and word.isascii()) or (len(word) >= 4 and _CAMEL.search(word) is not None)
    return len(word.strip("_")) >= 3


def values_of(text: str) -> list[str]:
    """The values of a text in order, with repeats, as single words."""
    return [word for word in _WORD.findall(text) if is_value(word)]


def stem(word: str) -> str:
    """Lower case, without a plural or a common ending: enough to match a question's word with a key."""
    word = word.lower()
    for ending in ("ing", "ies", "es", "ed", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def stems(text: str) -> set[str]:
    """Stems of the words of a text, names split at `_` and camelCase, stop words out."""
    return {stem(part) for part in _PARTS.findall(text) if len(part) > 1 and part.lower() not in _STOP}


def whole_values(text: str) -> list[str]:
    """Values as they stand in the text, paths, addresses and dates whole."""
    found = []
    for chunk in _CHUNK.findall(text):
        if len(chunk) > _MAX_VALUE_CHARS:
            continue
        value = chunk.strip(".:!?*#-+\\&%")
        if len(value) >= 3 and (_compound(value) if _SIGN.search(value) else is_value(value)):
            found.append(value)
    return found


def _compound(value: str) -> bool:
    """True for a path, an address, a version, a dotted or hyphenated name that holds a value; not for `and/or`."""
    words = _WORD.findall(value)
    if "@" in value:
        return len(words) >= 2
    if value.count("/") >= 2 or (value.startswith(("/", "./", "~/")) and len(value) >= 5):
        return any(word.isalnum() for word in words)
    return any(is_value(word) for word in words) or ("." in value and value[-1].isalpha() and len(words) >= 2)


@dataclass(frozen=True, slots=True)
class Focus:
    """What is looked for, made from hints once: values and stems of the question, the plan and earlier arguments."""

    asked: frozenset[str]
    """Stems of the question."""
    known: frozenset[str]
    """Stems of the mentions and of the call's own arguments."""
    exact: frozenset[str]
    """Values that the question, the mentions or the arguments name, as they stand."""
    beginnings: frozenset[str]
    """The first four letters of each asked stem."""

    def names(self, text: str) -> bool:
        """True if the text holds a value that was named."""
        return bool(self.exact) and (text.strip() in self.exact or not self.exact.isdisjoint(_WORD.findall(text)))

    def hits(self, text: str) -> dict[str, float]:
        """The looked-for words that stand in the text, with their weights: a named value 1.5, an asked stem 1."""
        if not (self.asked or self.exact or self.known):
            return {}
        found = {word: 1.5 for word in _WORD.findall(text) if word in self.exact}
        for word in stems(text):
            if word in self.asked:
                found[f"~{word}"] = 1.0
            elif word in self.known:
                found[f"~{word}"] = 0.35
            elif len(word) >= 4 and word[:4] in self.beginnings and any(_akin(word, other) for other in self.asked):
                found[f"~{word}"] = 0.6
        return found

    def weight(self, text: str) -> float:
        """0 for no relation; 1 and more for each asked stem or named value in the text; at most 6."""
        return min(6.0, sum(self.hits(text).values()))


def _akin(a: str, b: str) -> bool:
    return len(a) >= 4 and len(b) >= 4 and (a.startswith(b) or b.startswith(a))


_MAX_HINT_CHARS = 20_000


def focus_of(hints: Hints) -> Focus:
    """The focus of these hints; bounded."""
    question = hints.question[-_MAX_HINT_CHARS:]
    mentions = " ".join(sorted(hints.mentions))[:_MAX_HINT_CHARS]
    arguments = hints.arguments[:_MAX_HINT_CHARS]
    exact = {word for word in _WORD.findall(f"{question}\n{mentions}") if is_value(word)}
    exact |= {m for m in hints.mentions if 3 <= len(m) <= 80}
    exact -= set(_WORD.findall(arguments))
    asked = stems(question)
    return Focus(
        asked=frozenset(asked),
        beginnings=frozenset(word[:4] for word in asked if len(word) >= 4),
        known=frozenset(stems(f"{mentions}\n{arguments}\n{hints.tool_name}")),
        exact=frozenset(exact),
    )


def error_weight(text: str) -> float:
    """0 for no sign of trouble, 1 for a word of it, 2 for a named error."""
    if _ERROR_STRONG.search(text):
        return 2.0
    return 1.0 if _ERROR.search(text) else 0.0


def _kind(value: str) -> float:
    """An acronym is asked for less often than an id, a number or a name."""
    return _ACRONYM_WEIGHT if value.isalpha() and value.isupper() else 1.0


def standing(occurrences: int) -> float:
    """Weight of a value that stands `occurrences` times in the text: what recurs is what the text is about, a little.

    It counts once however often it stands, so a value on each line of boilerplate gains nothing by it.
    """
    return 1.0 + 0.15 * math.log2(min(16, max(1, occurrences)))


def rareness(times: int, total: int) -> float:
    """1 for a word that one part of many holds, near 0 for one that nearly all hold."""
    return math.log((total + 1) / (times + 0.5)) / math.log((total + 1) / 1.5) if total > 1 else 1.0


@dataclass(slots=True)
class Seen:
    """The values that were kept so far; a value adds nothing the second time."""

    frequency: Counter[str]
    kept: set[str] = field(default_factory=set)

    def gain(self, values: Iterable[str]) -> float:
        """What keeping these values would add."""
        return sum(_kind(v) * standing(self.frequency[v]) for v in set(values) if v not in self.kept)

    def keep(self, values: Iterable[str]) -> None:
        """Note these values as kept."""
        self.kept.update(values)

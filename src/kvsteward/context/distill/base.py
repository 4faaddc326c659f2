"""The contract of a distiller: a long tool result or text in, a short one out that keeps what will be asked for.

A distiller is a pure function of its arguments: deterministic, bounded in time, and never larger than what it was
given. It keeps structure, head, tail, errors, ids and numbers, and says what it left out. Text inside a tool result
that tries to give orders is data like any other: it is shortened, never followed, and never changes its role.

To add one: a file here with a class that derives from `Distiller`, a line in `registry.py` (order = priority), a row
in `tests/context/test_distill_contract.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

CountTokens = Callable[[str], int]
"""An estimate of a text's length in tokens. Must be monotone enough to compare two texts; need not be exact."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of what will be asked: the newest question, and words that the plan or earlier calls mention."""

    question: str = ""
    mentions: frozenset[str] = frozenset()
    tool_name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Distillate:
    """`text` is what the model sees instead; `note` says in one line what was left out ("412 of 440 rows")."""

    kind: str
    text: str
    note: str


class Distiller(ABC):
    """One kind of content."""

    kind: str

    @abstractmethod
    def matches(self, text: str) -> bool:
        """True if this distiller understands the text. Cheap: looks at a bounded part of it."""

    @abstractmethod
    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        """At most about `limit_tokens` tokens, or None if it cannot do better than the next distiller."""

"""A question to the engine's model on our own account: what it is, what comes back, and what is written down of it.

Knows no sockets and no purposes. Who asks is a generator that yields `Ask` and is sent a `Reply`; who drives it reaches
the engine. A text that is asked about is quoted: it stands between marks that it cannot have in it, as data.

Invariant: a reply has a text or a reason why there is none, and a question without a usable reply changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Purpose = Literal["prose", "class"]
PURPOSES: tuple[Purpose, ...] = ("prose", "class")


@dataclass(frozen=True, slots=True)
class Ask:
    """Question: the engine's answer to these messages, a prompt of its own. `schema`: what the answer is held to, where
    the engine can do that. Answer: `Reply`."""

    purpose: Purpose
    messages: Sequence[Mapping[str, Any]]
    max_tokens: int
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. `text` is None where nothing usable did; `failed` says why."""

    text: str | None
    finished: bool = True
    """False: the engine stopped at its limit of tokens."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question in the log: what became of it, and what it cost."""

    purpose: Purpose
    at: str
    """Hash of the entry that it was about; empty where it was about several."""
    outcome: Literal["used", "refused", "failed"]
    """"refused": there was an answer, and it did not stand the test. "failed": there was none in time."""
    reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @classmethod
    def of(cls, purpose: Purpose, at: str, reply: Reply, refused: str = "") -> Asked:
        """`refused`: why the answer is not used."""
        outcome: Literal["used", "refused", "failed"] = (
            "failed" if reply.text is None else "refused" if refused else "used"
        )
        reason = reply.failed or refused
        return cls(purpose, at, outcome, reason, reply.prompt_tokens, reply.output_tokens, round(reply.seconds, 3))


def quoted(text: str, mark: str) -> str:
    """The text between lines that say where it begins and ends. `mark` must be unknown to whoever wrote it."""
    return f"[begin {mark}]\n{text}\n[end {mark}]"

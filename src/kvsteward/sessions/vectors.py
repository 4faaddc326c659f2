"""The contract of an index of vectors: what of a session's log lies near a question, by the meaning of its words.

It is a part of the log that can be made again: an entry has a row of vectors, one for each passage of its text, made by
one model. A store says with `SessionStore.vectors` where its own lie. Vectors of two models are never compared: a
`Space` names the model, the length of its vectors and how texts were cut.

Knows no model and no network; numpy is needed only where vectors are kept (`nearest`). Invariants: an entry is there
with all of its vectors or not at all; what leaves the log leaves the index with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvsteward.errors import ConfigError

MAX_SEARCHED = 16_384
"""Vectors of one session that a search looks at: the newest."""


@dataclass(frozen=True, slots=True)
class Space:
    """Where vectors can be compared: the same model, the same length, the same way to make passages (`recipe`)."""

    model: str
    dimensions: int
    recipe: str = ""

    @property
    def key(self) -> str:
        return f"{self.model}\n{self.dimensions}\n{self.recipe}"


@dataclass(frozen=True, slots=True)
class Near:
    """An entry and the cosine between the question and the nearest of its passages."""

    hash: str
    cosine: float


class VectorIndex(ABC):
    """Vectors of all sessions of one store. Synchronous and safe to call from several threads; each call is one
    transaction.

    Raises StoreError when the disk is full or the file cannot be used.
    """

    @abstractmethod
    def known(self, session_id: str, space: Space, hashes: Sequence[str]) -> frozenset[str]:
        """Those of the entries that have their vectors in this space, or were found to have no text."""

    @abstractmethod
    def adopt(self, session_id: str, space: Space, hash_: str) -> bool:
        """Takes the vectors of an entry over from another session that holds it (a branch). False if none does."""

    @abstractmethod
    def add(self, session_id: str, space: Space, hash_: str, vectors: Sequence[Sequence[float]]) -> bool:
        """Keeps the vectors of an entry in place of those that it had in this space; none for an entry without text.
        False if the session or the entry has been deleted meanwhile: then nothing is kept. Raises ValueError for a
        vector that is 0 or not finite."""

    @abstractmethod
    def nearest(self, session_id: str, space: Space, vector: Sequence[float], *, limit: int) -> Sequence[Near]:
        """The entries that lie nearest, best first. Empty where the session has no vectors in this space."""

    @abstractmethod
    def forget_others(self, session_id: str, space: Space) -> None:
        """Wipes a session's vectors of all other spaces."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. The store is closed on its own."""


def without_numpy(error: ModuleNotFoundError) -> ConfigError:
    """What a missing package means to who runs the deployment."""
    return ConfigError(
        f"--embeddings needs the package {error.name!r}", hint="Run pip install 'kvsteward[embeddings]'."
    )

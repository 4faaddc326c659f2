"""What a tier below the host pool is. Its calls may wait (disk, network); only the store's own threads make them.

Invariant: a tier raises nothing for what is wrong with its medium. What it cannot give is a `Miss`, what it cannot keep
is a `Reason`; both say why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsteward.kv.blocks.record import Miss, Reason


@dataclass(frozen=True, slots=True)
class Write:
    """A record to keep: `parts` one after the other. `expires_s` is Unix time, 0 for never."""

    key: bytes
    parts: tuple[memoryview | bytes, ...]
    session: str = ""
    expires_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class TierFigures:
    """`misses` and `refused` by reason, in blocks. `used_bytes`, `blocks` and `capacity_bytes` are None where the tier
    does not know."""

    name: str
    up: bool
    state: str
    read_blocks: int
    read_bytes: int
    read_s: float
    written_blocks: int
    written_bytes: int
    written_s: float
    misses: dict[str, int]
    refused: dict[str, int]
    evicted: int = 0
    blocks: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None


@dataclass(slots=True)
class Meter:
    """What a tier has done. The seconds are those its threads spent."""

    read_blocks: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    written_s: float = 0.0
    evicted: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def figures(
        self,
        name: str,
        *,
        up: bool = True,
        state: str = "up",
        blocks: int | None = None,
        used_bytes: int | None = None,
        capacity_bytes: int | None = None,
    ) -> TierFigures:
        return TierFigures(
            name,
            up,
            state,
            self.read_blocks,
            self.read_bytes,
            self.read_s,
            self.written_blocks,
            self.written_bytes,
            self.written_s,
            dict(self.misses),
            dict(self.refused),
            self.evicted,
            blocks,
            used_bytes,
            capacity_bytes,
        )


class Tier(ABC):
    name: str
    writers: int = 1
    """Threads that may write at once: more where the other side takes several."""
    shared: bool = False
    """Other processes use it too, so it must be told who uses a block that is there."""

    @abstractmethod
    def holds(self, keys: Sequence[bytes]) -> list[bool] | Miss:
        """Which of the keys it has, or why it cannot tell. Says nothing of whether they are sound."""

    @abstractmethod
    def read(self, keys: Sequence[bytes], rooms: Sequence[memoryview]) -> list[memoryview | Miss]:
        """The whole record of each key. It may use the room (header and raw block long) of the same place for it."""

    @abstractmethod
    def write(self, writes: Sequence[Write]) -> list[Reason | None]:
        """Keeps the records; None where it did."""

    def use(self, session: str, keys: Sequence[bytes]) -> None:
        """The session uses these blocks, whoever wrote them. A tier of one process has no need to know."""
        return

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> int:
        """Drops the blocks. Returns how many it had."""

    @abstractmethod
    def forget_session(self, session: str, spare: Callable[[Sequence[bytes]], set[bytes]]) -> int:
        """Drops what the session wrote or used, except what `spare` picks of it and, in a shared tier, what sessions of
        other processes use. Returns how many."""

    @abstractmethod
    def missed(self, reason: Reason) -> None:
        """Counts a block that was asked for and could not be used; the store calls it, once for each."""

    @abstractmethod
    def figures(self) -> TierFigures: ...

    def close(self) -> None:
        """Lets go of files and sockets."""
        return

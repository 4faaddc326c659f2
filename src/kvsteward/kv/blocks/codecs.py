"""How a block's bytes are written below the host pool. One class per codec; its number stands in the record's header.

Pure. Invariant: a lossless codec gives back the same bytes. A payload that cannot be decoded is a ValueError, which the
store counts as a miss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class Codec(ABC):
    number: ClassVar[int]
    name: ClassVar[str]
    lossless: ClassVar[bool]

    @abstractmethod
    def encode(self, block: memoryview) -> memoryview | bytes:
        """The stored form. Raises ValueError for a block that it cannot take."""

    @abstractmethod
    def decode(self, payload: memoryview, out: memoryview) -> None:
        """Writes the block into `out`, which has its size. Raises ValueError."""


class Raw(Codec):
    """The bytes as they are."""

    number = 0
    name = "raw"
    lossless = True

    def encode(self, block: memoryview) -> memoryview:
        return block

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if payload.nbytes != out.nbytes:
            raise ValueError(f"{payload.nbytes} bytes for a block of {out.nbytes}")
        out[:] = payload

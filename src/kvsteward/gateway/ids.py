"""Ids that nobody can guess, without a system call for each.

`os.urandom` lets go of the interpreter's lock, and beside a busy store thread it takes long to get it back. So random
bytes are fetched in blocks. Mutable, for one event loop. Invariant: no byte is used twice.
"""

from __future__ import annotations

import os

ID_BYTES = 16
_BLOCK_BYTES = 256 * ID_BYTES


class Ids:
    """32 hex digits at a time, as `uuid4().hex` has."""

    __slots__ = ("_at", "_block")

    def __init__(self) -> None:
        self._block, self._at = "", 0

    def new(self) -> str:
        """An id of 128 random bits."""
        if self._at >= len(self._block):
            self._block, self._at = os.urandom(_BLOCK_BYTES).hex(), 0
        start, self._at = self._at, self._at + 2 * ID_BYTES
        return self._block[start : self._at]

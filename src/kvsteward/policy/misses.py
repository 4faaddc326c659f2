"""How often a turn finds that the engine has given up its session's cache.

Told by the engine itself: `cached_tokens` of a turn, beside the tokens that the session's last turn left. An engine
that never reports cached tokens teaches nothing. Mutable, no clock. Invariant: 0 <= `ratio` <= 1.
"""

from __future__ import annotations

_SLOWNESS = 0.05
_BLOCK_TOKENS = 256
"""What whole blocks may lose: the end of a prompt that fills no block is never found again."""


class Misses:
    """A running mean over turns, newer ones counting more."""

    def __init__(self) -> None:
        self.ratio = 0.0
        self._reports = False

    def observe(self, expected_tokens: int, cached_tokens: int) -> None:
        """A turn whose prompt began with `expected_tokens` that an earlier one had, of which so many were found."""
        self._reports = self._reports or cached_tokens > 0
        if not self._reports or expected_tokens <= _BLOCK_TOKENS:
            return
        missing = max(0, expected_tokens - cached_tokens - _BLOCK_TOKENS) / expected_tokens
        self.ratio += _SLOWNESS * (missing - self.ratio)

"""Load a prefix or compute it again: whichever is expected to take less time, from what was seen so far.

    load(n)      = latency + n * bytes per block / bandwidth
    recompute(n) = latency + tokens / (tokens per s) + quadratic * tokens * (tokens / 2 + context)

`latency` and `bandwidth` of a tier are the line through its loads, forgotten slowly (sums with a decay); the same for
prefills. The quadratic term is the attention: a prefix of `context` tokens that is computed already is looked at by
each new token. Until something was seen, the priors hold.

Pure; the caller brings the measurements. Invariant: `decide` says what it would cost both ways, and never asks to
load more blocks than there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Line:
    """y = a + b x by least squares over pairs that fade by `keep` with each new one; a and b are never negative.

    With x all alike the slope is y / x and a is 0, held to the prior `a0` where there is nothing to tell them apart.
    """

    a0: float
    b0: float
    keep: float = 0.95
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def saw(self, x: float, y: float) -> None:
        """One measurement; those that make no sense (not positive, not finite) are left out."""
        if not (math.isfinite(x) and math.isfinite(y) and x > 0 and y >= 0):
            return
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, self.keep * getattr(self, name) + value)

    def parameters(self) -> tuple[float, float]:
        """(a, b)."""
        if not self.weight:
            return self.a0, self.b0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        if spread <= 1e-9 * mean_x * mean_x:
            a = min(self.a0, mean_y)
            return a, (mean_y - a) / mean_x
        b = (self.xy / self.weight - mean_x * mean_y) / spread
        if b < 0:
            return mean_y, 0.0
        a = mean_y - b * mean_x
        return (a, b) if a >= 0 else (0.0, self.xy / self.xx)

    def at(self, x: float) -> float:
        a, b = self.parameters()
        return a + b * x


@dataclass(frozen=True, slots=True)
class Decision:
    """`load_blocks` of the first blocks are to be loaded, the rest is computed. Seconds are expected ones."""

    load_blocks: int
    load_s: float
    recompute_s: float
    reason: str


class LoadOrRecompute:
    """`latency_s`, `bytes_per_s` and `tokens_per_s` are what is believed before the first measurement; `quadratic_s`
    is seconds per pair of tokens (0: attention counts for nothing beside the rest). A load must be expected to be
    faster by `margin` (1.0: just faster), since one that comes late is paid twice."""

    def __init__(
        self,
        block_bytes: int,
        block_tokens: int,
        *,
        latency_s: float = 0.002,
        bytes_per_s: float = 1e9,
        tokens_per_s: float = 5000.0,
        quadratic_s: float = 0.0,
        margin: float = 1.0,
    ) -> None:
        self._block_bytes, self._block_tokens = block_bytes, block_tokens
        self._priors = (latency_s, 1.0 / bytes_per_s)
        self._loads: dict[str, Line] = {}
        self._prefill = Line(0.0, 1.0 / tokens_per_s)
        self._quadratic_s, self._margin = quadratic_s, margin

    def loaded(self, tier: str, blocks: int, seconds: float) -> None:
        """A load of so many blocks from the tier took so long."""
        self._line(tier).saw(blocks * self._block_bytes, seconds)

    def forget(self, tier: str) -> None:
        """What was measured of the tier is old: believe in it as at the start."""
        self._loads.pop(tier, None)

    def computed(self, tokens: int, seconds: float, context_tokens: int = 0) -> None:
        """A prefill of so many tokens after `context_tokens` took so long."""
        self._prefill.saw(tokens, max(0.0, seconds - self._attention_s(tokens, context_tokens)))

    def load_s(self, tier: str, blocks: int) -> float:
        return self._line(tier).at(blocks * self._block_bytes) if blocks else 0.0

    def recompute_s(self, tokens: int, context_tokens: int = 0) -> float:
        if tokens <= 0:
            return 0.0
        return self._prefill.at(tokens) + self._attention_s(tokens, context_tokens)

    def decide(self, tier: str, blocks: int, context_tokens: int = 0) -> Decision:
        """Whether to load the `blocks` that the tier has behind `context_tokens` that are there already."""
        if blocks <= 0:
            return Decision(0, 0.0, 0.0, "nothing to load")
        load = self.load_s(tier, blocks)
        recompute = self.recompute_s(blocks * self._block_tokens, context_tokens)
        if load * self._margin < recompute:
            return Decision(blocks, load, recompute, f"loading takes {load:.3f} s, computing {recompute:.3f} s")
        return Decision(0, load, recompute, f"computing takes {recompute:.3f} s, loading {load:.3f} s")

    def _attention_s(self, tokens: int, context_tokens: int) -> float:
        return self._quadratic_s * tokens * (tokens / 2 + context_tokens)

    def _line(self, tier: str) -> Line:
        if tier not in self._loads:
            self._loads[tier] = Line(*self._priors)
        return self._loads[tier]

"""From a budget in bytes to tokens and back, for a cache that is made of equal blocks.

Knows no engine's extras (see `alloc`). Invariant: `budget_bytes(tokens_in(bytes)) <= bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsteward.errors import ConfigError
from kvsteward.ledger.spec import FormatChoice, ModelSpec


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """How many blocks a budget holds. `tokens` is what fits, `left_bytes` what no whole block can use."""

    blocks: int
    block_tokens: int
    block_bytes: int
    left_bytes: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens


def tokens_in(
    spec: ModelSpec,
    budget_bytes: int,
    *,
    block_tokens: int = 16,
    kv_dtype: FormatChoice = "auto",
    k_dtype: FormatChoice | None = None,
    v_dtype: FormatChoice | None = None,
    tp: int = 1,
    pp: int = 1,
) -> BlockBudget:
    """`floor(budget / (bytes_per_token x block))` blocks on the fullest rank. ConfigError for a nonsensical budget."""
    if budget_bytes < 0 or block_tokens < 1:
        raise ConfigError(f"no such budget: {budget_bytes} bytes in blocks of {block_tokens} tokens")
    per_token = spec.kv_bytes_per_token(kv_dtype=kv_dtype, k_dtype=k_dtype, v_dtype=v_dtype, tp=tp, pp=pp)
    if per_token == 0:
        raise ConfigError(f"a {spec.architecture} has no cache that grows with its context")
    block = per_token * block_tokens
    return BlockBudget(budget_bytes // block, block_tokens, block, budget_bytes % block)


def budget_for(spec: ModelSpec, tokens: int, *, block_tokens: int = 16, kv_dtype: FormatChoice = "auto") -> int:
    """Bytes of the whole blocks that hold `tokens` on one rank: the inverse of `tokens_in`."""
    if tokens < 0 or block_tokens < 1:
        raise ConfigError(f"no such demand: {tokens} tokens in blocks of {block_tokens}")
    return -(-tokens // block_tokens) * block_tokens * spec.kv_bytes_per_token(kv_dtype=kv_dtype)

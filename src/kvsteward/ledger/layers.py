"""What one layer of a model keeps between two tokens, and what that costs.

A layer keeps keys and values (all, a window, a chunk), one latent, a compressed latent, a recurrent state, an image of
the encoder's output, or nothing. Knows nothing of engines: blocks, pages and padding are in `alloc`.
Invariant: sizes are whole bytes; what a layer holds never shrinks when the context grows.

Sources: `2 x kv_heads x head_dim x bytes` per token and layer (Shazeer 2019, MQA; Ainslie 2023, GQA); MLA keeps
`kv_lora_rank + qk_rope_head_dim` once (DeepSeek-V2, section 2.1); heads are replicated when TP exceeds them (vLLM,
SGLang); state shapes from the models' own configs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvsteward.errors import ConfigError
from kvsteward.ledger.formats import Format, get


class Kind(StrEnum):
    """How what a layer keeps grows with the context."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    LATENT = "latent"
    COMPRESSED = "compressed"
    STATE = "state"
    CROSS = "cross"
    SHARED = "shared"
    NONE = "none"


MIXED_LATENT = "fp8_ds_mla"
GROWING = frozenset({Kind.FULL, Kind.SLIDING, Kind.CHUNKED, Kind.LATENT, Kind.COMPRESSED})


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A part of a recurrent state: `heads` shards of `per_head` numbers. TP splits heads and never below one.

    A convolution keeps its last `window` inputs, which `per_head` counts.
    """

    name: str
    heads: int
    per_head: int
    dtype: str
    window: int = 0

    def size_bytes(self, tp: int, dtype: str | None = None) -> int:
        return -(-self.heads // tp) * self.per_head * get(dtype or self.dtype).size_bytes(1)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. `k_dim` and `v_dim` are per head; a latent is one head with `v_dim` 0, of which `rope_dim` is rope.

    `span_tokens` is the window or chunk, `ratio` the tokens per compressed entry, `index_dim` the key of a sparse
    indexer (one vector a token, or one per compressed entry), `state` what does not grow, `expanded` the heads, key
    and value dims that a latent unfolds to, for engines that store those.
    """

    kind: Kind
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    span_tokens: int = 0
    rope_dim: int = 0
    index_dim: int = 0
    ratio: int = 0
    state: tuple[StateTensor, ...] = ()
    expanded: tuple[int, int, int] | None = None

    @property
    def sharded(self) -> bool:
        """False for latents: every TP rank keeps the whole one."""
        return self.kind not in {Kind.LATENT, Kind.COMPRESSED}

    def heads_on_rank(self, tp: int) -> int:
        """KV heads of one TP rank: split, rounded up, and replicated when there are more ranks than heads."""
        return -(-self.kv_heads // tp) if self.sharded else self.kv_heads

    def k_bytes(self, fmt: Format, tp: int = 1) -> int:
        """Key (or latent) bytes of one entry on one rank."""
        if fmt.name == MIXED_LATENT:
            return self._mixed_latent_bytes()
        return self.heads_on_rank(tp) * fmt.size_bytes(self.k_dim)

    def v_bytes(self, fmt: Format, tp: int = 1) -> int:
        """Value bytes of one entry on one rank."""
        return self.heads_on_rank(tp) * fmt.size_bytes(self.v_dim)

    def index_bytes(self, fmt: Format) -> int:
        """Indexer bytes of one entry. DeepSeek's 8-bit keys have an fp32 scale: 132 bytes for 128.

        Beside a latent they are always 8 bit; elsewhere they follow the keys.
        """
        if not self.index_dim:
            return 0
        if self.kind is Kind.LATENT or (self.kind is Kind.COMPRESSED and fmt.bits <= 8):
            return self.index_dim + 4
        return fmt.size_bytes(self.index_dim)

    def _mixed_latent_bytes(self) -> int:
        """8-bit latent, 16-bit rope; scales: fp32 per 128 values (MLA: 656 bytes) or a byte per 64, to 8 (V4)."""
        if self.sharded:
            raise ConfigError(f"{MIXED_LATENT} is a format of latents; this model keeps keys and values")
        plain = self.k_dim - self.rope_dim
        scales = 8 * -(-plain // 512) if self.kind is Kind.COMPRESSED else 4 * -(-plain // 128)
        return plain + scales + 2 * self.rope_dim

    def state_bytes(self, tp: int = 1) -> int:
        return sum(tensor.size_bytes(tp) for tensor in self.state)

    def entries(self, context_tokens: int, encoder_tokens: int = 0) -> int:
        """Key-value entries that this layer must hold for `context_tokens` of context."""
        match self.kind:
            case Kind.FULL | Kind.LATENT:
                return context_tokens
            case Kind.SLIDING | Kind.CHUNKED:
                return min(context_tokens, self.span_tokens)
            case Kind.COMPRESSED:
                return min(context_tokens, self.span_tokens) + self.compressed_entries(context_tokens)
            case Kind.CROSS:
                return encoder_tokens
            case _:
                return 0

    def compressed_entries(self, context_tokens: int) -> int:
        """Finished compressed entries; an unfinished group lives in the window."""
        return context_tokens // self.ratio if self.ratio else 0

    def index_entries(self, context_tokens: int) -> int:
        if not self.index_dim:
            return 0
        return self.compressed_entries(context_tokens) if self.kind is Kind.COMPRESSED else context_tokens

"""The account of one sequence: what each kind of layer keeps, why, and the sum.

Knows no engine. Invariant: the lines add up to the total, which is `spec.kv_bytes`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvsteward.ledger.figures import Figure, table
from kvsteward.ledger.formats import Format
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.spec import Assumption, FormatChoice, ModelSpec, layer_bytes

_SOURCES = {
    Kind.FULL: "GQA (Ainslie 2023): 2 x kv_heads x head_dim x bytes per token and layer",
    Kind.SLIDING: "as full attention, for at most the window",
    Kind.CHUNKED: "as full attention, for at most one chunk",
    Kind.LATENT: "MLA (DeepSeek-V2): kv_lora_rank + qk_rope_head_dim, once, on every rank",
    Kind.COMPRESSED: "DeepSeek-V4 config: a window and one entry per compress_ratio tokens",
    Kind.STATE: "state shapes of the model's config; does not grow",
    Kind.CROSS: "as full attention, over the encoder's output; does not grow",
    Kind.SHARED: "uses the cache of an earlier layer (num_kv_shared_layers)",
    Kind.NONE: "keeps nothing",
}


@dataclass(frozen=True, slots=True)
class Account:
    """The bytes of one sequence on the fullest rank, line by line, and what was assumed to get them."""

    context_tokens: int
    lines: tuple[Figure, ...]
    total_bytes: int
    bytes_per_token: int
    state_bytes: int
    assumed: tuple[Assumption, ...]

    def to_dict(self) -> dict[str, object]:
        return {
            "context_tokens": self.context_tokens,
            "total_bytes": self.total_bytes,
            "bytes_per_token": self.bytes_per_token,
            "state_bytes": self.state_bytes,
            "lines": [line.to_dict() for line in self.lines],
            "assumed": [item.to_dict() for item in self.assumed],
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Name, value, formula, source: one row a line, the sum last."""
        total = Figure("one sequence", self.total_bytes, "B", "the sum", "")
        return table((*self.lines, total))


def account(
    spec: ModelSpec,
    context_tokens: int,
    *,
    kv_dtype: FormatChoice = "auto",
    k_dtype: FormatChoice | None = None,
    v_dtype: FormatChoice | None = None,
    tp: int = 1,
    pp: int = 1,
    encoder_tokens: int | None = None,
) -> Account:
    """The account of a sequence of `context_tokens`. ConfigError as `spec.kv_bytes`."""
    k_fmt, v_fmt = spec.formats(kv_dtype, k_dtype, v_dtype)
    encoder = spec.encoder_tokens if encoder_tokens is None else encoder_tokens
    total = spec.kv_bytes(
        context_tokens, kv_dtype=kv_dtype, k_dtype=k_dtype, v_dtype=v_dtype, tp=tp, pp=pp, encoder_tokens=encoder
    )
    stage = max(
        spec.stages(tp, pp),
        key=lambda layers: sum(layer_bytes(layer, context_tokens, k_fmt, v_fmt, tp, 1, encoder) for layer in layers),
    )
    lines = tuple(
        _line(layer, count, context_tokens, encoder, k_fmt, v_fmt, tp) for layer, count in Counter(stage).items()
    )
    return Account(
        context_tokens=context_tokens,
        lines=lines,
        total_bytes=total,
        bytes_per_token=spec.kv_bytes_per_token(kv_dtype=kv_dtype, k_dtype=k_dtype, v_dtype=v_dtype, tp=tp, pp=pp),
        state_bytes=spec.state_bytes(tp=tp, pp=pp),
        assumed=spec.assumed,
    )


def _line(layer: Layer, count: int, tokens: int, encoder: int, k_fmt: Format, v_fmt: Format, tp: int) -> Figure:
    value = count * layer_bytes(layer, tokens, k_fmt, v_fmt, tp, 1, encoder)
    formula = f"{count} layers x ({_formula(layer, tokens, encoder, k_fmt, v_fmt, tp)})"
    name = f"{count} x {layer.kind}" + (f" ({layer.span_tokens:,})" if layer.span_tokens else "")
    return Figure(name, value, "B", formula, _SOURCES[layer.kind])


def _formula(layer: Layer, tokens: int, encoder: int, k_fmt: Format, v_fmt: Format, tp: int) -> str:
    parts = []
    entries = layer.entries(tokens, encoder)
    if entries:
        heads = layer.heads_on_rank(tp)
        keys = f"{layer.k_bytes(k_fmt, tp) // heads} B {'latent' if not layer.v_dim else 'K'} ({k_fmt.name})"
        values = f" + {v_fmt.size_bytes(layer.v_dim)} B V ({v_fmt.name})" if layer.v_dim else ""
        parts.append(f"{entries:,} entries x {heads} heads x ({keys}{values})")
    if layer.index_dim:
        parts.append(f"{layer.index_entries(tokens):,} index keys x {layer.index_bytes(k_fmt)} B")
    parts.extend(f"{tensor.name} {tensor.size_bytes(tp):,} B {tensor.dtype}" for tensor in layer.state)
    return " + ".join(parts) or "0 B"

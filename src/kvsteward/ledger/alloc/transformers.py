"""The caches of transformers: dynamic (as long as the text) and static (as long as asked for).

Knows `DynamicCache` and `StaticCache`. Invariant: a dynamic cache is never larger than a
static one of the same length.

- a sliding layer of a dynamic cache keeps `window - 1` tokens after a step, and all of a longer prefill until then;
- a static cache has `max_cache_len` rows for every sequence of the batch, a window's layers `min(window, max)`;
- latents are stored unfolded: heads x (nope + rope) keys and heads x v values.
"""

from __future__ import annotations

from kvsteward.errors import ConfigError
from kvsteward.ledger.formats import Format
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.spec import FormatChoice, ModelSpec


def dynamic_bytes(
    spec: ModelSpec, tokens: int, *, batch: int = 1, kv_dtype: FormatChoice = "auto", encoder_tokens: int | None = None
) -> int:
    """Bytes of a DynamicCache that holds `tokens` of each of `batch` sequences."""
    return _bytes(spec, tokens, batch, kv_dtype, encoder_tokens, static=False)


def static_bytes(
    spec: ModelSpec,
    max_tokens: int,
    *,
    batch: int = 1,
    kv_dtype: FormatChoice = "auto",
    encoder_tokens: int | None = None,
) -> int:
    """Bytes of a StaticCache of `max_tokens` for `batch` sequences, allocated whatever is used."""
    return _bytes(spec, max_tokens, batch, kv_dtype, encoder_tokens, static=True)


def _bytes(
    spec: ModelSpec, tokens: int, batch: int, kv_dtype: FormatChoice, encoder_tokens: int | None, *, static: bool
) -> int:
    if tokens < 0 or batch < 1:
        raise ConfigError(f"no such cache: {batch} sequences of {tokens} tokens")
    k_fmt, v_fmt = spec.formats(kv_dtype, None, None)
    encoder = spec.encoder_tokens if encoder_tokens is None else encoder_tokens
    return batch * sum(_layer(layer, tokens, encoder, k_fmt, v_fmt, static) for layer in spec.layers)


def _layer(layer: Layer, tokens: int, encoder: int, k_fmt: Format, v_fmt: Format, static: bool) -> int:
    if layer.kind is Kind.LATENT and layer.expanded is not None:
        heads, k_dim, v_dim = layer.expanded
        return tokens * heads * (k_fmt.size_bytes(k_dim) + v_fmt.size_bytes(v_dim))
    rows = layer.entries(tokens, encoder)
    if layer.kind is Kind.SLIDING and not static:
        rows = min(tokens, layer.span_tokens - 1)
    return rows * (layer.k_bytes(k_fmt) + layer.v_bytes(v_fmt)) + layer.state_bytes()

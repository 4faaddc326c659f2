"""SGLang's memory pools: tokens from bytes, window pools, state slots.

Knows `ModelRunner.profile_max_num_token` and the pools of sglang/srt/mem_cache/memory_pool.py. Its logs say GB and mean
GiB. Invariant: a pool of `tokens` takes at most the bytes it was derived from (one page of padding apart).

- each layer has K and V buffers of `tokens + page` rows; a latent has one buffer; heads are replicated beyond TP;
- windowed models: `full = bytes / (full rate + ratio x window rate)`, window pool `ratio x full` (ratio 0.8);
- recurrent models: `slots + 1` states, a slot for each running request and each cached prefix; the bytes are split
  `mamba_full_memory_ratio` (0.9) to 1 between states and KV;
- with a draft, its layers have as many tokens, and each slot keeps a state per drafted token.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsteward.errors import ConfigError
from kvsteward.ledger.formats import Format
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.spec import FormatChoice, ModelSpec

WINDOW_RATIO = 0.8
STATE_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class SGLang:
    """The settings that change what SGLang allocates."""

    page_tokens: int = 1
    kv_dtype: FormatChoice = "auto"
    tp: int = 1
    window_ratio: float = WINDOW_RATIO
    state_ratio: float = STATE_RATIO
    draft_tokens: int = 0
    max_total_tokens: int | None = None
    state_slots: int | None = None


@dataclass(frozen=True, slots=True)
class Pools:
    """What a rank allocates: full-attention tokens, window tokens, state slots, and the bytes of each part."""

    tokens: int
    window_tokens: int
    state_slots: int
    k_bytes: int
    v_bytes: int
    window_bytes: int
    state_bytes: int
    draft_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.k_bytes + self.v_bytes + self.window_bytes + self.state_bytes + self.draft_bytes


def pools(spec: ModelSpec, kv_bytes: int, settings: SGLang) -> Pools:
    """The pools that `kv_bytes` of one rank are turned into. ConfigError for a budget below one page."""
    if kv_bytes < 0 or settings.page_tokens < 1 or settings.tp < 1:
        raise ConfigError(f"no such pool: {kv_bytes} bytes, page {settings.page_tokens}, TP {settings.tp}")
    slots = state_slots(spec, kv_bytes, settings)
    left = kv_bytes - slots_bytes(spec, slots, settings.tp)
    rate = _rate(spec, settings)
    if rate == 0:
        return sized(spec, 0, slots, settings)
    tokens = int(max(0, left) / rate)
    if settings.max_total_tokens is not None:
        tokens = min(tokens, settings.max_total_tokens)
    return sized(spec, tokens // settings.page_tokens * settings.page_tokens, slots, settings)


def sized(spec: ModelSpec, tokens: int, slots: int, settings: SGLang) -> Pools:
    """The bytes of pools of `tokens` and `slots`: what the log prints for them."""
    k_fmt, v_fmt = spec.formats(settings.kv_dtype, None, None)
    rows, tp = tokens + settings.page_tokens, settings.tp
    growing = [layer for layer in spec.layers if layer.kind in {Kind.FULL, Kind.LATENT}]
    window_rows = int(tokens * settings.window_ratio) if _windowed(spec) else 0
    index = rows * sum(layer.index_bytes(k_fmt) for layer in growing)
    draft = spec.draft_layers if settings.draft_tokens else ()
    return Pools(
        tokens=tokens,
        window_tokens=window_rows,
        state_slots=slots,
        k_bytes=rows * sum(layer.k_bytes(k_fmt, tp) for layer in growing) + index,
        v_bytes=rows * sum(layer.v_bytes(v_fmt, tp) for layer in growing),
        window_bytes=window_rows * sum(_entry(layer, k_fmt, v_fmt, tp) for layer in _windowed(spec)),
        state_bytes=slots_bytes(spec, slots, tp) * (1 + settings.draft_tokens),
        draft_bytes=rows * sum(_entry(layer, k_fmt, v_fmt, tp) for layer in draft),
    )


def state_slots(spec: ModelSpec, kv_bytes: int, settings: SGLang) -> int:
    """State slots: as set, or the share `ratio / (1 + ratio)` of the bytes, less the sink slot."""
    state = spec.state_bytes(tp=settings.tp)
    if state == 0:
        return 0
    if settings.state_slots is not None:
        return settings.state_slots
    share = kv_bytes * settings.state_ratio / (1 + settings.state_ratio)
    return max(0, int(share / (state * (1 + settings.draft_tokens))) - 1)


def slots_bytes(spec: ModelSpec, slots: int, tp: int) -> int:
    """Bytes of the states of `slots` slots and the sink."""
    state = spec.state_bytes(tp=tp)
    return (slots + 1) * state if state else 0


def _windowed(spec: ModelSpec) -> list[Layer]:
    return [layer for layer in spec.layers if layer.kind in {Kind.SLIDING, Kind.CHUNKED}]


def _entry(layer: Layer, k_fmt: Format, v_fmt: Format, tp: int) -> int:
    return layer.k_bytes(k_fmt, tp) + layer.v_bytes(v_fmt, tp) + layer.index_bytes(k_fmt)


def _rate(spec: ModelSpec, settings: SGLang) -> float:
    k_fmt, v_fmt = spec.formats(settings.kv_dtype, None, None)
    full = sum(
        _entry(layer, k_fmt, v_fmt, settings.tp)
        for layer in (*spec.layers, *(spec.draft_layers if settings.draft_tokens else ()))
        if layer.kind in {Kind.FULL, Kind.LATENT}
    )
    if any(layer.kind is Kind.COMPRESSED for layer in spec.layers):
        raise ConfigError(f"SGLang's pools for the compressed layers of a {spec.architecture} are not known here")
    return full + settings.window_ratio * sum(_entry(layer, k_fmt, v_fmt, settings.tp) for layer in _windowed(spec))

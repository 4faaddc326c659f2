"""Decoders that mix full attention with sliding windows or chunks; heads and dims may differ by kind."""

from __future__ import annotations

from dataclasses import replace

from kvsteward.errors import ConfigError
from kvsteward.ledger.families.base import (
    Family,
    Layers,
    draft_like_last_growing,
    full,
    head_dim,
    kv_heads,
    layer_count,
)
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.reading import Reader, whole

_KINDS = {
    "full_attention": Kind.FULL,
    "global_attention": Kind.FULL,
    "attention": Kind.FULL,
    "full": Kind.FULL,
    "sliding_attention": Kind.SLIDING,
    "sliding_window_attention": Kind.SLIDING,
    "local_attention": Kind.SLIDING,
    "chunked_attention": Kind.CHUNKED,
}


def window(reader: Reader) -> int:
    return reader.count("sliding_window", "sliding_window_size")


def binding_window(reader: Reader) -> int | None:
    """The window, or None when none is set or it can never bind (as long as the longest context)."""
    tokens = reader.optional_count("sliding_window", "sliding_window_size", least=1)
    longest = reader.optional_count("max_position_embeddings")
    if tokens is None or reader.flag("use_sliding_window") is False:
        return None
    if longest is not None and tokens >= longest:
        reader.assume("sliding_window", None, f"the window of {tokens} covers the longest context: full attention")
        return None
    return tokens


def layer_types(reader: Reader, *, key: str = "layer_types") -> list[str] | None:
    """`layer_types`, one word a layer, or None. ConfigError if its length is not the layer count."""
    words = reader.sequence(key)
    if words is None:
        return None
    count = layer_count(reader) if reader.has("num_hidden_layers", "n_layer", "num_layers") else len(words)
    if len(words) < count:
        raise ConfigError(f"{reader.name(key)} names {len(words)} layers of {count}", param=reader.name(key))
    return [str(word) for word in words[:count]]


def by_types(reader: Reader) -> Layers:
    """Full and sliding or chunked layers as `layer_types` names them; without it, see `all_sliding`."""
    words = layer_types(reader)
    if words is None:
        return all_sliding(reader)
    base = full(reader)
    return tuple(typed(reader, base, word) for word in words)


def typed(reader: Reader, base: Layer, word: str) -> Layer:
    kind = _KINDS.get(word)
    if kind is None:
        raise ConfigError(f"unknown layer type {word!r} in {reader.name('layer_types')}")
    if kind is Kind.SLIDING:
        return replace(base, kind=kind, span_tokens=window(reader))
    if kind is Kind.CHUNKED:
        return replace(base, kind=kind, span_tokens=reader.count("attention_chunk_size"))
    return base


def all_sliding(reader: Reader) -> Layers:
    """Mistral's way: a window, if set and binding, holds for every layer."""
    base = full(reader)
    tokens = binding_window(reader)
    if tokens is not None:
        base = replace(base, kind=Kind.SLIDING, span_tokens=tokens)
    return (base,) * layer_count(reader)


def qwen2(reader: Reader) -> Layers:
    """Qwen2: a window, if used, holds from layer `max_window_layers` on."""
    if reader.has("layer_types"):
        return by_types(reader)
    base, count, tokens = full(reader), layer_count(reader), None
    if reader.flag("use_sliding_window"):
        tokens = binding_window(reader)
    if tokens is None:
        return (base,) * count
    first = min(count, reader.count_or(count, "absent: no layer slides", "max_window_layers", least=0))
    return (base,) * first + (replace(base, kind=Kind.SLIDING, span_tokens=tokens),) * (count - first)


def patterned(default: int, *, full_at: int = -1) -> Family:
    """Every `sliding_window_pattern`-th layer is full, the others slide (Gemma 2: 2, Gemma 3: 6, Cohere 2: 4)."""

    def layers(reader: Reader) -> Layers:
        if reader.has("layer_types"):
            return by_types(reader)
        count, base = layer_count(reader), full(reader)
        why = "absent: the pattern of this architecture's class"
        period = reader.count_or(default, why, "sliding_window_pattern", "_sliding_window_pattern")
        sliding = replace(base, kind=Kind.SLIDING, span_tokens=window(reader))
        return tuple(base if index % period == full_at % period else sliding for index in range(count))

    return Family(layers, draft_like_last_growing)


def exaone4(reader: Reader) -> Layers:
    """EXAONE 4: `sliding_window_pattern` as letters, L local and G global, repeated."""
    if reader.has("layer_types"):
        return by_types(reader)
    pattern = reader.text("sliding_window_pattern")
    if not pattern or not reader.has("sliding_window"):
        return (full(reader),) * layer_count(reader)
    base = full(reader)
    sliding = replace(base, kind=Kind.SLIDING, span_tokens=window(reader))
    return tuple(base if pattern[i % len(pattern)] == "G" else sliding for i in range(layer_count(reader)))


def gemma4(reader: Reader) -> Layers:
    """Gemma 4 and 3n: own dims and heads for full layers; the last `num_kv_shared_layers` keep nothing of their own."""
    words = layer_types(reader)
    if words is None:
        raise ConfigError(f"no {reader.name('layer_types')}", param=reader.name("layer_types"))
    local = full(reader)
    wide = reader.optional_count("global_head_dim", least=1) or local.k_dim
    heads = reader.optional_count("num_global_key_value_heads", least=1) or local.kv_heads  # null: as the others
    globe = Layer(Kind.FULL, kv_heads=heads, k_dim=wide, v_dim=wide)
    layers = tuple(typed(reader, globe if _KINDS.get(word) is Kind.FULL else local, word) for word in words)
    return _share_tail(layers, reader.optional_count("num_kv_shared_layers") or 0)


def llama4(reader: Reader) -> Layers:
    """Llama 4: chunked attention where RoPE is used; every `nope_layer_interval`-th layer has none and is full."""
    if reader.has("layer_types"):
        return by_types(reader)
    base, count = full(reader), layer_count(reader)
    if not reader.has("attention_chunk_size"):
        return (base,) * count
    chunked = replace(base, kind=Kind.CHUNKED, span_tokens=reader.count("attention_chunk_size"))
    rope = reader.sequence("no_rope_layers")
    if rope:
        if len(rope) < count:
            raise ConfigError(f"{reader.name('no_rope_layers')} names {len(rope)} layers of {count}")
        return tuple(chunked if whole(flag, reader.name("no_rope_layers")) else base for flag in rope[:count])
    period = reader.count_or(4, "absent: the default of the Llama 4 class", "nope_layer_interval")
    return tuple(base if (index + 1) % period == 0 else chunked for index in range(count))


def mimo(reader: Reader) -> Layers:
    """MiMo-V2: `hybrid_layer_pattern` 1 = sliding with `swa_*` heads and dims; K and V dims differ."""
    pattern = reader.sequence("hybrid_layer_pattern")
    if pattern is None:
        return uniform_or_windows(reader)
    dim, heads = head_dim(reader), kv_heads(reader)
    v_dim = reader.count_or(dim, "absent: as the keys", "v_head_dim")
    globe = Layer(Kind.FULL, kv_heads=heads, k_dim=dim, v_dim=v_dim)
    same = "absent: as in the full layers"
    local = Layer(
        Kind.SLIDING,
        kv_heads=reader.count_or(heads, same, "swa_num_key_value_heads"),
        k_dim=reader.count_or(dim, same, "swa_head_dim"),
        v_dim=reader.count_or(v_dim, same, "swa_v_head_dim"),
        span_tokens=window(reader),
    )
    count = layer_count(reader)
    if len(pattern) < count:
        raise ConfigError(f"{reader.name('hybrid_layer_pattern')} names {len(pattern)} layers of {count}")
    return tuple(local if whole(flag, reader.name("hybrid_layer_pattern")) else globe for flag in pattern[:count])


def uniform_or_windows(reader: Reader) -> Layers:
    """By `layer_types`, else by a pattern, else one window (or none) for all layers."""
    if reader.has("layer_types"):
        return by_types(reader)
    if reader.has("sliding_window_pattern") and reader.has("sliding_window"):
        return patterned(1).layers(reader)
    return all_sliding(reader)


def sparse_gqa(reader: Reader) -> Layers:
    """MiniMax-M3: GQA, and in the sparse layers one index key a token."""
    base, count = full(reader), layer_count(reader)
    sparse = reader.sub("sparse_attention_config")
    if sparse is None or not sparse.flag("use_sparse_attention"):
        return (base,) * count
    freq = sparse.sequence("sparse_attention_freq")
    if freq is None or len(freq) < count:
        raise ConfigError(f"no {sparse.name('sparse_attention_freq')} for each of the {count} layers")
    indexed = replace(base, index_dim=sparse.count("sparse_index_dim"))
    return tuple(indexed if whole(flag, sparse.name("sparse_attention_freq")) else base for flag in freq[:count])


def _share_tail(layers: Layers, shared: int) -> Layers:
    if shared >= len(layers):
        raise ConfigError(f"num_kv_shared_layers {shared} leaves no layer of {len(layers)} with a cache")
    keep = len(layers) - shared
    return (*layers[:keep], *(replace(layer, kind=Kind.SHARED) for layer in layers[keep:]))


_ONE_WINDOW = ("mistral", "mistral3", "mixtral", "phi3", "phimoe", "starcoder2", "gpt_oss")
_QWEN = (
    "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_audio", "dream",
    "qwen2_5_omni_text", "qwen2_5_omni_talker", "qwen3", "qwen3_moe", "qwen3_asr_text", "qwen3_omni_moe_text",
)  # fmt: skip
_GEMMA3 = patterned(6)
TABLE: dict[str, Family] = {
    **dict.fromkeys(_ONE_WINDOW, Family(uniform_or_windows, draft_like_last_growing)),
    **dict.fromkeys(("smallthinker", "step3p5", "laguna"), Family(by_types, draft_like_last_growing)),
    **dict.fromkeys(_QWEN, Family(qwen2, draft_like_last_growing)),
    "gemma2": patterned(2, full_at=1),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "cohere2": patterned(4),
    "olmo3": patterned(4),
    "exaone4": Family(exaone4, draft_like_last_growing),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma3n", "gemma3n_text"), Family(gemma4)),
    **dict.fromkeys(("llama4", "llama4_text"), Family(llama4)),
    **dict.fromkeys(("mimo", "mimo_v2", "mimo_v2_flash"), Family(mimo, draft_like_last_growing)),
    "minimax_m3": Family(sparse_gqa, draft_like_last_growing),
}

"""Decoders that keep a latent instead of keys and values: MLA, MLA with a sparse indexer, DeepSeek-V4's compression.

Sources: DeepSeek-V2 (MLA, section 2.1), DeepSeek-V3.2 (lightning indexer), the models' configs.
"""

from __future__ import annotations

from dataclasses import replace

from kvsteward.errors import ConfigError
from kvsteward.ledger.families.base import Family, Layers, draft_like_last_growing, layer_count, mtp_count
from kvsteward.ledger.families.windows import layer_types, window
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.reading import Reader, whole


def latent_layer(reader: Reader) -> Layer:
    """`kv_lora_rank + qk_rope_head_dim` numbers a token, once."""
    rank, rope = reader.count("kv_lora_rank"), reader.count("qk_rope_head_dim")
    return Layer(Kind.LATENT, kv_heads=1, k_dim=rank + rope, rope_dim=rope, expanded=_expanded(reader, rope))


def _expanded(reader: Reader, rope: int) -> tuple[int, int, int] | None:
    """Heads and dims of the keys and values that the latent expands to, where the config tells them."""
    heads = reader.optional_count("num_attention_heads", least=1)
    nope, value = reader.optional_count("qk_nope_head_dim"), reader.optional_count("v_head_dim", least=1)
    if heads is None or nope is None or value is None:
        return None
    return heads, nope + rope, value


def mla(reader: Reader) -> Layers:
    return (latent_layer(reader),) * layer_count(reader)


def twice(reader: Reader) -> Layers:
    """LongCat-Flash: two attentions in each of `num_layers` blocks."""
    return mla(reader) * 2


def indexed(reader: Reader) -> Layers:
    """MLA with an index key per token; layers that `indexer_types` calls shared use another layer's index."""
    base, count = latent_layer(reader), layer_count(reader)
    with_index = replace(base, index_dim=reader.count("index_head_dim"))
    words = layer_types(reader, key="indexer_types")
    if words is None:
        return (with_index,) * count
    unknown = set(words) - {"full", "shared"}
    if unknown:
        raise ConfigError(f"unknown indexer type {sorted(unknown)[0]!r} in {reader.name('indexer_types')}")
    return tuple(with_index if word == "full" else base for word in words)


def compressed(reader: Reader) -> Layers:
    """DeepSeek-V4: each layer a window of shared KV; ratio 4 adds compressed entries and an index, 128 only entries."""
    ratios = reader.sequence("compress_ratios")
    count = layer_count(reader)
    if ratios is None or len(ratios) < count:
        raise ConfigError(f"no {reader.name('compress_ratios')} for each of the {count} layers")
    return tuple(_compressed_layer(reader, ratio) for ratio in ratios[:count])


def _compressed_layer(reader: Reader, value: object) -> Layer:
    ratio = whole(value, reader.name("compress_ratios"))
    return Layer(
        Kind.COMPRESSED,
        kv_heads=1,
        k_dim=reader.count("head_dim"),
        rope_dim=reader.count("qk_rope_head_dim"),
        span_tokens=window(reader),
        ratio=ratio,
        index_dim=reader.count("index_head_dim") if ratio == _INDEXED_RATIO else 0,
    )


_INDEXED_RATIO = 4


def compressed_draft(reader: Reader, _layers: Layers) -> Layers:
    """The ratio that follows those of the decoder layers is the draft's."""
    ratios = reader.sequence("compress_ratios") or []
    rest = ratios[layer_count(reader) :][: mtp_count(reader)]
    return tuple(_compressed_layer(reader, ratio) for ratio in rest)


_MLA = Family(mla, draft_like_last_growing)
_INDEXED = Family(indexed, draft_like_last_growing)
_COMPRESSED = Family(compressed, compressed_draft)
_MLA_NAMES = (
    "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "minicpm3", "MiniCPM3ForCausalLM", "glm4_moe_lite",
    "youtu_llm",
)  # fmt: skip
TABLE: dict[str, Family] = {
    **dict.fromkeys(_MLA_NAMES, _MLA),
    "longcat_flash": Family(twice, draft_like_last_growing),
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "deepseek_v4": _COMPRESSED,
    "deepseek_ref": _COMPRESSED,
}

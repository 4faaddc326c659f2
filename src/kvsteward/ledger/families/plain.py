"""Decoders in which every layer is the same full attention: MHA, GQA, MQA, and the flags that mean MQA."""

from __future__ import annotations

from kvsteward.errors import ConfigError
from kvsteward.ledger.families.base import (
    Family,
    Layers,
    draft_like_last_growing,
    full,
    head_dim,
    layer_count,
    query_heads,
)
from kvsteward.ledger.families.windows import uniform_or_windows
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.reading import Reader

_OTHER_STATE = (
    "kv_lora_rank", "ssm_state_size", "state_size", "ssm_cfg", "mamba_d_state", "mb_per_layer", "conv_L_cache",
    "linear_num_value_heads", "linear_attn_config", "compress_ratios", "attention_chunk_size", "attn_type_list",
    "hybrid_override_pattern", "hybrid_layer_pattern", "hybrid_layer_ids", "layers_block_type", "block_types",
    "attn_layer_period", "attn_layer_indices", "full_attn_idxs", "cross_attention_layers", "num_kv_shared_layers",
    "global_head_dim", "index_head_dim", "sparse_attention_config",
)  # fmt: skip


def uniform(reader: Reader) -> Layers:
    return (full(reader),) * layer_count(reader)


def falcon(reader: Reader) -> Layers:
    """falcon-7b says `num_kv_heads` 71 *and* `multi_query`: only the new decoder architecture uses the count."""
    if reader.flag("new_decoder_architecture"):
        return uniform(reader)
    if reader.flag("multi_query"):
        return _heads(reader, 1)
    return _heads(reader, query_heads(reader))


def bigcode(reader: Reader) -> Layers:
    """GPT-BigCode: `multi_query` (default true in its class) is one KV head."""
    multi = reader.flag("multi_query")
    if multi is None:
        multi = reader.assume("multi_query", True, "absent: the default of the GPT-BigCode class")
    return _heads(reader, 1 if multi else query_heads(reader))


def chatglm(reader: Reader) -> Layers:
    """ChatGLM: `multi_query_attention` with `multi_query_group_num` KV heads."""
    groups = reader.count("multi_query_group_num") if reader.flag("multi_query_attention") else query_heads(reader)
    return _heads(reader, groups)


def nested_kv(key: str) -> Family:
    """MPT and DBRX keep `kv_n_heads` in a dict of their own."""

    def layers(reader: Reader) -> Layers:
        sub = reader.sub(key)
        heads = sub.optional_count("kv_n_heads", least=1) if sub is not None else None
        if heads is None:
            heads = reader.assume(f"{key}.kv_n_heads", query_heads(reader), "absent: one KV head per query head (MHA)")
        return _heads(reader, heads)

    return Family(layers)


def unknown(reader: Reader) -> Family:
    """A model type that no table names: read as a plain decoder if nothing in the config speaks against it."""
    name = reader.text("model_type") or "(none)"
    found = [key for key in _OTHER_STATE if reader.has(key)]
    if found:
        raise ConfigError(
            f"unknown architecture {name!r} with {', '.join(found)}: its cache is not that of a plain decoder",
            hint="Its per-layer state must be known before its memory can be computed; please report the config.",
            param=reader.name("model_type"),
        )
    if reader.flag("is_encoder_decoder"):
        raise ConfigError(f"unknown encoder-decoder architecture {name!r}", param=reader.name("model_type"))
    reader.assume("model_type", name, "unknown architecture, read as a plain decoder with full attention")
    return Family(uniform_or_windows, draft_like_last_growing)


def encoder_only(reader: Reader) -> Layers:
    name = reader.text("model_type")
    raise ConfigError(
        f"{name!r} is an encoder: it keeps no key-value cache between tokens",
        hint="Only models that generate text have a KV cache.",
    )


def _heads(reader: Reader, heads: int) -> Layers:
    dim = head_dim(reader)
    return (Layer(Kind.FULL, kv_heads=heads, k_dim=dim, v_dim=dim),) * layer_count(reader)


_UNIFORM = (
    "llama", "gpt2", "gpt_neox", "gptj", "gpt_neo", "opt", "bloom", "phi", "phi-msft", "qwen", "baichuan", "internlm",
    "internlm2", "internlm3", "stablelm", "stablelm_epoch", "gemma", "granite", "granitemoe", "olmo", "olmo2", "olmoe",
    "minicpm", "minimax_m2", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "molmo", "glm", "glm4",
    "glm4v", "glm4v_text", "glm4_moe", "glm4v_moe", "glm4v_moe_text", "nemotron", "yi", "aquila", "ministral3",
    "exaone", "persimmon", "hunyuan_v1_dense", "ernie4_5", "ernie4_5_moe", "smollm3", "arcee", "seed_oss", "dots1",
    "apertus", "llava_llama", "cohere", "arctic", "bitnet", "bitnet-25", "codegen", "helium", "solar", "mobilellm",
)  # fmt: skip
_ENCODERS = (
    "bert", "roberta", "xlm-roberta", "distilbert", "nomic_bert", "modernbert", "clip", "siglip", "vit",
)  # fmt: skip

TABLE: dict[str, Family] = {
    **dict.fromkeys(_UNIFORM, Family(uniform, draft_like_last_growing)),
    **dict.fromkeys(_ENCODERS, Family(encoder_only)),
    "falcon": Family(falcon),
    "RefinedWebModel": Family(falcon),
    "gpt_bigcode": Family(bigcode),
    "chatglm": Family(chatglm),
    "mpt": nested_kv("attn_config"),
    "dbrx": nested_kv("attn_config"),
}

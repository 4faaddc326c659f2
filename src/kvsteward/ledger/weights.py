"""Counting a decoder's parameters from its config: linear layers, embeddings, and the small rest.

Knows plain, mixture-of-experts and MLA decoders of the families in `_SHAPES`; gives None for others rather than a
guess. Vision and audio towers are not counted. Source: the models' definitions in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsteward.ledger.reading import Reader
from kvsteward.ledger.spec import Weights


@dataclass(frozen=True, slots=True)
class _Shape:
    """What differs between families: gated MLP, norms per layer, biases, query-key norms, tied embeddings."""

    gated: bool = True
    norms: int = 2
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    norm_scale: int = 1
    mlp_bias: bool = False
    out_bias: bool = False


_LLAMA = _Shape()
_QWEN3 = _Shape(qk_norm=True)
_SHAPES: dict[str, _Shape] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "internlm2", "baichuan", "phi3", "ministral3", "minicpm"), _LLAMA),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _LLAMA),
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_text"), _Shape(qkv_bias=True)),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_asr_text"), _QWEN3),
    "gemma": _Shape(tied=True),
    "gemma2": _Shape(norms=4, tied=True),
    "gemma3_text": _Shape(norms=4, tied=True, qk_norm=True),
    "gpt2": _Shape(gated=False, norm_scale=2, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True),
}


def count_parameters(reader: Reader) -> Weights | None:
    """The parameters of the decoder that `reader` describes, or None if its family is not known here."""
    shape = _SHAPES.get(reader.text("model_type") or "")
    hidden = reader.optional_count("hidden_size", "n_embd")
    layers = reader.optional_count("num_hidden_layers", "n_layer")
    vocab = reader.optional_count("vocab_size")
    if shape is None or not hidden or not layers or not vocab:
        return None
    attention = _latent_attention(reader, hidden) if reader.has("kv_lora_rank") else _attention(reader, hidden, shape)
    mlps = [_mlp(reader, hidden, index, shape) for index in range(layers)]
    if attention is None or any(mlp is None for mlp in mlps):
        return None
    linear = layers * attention[0] + sum(mlp[0] for mlp in mlps if mlp)
    active = layers * attention[0] + sum(mlp[2] for mlp in mlps if mlp)
    norms = (layers * shape.norms + 1) * hidden * shape.norm_scale
    other = layers * attention[1] + sum(mlp[1] for mlp in mlps if mlp) + norms
    tied = reader.flag("tie_word_embeddings")
    heads = 1 if (shape.tied if tied is None else tied) else 2
    positions = (reader.optional_count("n_positions") or 0) * hidden if shape.norm_scale == 2 else 0
    embedding = heads * vocab * hidden + positions
    return Weights(linear=linear, embedding=embedding, other=other, active_linear=active)


def _attention(reader: Reader, hidden: int, shape: _Shape) -> tuple[int, int] | None:
    heads = reader.optional_count("num_attention_heads", "n_head", least=1)
    if not heads:
        return None
    kv = reader.optional_count("num_key_value_heads", least=1) or heads
    dim = reader.optional_count("head_dim", least=1) or hidden // heads
    linear = 2 * hidden * heads * dim + 2 * hidden * kv * dim
    bias = (heads + 2 * kv) * dim if shape.qkv_bias or reader.flag("attention_bias") else 0
    out = hidden if shape.out_bias or reader.flag("attention_bias") else 0
    return linear, bias + out + (2 * dim if shape.qk_norm else 0)


def _latent_attention(reader: Reader, hidden: int) -> tuple[int, int] | None:
    """MLA: down and up projections of queries (or one) and of the latent, and the output."""
    keys = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    found = [reader.optional_count(key, least=1) for key in keys]
    if None in found:
        return None
    heads, rank, rope, nope, value = (number or 0 for number in found)
    q_rank = reader.optional_count("q_lora_rank") or 0
    width = heads * (nope + rope)
    queries = hidden * q_rank + q_rank * width if q_rank else hidden * width
    linear = queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    return linear, q_rank + rank


def _mlp(reader: Reader, hidden: int, index: int, shape: _Shape) -> tuple[int, int, int] | None:
    """Linear parameters, others, and the linear ones of one token."""
    matrices = 3 if shape.gated else 2
    experts = reader.optional_count("n_routed_experts", "num_experts", "num_local_experts") or 0
    if experts and index >= (reader.optional_count("first_k_dense_replace") or 0):
        width = reader.optional_count("moe_intermediate_size", "intermediate_size", least=1)
        if not width:
            return None
        shared = (reader.optional_count("n_shared_experts") or 0) * width
        bias = experts if reader.text("topk_method") == "noaux_tc" else 0
        chosen = reader.optional_count("num_experts_per_tok", "num_experts_per_token", "moe_topk") or experts
        one = matrices * hidden * width
        return (
            experts * one + matrices * hidden * shared,
            hidden * experts + bias,
            chosen * one + matrices * hidden * shared,
        )
    width = reader.optional_count("intermediate_size", "n_inner", least=1)
    if width is None and not shape.gated:
        width = 4 * hidden
    if not width:
        return None
    size = matrices * hidden * width
    return size, (width + hidden if shape.mlp_bias else 0), size

"""Decoders with a state that does not grow: Mamba, Mamba-2, gated delta nets, Kimi's KDA, short convolutions.

State shapes: Mamba `intermediate x (d_conv - 1)` and `intermediate x d_state`; Mamba-2 `(intermediate + 2 groups
state) x (d_conv - 1)` and `heads x head_dim x state`; a delta net `(2 key + value width) x (d_conv - 1)` and
`value heads x key dim x value dim`. The recurrent part is kept in the dtype that the config names (else the model's).
"""

from __future__ import annotations

from dataclasses import replace

from kvsteward.errors import ConfigError
from kvsteward.ledger.families.base import Family, Layers, draft_like_last_growing, full, layer_count
from kvsteward.ledger.families.latent import latent_layer
from kvsteward.ledger.families.windows import layer_types, typed
from kvsteward.ledger.formats import get
from kvsteward.ledger.layers import Kind, Layer, StateTensor
from kvsteward.ledger.reading import Reader, whole

_NOTHING = Layer(Kind.NONE)


def state_dtype(reader: Reader) -> str:
    """The recurrent state's dtype: named in the config, else the model's (vLLM's `auto`)."""
    named = reader.text("mamba_ssm_dtype", "mamba_ssm_cache_dtype", "ssm_dtype")
    return get(named).name if named else model_dtype(reader)


def model_dtype(reader: Reader) -> str:
    named = reader.text("torch_dtype", "dtype")
    return get(named).name if named else "bf16"


def mamba(reader: Reader) -> Layer:
    hidden = reader.count("hidden_size", "d_model")
    inner = reader.optional_count("intermediate_size", least=1) if reader.has("state_size") else None
    if inner is None:
        inner = hidden * reader.count_or(2, "absent: the default of the Mamba class", "mamba_expand", "expand")
    conv = reader.count("mamba_d_conv", "conv_kernel", "d_conv") - 1
    state = reader.count("mamba_d_state", "state_size", "d_state")
    parts = (
        StateTensor("conv", inner, conv, model_dtype(reader), conv),
        StateTensor("ssm", inner, state, state_dtype(reader)),
    )
    return Layer(Kind.STATE, state=parts)


def mamba2(reader: Reader) -> Layer:
    heads = reader.count("mamba_num_heads", "mamba_n_heads", "num_heads")
    dim = reader.count("mamba_head_dim", "mamba_d_head", "head_dim")
    state = reader.count("ssm_state_size", "mamba_d_state", "state_size")
    groups = reader.count("n_groups", "mamba_n_groups")
    conv = reader.count("conv_kernel", "mamba_d_conv") - 1
    parts = (
        StateTensor("conv x", heads, dim * conv, model_dtype(reader), conv),
        StateTensor("conv B, C", groups, 2 * state * conv, model_dtype(reader), conv),
        StateTensor("ssm", heads, dim * state, state_dtype(reader)),
    )
    return Layer(Kind.STATE, state=parts)


def delta_net(reader: Reader) -> Layer:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5)."""
    k_heads, v_heads = reader.count("linear_num_key_heads"), reader.count("linear_num_value_heads")
    k_dim, v_dim = reader.count("linear_key_head_dim"), reader.count("linear_value_head_dim")
    conv = reader.count("linear_conv_kernel_dim") - 1
    parts = (
        StateTensor("conv q, k", k_heads, 2 * k_dim * conv, model_dtype(reader), conv),
        StateTensor("conv v", v_heads, v_dim * conv, model_dtype(reader), conv),
        StateTensor("ssm", v_heads, k_dim * v_dim, state_dtype(reader)),
    )
    return Layer(Kind.STATE, state=parts)


def with_delta_net(reader: Reader) -> Layers:
    """Linear layers, and a full one every `full_attention_interval` where `layer_types` does not name them."""
    words = layer_types(reader)
    if words is None:
        period, count = reader.count("full_attention_interval"), layer_count(reader)
        words = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(count)]
    linear, base = delta_net(reader), full(reader)
    return tuple(linear if word == "linear_attention" else typed(reader, base, word) for word in words)


_NEMOTRON_WORDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(reader: Reader) -> Layers:
    """Nemotron-H: a pattern of letters or `layers_block_type`; MLP and expert layers keep nothing."""
    words = reader.sequence("layers_block_type")
    if words is None:
        pattern = reader.text("hybrid_override_pattern")
        if not pattern:
            raise ConfigError(
                f"no {reader.name('hybrid_override_pattern')} and no layers_block_type: which layers attend is unknown"
            )
        words = [_NEMOTRON_WORDS.get(letter, letter) for letter in pattern]
    kinds = {"mamba": mamba2(reader), "attention": full(reader), "mlp": _NOTHING, "moe": _NOTHING}
    return tuple(_named(kinds, str(word), reader.name("layers_block_type")) for word in words)


def nemotron_draft(reader: Reader, layers: Layers) -> Layers:
    """One full attention layer per MTP module."""
    return draft_like_last_growing(reader, layers)


def jamba(reader: Reader) -> Layers:
    """Jamba: attention every `attn_layer_period` layers from `attn_layer_offset` on, Mamba otherwise."""
    period, offset = reader.count("attn_layer_period"), reader.optional_count("attn_layer_offset") or 0
    state, base = mamba(reader), full(reader)
    return tuple(base if index % period == offset else state for index in range(layer_count(reader)))


def all_mamba(reader: Reader) -> Layers:
    return (mamba(reader),) * layer_count(reader)


def all_mamba2(reader: Reader) -> Layers:
    return (mamba2(reader),) * layer_count(reader)


def parallel_hybrid(reader: Reader) -> Layers:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    return (replace(full(reader), state=mamba2(reader).state),) * layer_count(reader)


def attention_at(key: str) -> Family:
    """Bamba and Granite hybrid: Mamba-2, with attention at the places that `key` or `layer_types` names."""

    def layers(reader: Reader) -> Layers:
        state, base, count = mamba2(reader), full(reader), layer_count(reader)
        words = layer_types(reader)
        if words is not None:
            return tuple(_named({"mamba": state, "attention": base}, word, "layer_types") for word in words)
        places = reader.sequence(key)
        if places is None:
            raise ConfigError(f"no {reader.name(key)} and no layer_types: which layers attend is unknown")
        chosen = {whole(place, reader.name(key)) for place in places}
        return tuple(base if index in chosen else state for index in range(count))

    return Family(layers)


def short_conv(reader: Reader) -> Layers:
    """LFM2: gated short convolutions that keep `conv_L_cache` inputs, and full attention."""
    words = layer_types(reader)
    if words is None:
        places = {whole(i, reader.name("full_attn_idxs")) for i in reader.sequence("full_attn_idxs") or []}
        if not places:
            raise ConfigError(f"no {reader.name('layer_types')}: which layers attend is unknown")
        words = ["full_attention" if i in places else "conv" for i in range(layer_count(reader))]
    width = reader.optional_count("conv_dim", least=1) or reader.count("hidden_size")
    taps = reader.count("conv_L_cache") - 1
    conv = Layer(Kind.STATE, state=(StateTensor("conv", width, taps, model_dtype(reader), taps),))
    base = full(reader)
    return tuple(conv if word == "conv" else typed(reader, base, word) for word in words)


def kimi_linear(reader: Reader) -> Layers:
    """Kimi Linear and K3: KDA layers with a state per head, MLA layers with a latent. Layer numbers start at 1."""
    linear = reader.sub("linear_attn_config")
    if linear is None:
        raise ConfigError(f"no {reader.name('linear_attn_config')}", param=reader.name("linear_attn_config"))
    heads, dim = linear.count("num_heads"), linear.count("head_dim")
    conv = linear.count("short_conv_kernel_size") - 1
    dtype = model_dtype(reader)
    parts = (
        StateTensor("conv q, k, v", heads, 3 * dim * conv, dtype, conv),
        StateTensor("ssm", heads, dim * dim, "f32"),
    )
    reader.assume("linear_attn_config.state_dtype", "f32", "absent: KDA kernels keep the state in fp32")
    full_at = {whole(i, linear.name("full_attn_layers")) for i in linear.sequence("full_attn_layers") or []}
    if not full_at:
        raise ConfigError(f"no {linear.name('full_attn_layers')}", param=linear.name("full_attn_layers"))
    latent, state = latent_layer(reader), Layer(Kind.STATE, state=parts)
    return tuple(latent if index + 1 in full_at else state for index in range(layer_count(reader)))


def lightning(reader: Reader) -> Layers:
    """MiniMax-Text-01 and M1: `attn_type_list` 0 is lightning attention, a key x value state per head in fp32."""
    words, base = reader.sequence("attn_type_list"), full(reader)
    count = layer_count(reader)
    if words is None or len(words) < count:
        raise ConfigError(f"no {reader.name('attn_type_list')} for each of the {count} layers")
    heads = reader.count("num_attention_heads")
    state = Layer(Kind.STATE, state=(StateTensor("state", heads, base.k_dim * base.v_dim, "f32"),))
    return tuple(base if whole(word, reader.name("attn_type_list")) else state for word in words[:count])


def _named(kinds: dict[str, Layer], word: str, key: str) -> Layer:
    if word not in kinds:
        raise ConfigError(f"unknown layer type {word!r} in {key}", param=key)
    return kinds[word]


_DELTA = Family(with_delta_net, draft_like_last_growing)
TABLE: dict[str, Family] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _DELTA),
    "nemotron_h": Family(nemotron_h, nemotron_draft),
    "jamba": Family(jamba),
    "mamba": Family(all_mamba),
    "falcon_mamba": Family(all_mamba),
    "mamba2": Family(all_mamba2),
    "falcon_h1": Family(parallel_hybrid),
    "bamba": attention_at("attn_layer_indices"),
    "granitemoehybrid": attention_at("attn_layer_indices"),
    "lfm2": Family(short_conv),
    **dict.fromkeys(("minimax_text_01", "minimax_m1", "minimax"), Family(lightning)),
    "lfm2_moe": Family(short_conv),
    "kimi_linear": Family(kimi_linear, draft_like_last_growing),
}

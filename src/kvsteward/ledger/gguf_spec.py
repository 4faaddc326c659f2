"""From a GGUF file's key-value pairs to a ModelSpec, as llama.cpp reads them.

Knows llama.cpp's key names and its per-architecture window patterns. Invariant: as for `hf`, a value is in the file,
or assumed and listed, or a ConfigError names it. `auto` means f16, llama.cpp's default cache type.

Source: `llama_model::load_hparams` and `llama_hparams` (n_embd_k_gqa, n_embd_r, n_embd_s) of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvsteward.errors import ConfigError
from kvsteward.ledger.gguf import Header
from kvsteward.ledger.layers import Kind, Layer, StateTensor
from kvsteward.ledger.reading import MAX_LAYERS, Reader, whole
from kvsteward.ledger.spec import ModelSpec, Weights

_WINDOW_PERIOD = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "llama4": 4, "exaone4": 4, "olmo2": 4,
    "exaone-moe": 4, "smallthinker": 4,
}  # fmt: skip
_IGNORES_WINDOW = frozenset({"phi3", "llama", "qwen2", "mistral3"})
_DELTA_NETS = frozenset({"qwen3next", "qwen35", "qwen35moe"})
_PARALLEL = frozenset({"falcon-h1", "hymba"})
_ENCODERS = frozenset({"bert", "nomic-bert", "jina-bert-v2", "t5encoder", "modern-bert", "clip"})


def read_header(header: Header) -> ModelSpec:
    """The spec of a parsed file, with its exact weight bytes."""
    spec = read_metadata(header.metadata)
    values = sum(tensor.values for tensor in header.tensors)
    return replace(spec, weights=Weights(linear=values, embedding=0, other=0, exact_bytes=header.weight_bytes))


def read_metadata(metadata: Mapping[str, Any]) -> ModelSpec:
    """The spec of a model from its key-value pairs. ConfigError names the key that is missing or makes no sense."""
    reader = Reader(metadata)
    arch = reader.text("general.architecture")
    if not arch:
        raise ConfigError("no general.architecture among the GGUF keys", param="general.architecture")
    if arch in _ENCODERS:
        raise ConfigError(f"{arch!r} is an encoder: it keeps no key-value cache between tokens")
    keys = _Keys(reader, arch)
    blocks = keys.count("block_count")
    draft = keys.optional("nextn_predict_layers") or 0
    if blocks > MAX_LAYERS or draft >= blocks:
        raise ConfigError(f"{arch}.block_count is {blocks}, of which {draft} predict ahead: no such model")
    layers = tuple(_layer(keys, index, blocks) for index in range(blocks))
    return ModelSpec(
        architecture=arch,
        layers=layers[: blocks - draft],
        hidden_size=keys.count("embedding_length"),
        attention_heads=keys.at("attention.head_count", 0, blocks) or 0,
        vocab_size=keys.optional("vocab_size") or 0,
        max_context_tokens=keys.optional("context_length"),
        dtype="f16",
        draft_layers=layers[blocks - draft :],
        assumed=tuple(dict.fromkeys(reader.assumed)),
    )


class _Keys:
    """The keys of one architecture; per-layer ones are a number or one number a layer."""

    def __init__(self, reader: Reader, arch: str) -> None:
        self.reader = reader
        self.arch = arch

    def count(self, key: str) -> int:
        return self.reader.count(f"{self.arch}.{key}")

    def optional(self, key: str, *, least: int = 0) -> int | None:
        return self.reader.optional_count(f"{self.arch}.{key}", least=least)

    def at(self, key: str, index: int, blocks: int) -> int | None:
        """The value for layer `index`, or None if the key is not there."""
        name = f"{self.arch}.{key}"
        value = self.reader.raw(name)
        if not isinstance(value, list):
            return None if value is None else whole(value, name)
        if len(value) < blocks:
            raise ConfigError(f"{name} has {len(value)} values for {blocks} layers", param=name)
        return whole(int(value[index]) if isinstance(value[index], bool) else value[index], name)

    def assume(self, key: str, value: int, reason: str) -> int:
        return self.reader.assume(f"{self.arch}.{key}", value, reason)


def _layer(keys: _Keys, index: int, blocks: int) -> Layer:
    if keys.optional("attention.kv_lora_rank") and keys.arch != "minicpm3":
        return _latent(keys)
    state = _state(keys)
    heads = keys.at("attention.head_count", index, blocks)
    kv_heads = keys.at("attention.head_count_kv", index, blocks)
    if kv_heads is None and heads:
        kv_heads = keys.assume("attention.head_count_kv", heads, "absent: one KV head per query head (MHA)")
    if state and _is_recurrent(keys, index, kv_heads):
        feed_forward = keys.at("feed_forward_length", index, blocks)
        is_mlp = isinstance(keys.reader.raw(f"{keys.arch}.feed_forward_length"), list) and feed_forward
        return Layer(Kind.NONE) if is_mlp and kv_heads == 0 else Layer(Kind.STATE, state=state)
    if not kv_heads or not heads:
        return _without_heads(keys, kv_heads)
    return replace(_attention(keys, index, blocks, heads, kv_heads), state=state if keys.arch in _PARALLEL else ())


def _without_heads(keys: _Keys, kv_heads: int | None) -> Layer:
    conv = keys.optional("shortconv.l_cache", least=1)
    if conv:
        width = keys.count("embedding_length")
        return Layer(Kind.STATE, state=(StateTensor("conv", width, conv - 1, "f32"),))
    if kv_heads == 0:
        return Layer(Kind.NONE)
    raise ConfigError(f"no {keys.arch}.attention.head_count", param=f"{keys.arch}.attention.head_count")


def _attention(keys: _Keys, index: int, blocks: int, heads: int, kv_heads: int) -> Layer:
    window = keys.optional("attention.sliding_window")
    sliding = bool(window) and keys.arch not in _IGNORES_WINDOW and _slides(keys, index, blocks)
    suffix = "_swa" if sliding and keys.optional("attention.key_length_swa", least=1) else ""
    k_dim = keys.optional(f"attention.key_length{suffix}", least=1)
    if k_dim is None:
        k_dim = keys.assume("attention.key_length", keys.count("embedding_length") // heads, "absent: width / heads")
    v_dim = keys.optional(f"attention.value_length{suffix}", least=1)
    if v_dim is None:
        v_dim = keys.assume("attention.value_length", k_dim, "absent: as the keys")
    kind = Kind.SLIDING if sliding else Kind.FULL
    if sliding and keys.arch == "llama4":
        kind = Kind.CHUNKED
    if index >= blocks - (keys.optional("attention.shared_kv_layers") or 0):
        kind = Kind.SHARED
    return Layer(kind, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, span_tokens=window or 0 if sliding else 0)


def _slides(keys: _Keys, index: int, blocks: int) -> bool:
    pattern = keys.reader.raw(f"{keys.arch}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return bool(keys.at("attention.sliding_window_pattern", index, blocks))
    period = keys.optional("attention.sliding_window_pattern", least=1) or _WINDOW_PERIOD.get(keys.arch)
    if period is None:
        raise ConfigError(
            f"{keys.arch} has a sliding window but no pattern of which layers slide",
            param=f"{keys.arch}.attention.sliding_window_pattern",
        )
    if pattern is None:
        keys.assume("attention.sliding_window_pattern", period, "absent: llama.cpp's pattern for this architecture")
    return index % period < period - 1


def _latent(keys: _Keys) -> Layer:
    rank, rope = keys.count("attention.kv_lora_rank"), keys.count("rope.dimension_count")
    index = keys.optional("attention.indexer.key_length") or 0
    return Layer(Kind.LATENT, kv_heads=1, k_dim=rank + rope, rope_dim=rope, index_dim=index)


def _state(keys: _Keys) -> tuple[StateTensor, ...]:
    """llama.cpp keeps both parts in f32: `(conv - 1) x (inner + 2 groups state)` and `state x inner` numbers."""
    inner = keys.optional("ssm.inner_size", least=1)
    if inner is None:
        return ()
    conv, state = keys.count("ssm.conv_kernel") - 1, keys.count("ssm.state_size")
    width = inner + 2 * (keys.optional("ssm.group_count") or 0) * state
    return (StateTensor("conv", width, conv, "f32"), StateTensor("ssm", inner, state, "f32"))


def _is_recurrent(keys: _Keys, index: int, kv_heads: int | None) -> bool:
    if keys.arch in _PARALLEL:
        return False
    if keys.arch in _DELTA_NETS:
        period = keys.optional("full_attention_interval", least=1)
        if period is None:
            period = keys.assume("full_attention_interval", 4, "absent: llama.cpp's default for this architecture")
        return (index + 1) % period != 0
    return not kv_heads

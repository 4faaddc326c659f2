"""From a Hugging Face `config.json` to a ModelSpec: finds the language model inside, picks its family's reader.

Knows file shapes, not engines. Invariant: an unknown architecture is read as a plain decoder only if it has every key
a plain decoder needs and none that says otherwise; that choice is on the list of assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvsteward.errors import ConfigError
from kvsteward.ledger import quantisation, weights
from kvsteward.ledger.families import FAMILIES, Family, plain
from kvsteward.ledger.formats import get
from kvsteward.ledger.layers import Kind
from kvsteward.ledger.reading import MAX_LAYERS, Reader
from kvsteward.ledger.spec import ModelSpec, Weights

_NESTED = ("text_config", "llm_config", "llm_cfg", "language_config", "thinker_config", "decoder", "text_model")
_LAYER_KEYS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "layers_block_type",
    "block_types",
)
_MAX_DEPTH = 4
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
        "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    "mistral": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "gemma3_text": {
        "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "intermediate_size": 9216, "vocab_size": 262208, "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
}  # fmt: skip
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "model_max_length",
)


def read_config(config: Mapping[str, Any], quant: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a model; `quant` is its `hf_quant_config.json`.

    ConfigError if it has no decoder or lacks a key that cannot be filled in.
    """
    if not isinstance(config, Mapping) or not config:
        raise ConfigError("the model config is empty or not a JSON object")
    outer = Reader(config)
    inner = _with_class_defaults(_language_model(outer))
    family = _family(outer, inner)
    layers = family.layers(inner)
    if not layers or len(layers) > MAX_LAYERS:
        raise ConfigError(f"a model cannot have {len(layers)} layers")
    if all(layer.kind is Kind.NONE for layer in layers):
        raise ConfigError("no layer of this model keeps anything between two tokens")
    dtype = _dtype(outer, inner)
    return ModelSpec(
        architecture=_model_type(inner) or _model_type(outer) or "unknown",
        layers=layers,
        hidden_size=inner.count("hidden_size", "d_model", "n_embd"),
        attention_heads=inner.optional_count("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
        or 0,
        vocab_size=inner.optional_count("vocab_size", "padded_vocab_size") or outer.optional_count("vocab_size") or 0,
        max_context_tokens=inner.optional_count(*_CONTEXT_KEYS, least=1),
        dtype=dtype,
        weights=_weights(outer, inner, quant),
        draft_layers=family.draft(inner, layers),
        encoder_tokens=family.encoder_tokens(inner),
        vision_tokens_per_image=_vision_tokens(outer),
        kv_dtype_hint=quantisation.kv_format(outer, inner, quant),
        assumed=tuple(inner.assumed),
    )


def _language_model(outer: Reader) -> Reader:
    reader = outer
    for _ in range(_MAX_DEPTH):
        if reader.has(*_LAYER_KEYS) and reader.sub("text_config") is None:
            return reader
        nested = next((sub for key in _NESTED if (sub := reader.sub(key)) is not None), None)
        if nested is None:
            return reader
        reader = nested
    return reader


def _with_class_defaults(reader: Reader) -> Reader:
    """A nested config is saved as the difference to its class: what it leaves out has the class's value."""
    defaults = _CLASS_DEFAULTS.get(_model_type(reader) or "") if reader.path else None
    if defaults is None:
        return reader
    absent = {key: value for key, value in defaults.items() if key not in reader.config}
    for key, value in absent.items():
        reader.assume(key, value, "absent from a nested config: the default of its transformers class")
    return Reader({**absent, **reader.config}, reader.path, reader.assumed)


def _family(outer: Reader, inner: Reader) -> Family:
    for reader in (inner, outer):
        family = FAMILIES.get(_model_type(reader) or "")
        if family is not None:
            return family
    for architecture in outer.sequence("architectures") or []:
        family = FAMILIES.get(str(architecture))
        if family is not None:
            return family
    return plain.unknown(inner)


def _model_type(reader: Reader) -> str | None:
    return reader.text("model_type")


def _dtype(outer: Reader, inner: Reader) -> str:
    for reader in (inner, outer):
        name = reader.text("torch_dtype", "dtype", "model_dtype")
        if name is not None and name != "auto":
            return get(name).name
    return str(inner.assume("torch_dtype", "bf16", "the config names no dtype; current checkpoints are bfloat16"))


def _weights(outer: Reader, inner: Reader, quant: Mapping[str, Any] | None) -> Weights | None:
    counted, fmt = weights.count_parameters(inner), quantisation.linear_format(outer, inner, quant)
    if counted is None or fmt is None:
        return counted
    inner.assume("quantization_config", fmt.name, "all linear layers are taken as quantised, embeddings and head not")
    return replace(counted, linear_format=fmt)


def _vision_tokens(outer: Reader) -> int | None:
    return outer.optional_count("vision_soft_tokens_per_image", "mm_tokens_per_image", "image_seq_length")

"""What a family of architectures must say about its config, and the helpers that several families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvsteward.errors import ConfigError
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.reading import MAX_LAYERS, Reader

Layers = tuple[Layer, ...]


def no_draft(_reader: Reader, _layers: Layers) -> Layers:
    return ()


def no_encoder(_reader: Reader) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Family:
    """`layers` reads the decoder, `draft` its built-in draft layers (MTP), `encoder_tokens` a fixed encoder length."""

    layers: Callable[[Reader], Layers]
    draft: Callable[[Reader, Layers], Layers] = no_draft
    encoder_tokens: Callable[[Reader], int] = no_encoder


def layer_count(reader: Reader) -> int:
    count = reader.count("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    if count > MAX_LAYERS:
        raise ConfigError(f"{reader.name('num_hidden_layers')} must be {MAX_LAYERS} or fewer, not {count}")
    return count


def query_heads(reader: Reader) -> int:
    return reader.count("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")


def kv_heads(reader: Reader) -> int:
    """`num_key_value_heads` by its many names; without one, one per query head (and that is an assumption)."""
    heads = reader.optional_count("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", least=1)
    if heads is not None:
        return heads
    return reader.assume("num_key_value_heads", query_heads(reader), "absent: one KV head per query head (MHA)")


def head_dim(reader: Reader) -> int:
    """`head_dim` by its names; without one, hidden size over heads, refused if that is not whole."""
    dim = reader.optional_count("head_dim", "attention_head_dim", "kv_channels", "d_kv", least=1)
    if dim is not None:
        return dim
    hidden = reader.count("hidden_size", "d_model", "n_embd")
    heads = query_heads(reader)
    if hidden % heads:
        raise ConfigError(f"no {reader.name('head_dim')}, and hidden size {hidden} is not a multiple of {heads} heads")
    return reader.assume("head_dim", hidden // heads, "absent: hidden size / attention heads")


def full(reader: Reader) -> Layer:
    dim = head_dim(reader)
    return Layer(Kind.FULL, kv_heads=kv_heads(reader), k_dim=dim, v_dim=dim)


def mtp_count(reader: Reader) -> int:
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_transformer_layers", "num_mtp_layers")
    return reader.optional_count(*keys) or 0


def draft_like_last_growing(reader: Reader, layers: Layers) -> Layers:
    """An MTP module repeats the attention of the last layer that has one."""
    kinds = (Kind.FULL, Kind.LATENT)
    last = next((layer for layer in reversed(layers) if layer.kind in kinds), None)
    return () if last is None else (last,) * mtp_count(reader)

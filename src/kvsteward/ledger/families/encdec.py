"""Models with an encoder: the decoder's own attention grows, its view of the encoder is fixed by the input's length."""

from __future__ import annotations

from dataclasses import replace

from kvsteward.ledger.families.base import Family, Layers, full, layer_count
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.reading import Reader, whole


def _pairs(layer: Layer, count: int) -> Layers:
    return (layer, replace(layer, kind=Kind.CROSS)) * count


def bart(reader: Reader) -> Layers:
    """BART, Whisper: `decoder_layers` blocks, each self-attention and cross-attention of `decoder_attention_heads`."""
    heads, width = reader.count("decoder_attention_heads"), reader.count("d_model")
    layer = Layer(Kind.FULL, kv_heads=heads, k_dim=width // heads, v_dim=width // heads)
    return _pairs(layer, reader.count("decoder_layers"))


def t5(reader: Reader) -> Layers:
    """T5: `num_decoder_layers` blocks of `num_heads` heads of `d_kv`."""
    heads, dim = reader.count("num_heads"), reader.count("d_kv")
    layer = Layer(Kind.FULL, kv_heads=heads, k_dim=dim, v_dim=dim)
    return _pairs(layer, reader.count("num_decoder_layers", "num_layers"))


def mllama(reader: Reader) -> Layers:
    """Llama 3.2 Vision: the layers in `cross_attention_layers` keep keys and values of the image, not of the text."""
    base = full(reader)
    places = {whole(i, reader.name("cross_attention_layers")) for i in reader.sequence("cross_attention_layers") or []}
    return tuple(replace(base, kind=Kind.CROSS) if i in places else base for i in range(layer_count(reader)))


def whisper_frames(reader: Reader) -> int:
    return reader.count_or(1500, "absent: Whisper's 30 s of audio", "max_source_positions")


def longest_input(reader: Reader) -> int:
    """An encoder as long as the model allows; give the real length to the calls."""
    return reader.optional_count("max_position_embeddings", "n_positions") or 0


TABLE: dict[str, Family] = {
    **{name: Family(bart, encoder_tokens=longest_input) for name in ("bart", "mbart", "pegasus", "marian")},
    "whisper": Family(bart, encoder_tokens=whisper_frames),
    **{name: Family(t5) for name in ("t5", "mt5", "umt5")},
    **{name: Family(mllama) for name in ("mllama", "mllama_text_model")},
}

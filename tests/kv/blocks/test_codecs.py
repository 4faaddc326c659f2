"""Codecs: lossless ones give the same bytes back, int8 is off by no more than it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.errors import ConfigError
from kvsteward.kv.blocks.codecs import Raw
from kvsteward.kv.blocks.int8 import DTYPES, Int8
from kvsteward.kv.blocks.lossless import Lossless

ROW = 64
ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-23}


def stored(codec, block: bytes) -> bytes:
    out = bytearray(len(block))
    codec.decode(memoryview(bytes(codec.encode(memoryview(block)))), memoryview(out))
    return bytes(out)


def as_bytes(numbers, dtype: str) -> bytes:
    """Rounded to the dtype; bfloat16 by cutting, which is a number of the dtype too."""
    if dtype == "bfloat16":
        return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return numbers.astype("<f2" if dtype == "float16" else "<f4").tobytes()


def as_numbers(block: bytes, dtype: str):
    if dtype == "bfloat16":
        return (np.frombuffer(block, "<u2").astype("<u4") << 16).view("<f4").astype("f8")
    return np.frombuffer(block, "<f2" if dtype == "float16" else "<f4").astype("f8")


LOSSLESS = [Raw(), Lossless(1), Lossless(2), Lossless(4), Lossless(2, "zstd")]


@pytest.mark.parametrize("codec", LOSSLESS, ids=["raw", "width-1", "width-2", "width-4", "zstd"])
@given(block=st.binary(max_size=4000) | st.binary(max_size=4).map(lambda part: part * 500))
def test_lossless_codecs_give_the_same_bytes(codec, block):
    assert stored(codec, block) == block


@pytest.mark.parametrize("compressor", ["deflate", "zstd"])
def test_numbers_of_one_size_shrink_and_noise_does_not_grow(compressor):
    codec = Lossless(2, compressor)
    numbers = np.random.default_rng(0).standard_normal(32768)
    block = as_bytes(numbers, "bfloat16")
    assert len(codec.encode(memoryview(block))) < 0.75 * len(block)
    noise = np.random.default_rng(0).bytes(65536)
    assert len(codec.encode(memoryview(noise))) <= len(noise) + 1 + 2 * 5


@given(damage=st.data())
@pytest.mark.parametrize("compressor", ["deflate", "zstd"])
def test_a_damaged_payload_is_an_error_or_other_bytes_of_the_right_size(compressor, damage):
    """Checksums are the record's; the codec must only not run away, write elsewhere or raise anything else."""
    codec = Lossless(2, compressor)
    payload = bytearray(codec.encode(memoryview(bytes(range(256)) * 8)))
    for place in damage.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
        payload[place] ^= damage.draw(st.integers(1, 255))
    cut = damage.draw(st.integers(0, len(payload)))
    try:
        codec.decode(memoryview(bytes(payload[:cut])), memoryview(bytearray(2048)))
    except ValueError:
        return


def test_a_small_payload_cannot_ask_for_much_memory():
    """A plane that unpacks to 16 MiB is refused at the size of its plane."""
    bomb = Lossless(1).encode(memoryview(bytes(16 << 20)))
    assert len(bomb) < 3 << 20
    with pytest.raises(ValueError, match="not 1000"):
        Lossless(1).decode(memoryview(bomb), memoryview(bytearray(1000)))


def test_settings_that_cannot_work_are_refused():
    for make in (lambda: Lossless(0), lambda: Lossless(2, "lzma"), lambda: Int8("fp8", 64), lambda: Int8("float16", 0)):
        with pytest.raises(ConfigError):
            make()


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(-6, 4))
def test_int8_is_off_by_half_a_step_and_the_dtype(dtype, seed, scale):
    """|error| <= max|row| / 254, and half a unit in the last place of what is stored."""
    numbers = np.random.default_rng(seed).standard_normal((20, ROW)) * 10.0**scale
    numbers[3] = 0.0
    block = as_bytes(numbers, dtype)
    before = as_numbers(block, dtype).reshape(-1, ROW)
    after = as_numbers(stored(Int8(dtype, ROW), block), dtype).reshape(-1, ROW)
    largest = np.abs(before).max(axis=1, keepdims=True)
    tiny = 2.0**-24 if dtype == "float16" else 0.0
    bound = largest / 254 * (1 + 1e-5) + np.abs(after) * ULP[dtype] + tiny
    assert (np.abs(after - before) <= bound).all()
    assert (after[3] == 0).all()


@pytest.mark.parametrize(("dtype", "low", "high"), [("float16", 0.0055, 0.0065), ("bfloat16", 0.0055, 0.0068)])
def test_the_error_of_normal_rows_is_what_the_docstring_says(dtype, low, high):
    numbers = np.random.default_rng(7).standard_normal((4000, ROW))
    block = as_bytes(numbers, dtype)
    before, after = as_numbers(block, dtype), as_numbers(stored(Int8(dtype, ROW), block), dtype)
    relative = np.sqrt(((after - before) ** 2).mean() / (before**2).mean())
    assert low < relative < high


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_refuses_what_is_not_finite(dtype, value):
    numbers = np.ones((2, ROW))
    numbers[1, 5] = value
    with pytest.raises(ValueError, match="finite"):
        Int8(dtype, ROW).encode(memoryview(as_bytes(numbers, dtype)))


def test_int8_refuses_a_payload_of_another_shape():
    payload = Int8("float16", ROW).encode(memoryview(as_bytes(np.ones((2, ROW)), "float16")))
    out = memoryview(bytearray(2 * 2 * ROW))
    for codec, data in (
        (Int8("bfloat16", ROW), payload),
        (Int8("float16", 32), payload),
        (Int8("float16", ROW), payload[:-1]),
        (Int8("float16", ROW), b""),
    ):
        with pytest.raises(ValueError):
            codec.decode(memoryview(data), out)
    with pytest.raises(ValueError, match="whole rows"):
        Int8("float16", ROW).encode(memoryview(b"xx" * 63))


def test_int8_takes_a_little_over_half():
    payload = Int8("float16", 128).encode(memoryview(as_bytes(np.ones((10, 128)), "float16")))
    assert len(payload) == 5 + 10 * 132

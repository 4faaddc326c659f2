"""KV at rest as 8-bit integers with one scale for each row (a head of a token): lossy, so only by choice.

For a row x: scale = max|x| / 127, q = round(x / scale), and q * scale comes back, rounded to the block's dtype. So no
number is off by more than max|row| / 254, and half a unit in the last place of the dtype (2^-9 of the number in
bfloat16, 2^-12 in float16). On normal rows of 64 numbers the error is 0.6 % of the row's root mean square in both
16-bit dtypes (`tests/kv/blocks/test_codecs.py` measures it), on KV of SmolLM2-135M 1.05 % (benchmarks/RESULTS.md).
128 numbers of 16 bits take 132 bytes, not 256.

    dtype 1 | row length 4 | scales, float32 | integers           (little-endian)

Pure; needs numpy. Invariant: a row of zeroes stays so; a block with infinities or NaN is refused, not bent.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import numpy as np

from kvsteward.errors import ConfigError
from kvsteward.kv.blocks.codecs import Codec

DTYPES = ("float16", "bfloat16", "float32")
_HEAD = struct.Struct("<BI")
_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4}


class Int8(Codec):
    """`row` is how many numbers that lie side by side share a scale: the head size. Raises ConfigError for others'
    dtypes."""

    number: ClassVar[int] = 2
    name: ClassVar[str] = "int8"
    lossless: ClassVar[bool] = False

    def __init__(self, dtype: str, row: int) -> None:
        if dtype not in DTYPES or row < 1:
            raise ConfigError(
                f"KV of dtype {dtype!r} in rows of {row} cannot be stored as int8",
                hint=f"int8 at rest takes {', '.join(DTYPES)}; leave the codec at raw or lossless for others.",
            )
        self._dtype, self._row = dtype, row

    def encode(self, block: memoryview) -> bytes:
        row_bytes = self._row * _WIDTHS[self._dtype]
        if block.nbytes % row_bytes:
            raise ValueError(f"{block.nbytes} bytes are not whole rows of {row_bytes}")
        rows = _floats(block, self._dtype).reshape(-1, self._row)
        scales = np.abs(rows).max(axis=1) / np.float32(127)
        if not np.isfinite(scales).all():
            raise ValueError("the block has numbers that are not finite")
        steps = np.where(scales > 0, scales, np.float32(1))[:, None]
        integers = np.clip(np.rint(rows / steps), -127, 127).astype(np.int8)
        head = _HEAD.pack(DTYPES.index(self._dtype), self._row)
        return b"".join((head, scales.astype("<f4").tobytes(), integers.tobytes()))

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if payload.nbytes < _HEAD.size:
            raise ValueError("no head")
        dtype, row = _HEAD.unpack(payload[: _HEAD.size])
        if dtype != DTYPES.index(self._dtype) or row != self._row:
            raise ValueError("of another dtype or row")
        count = out.nbytes // (row * _WIDTHS[self._dtype])
        if payload.nbytes != _HEAD.size + count * (4 + row) or out.nbytes % (row * _WIDTHS[self._dtype]):
            raise ValueError(f"{payload.nbytes} bytes for {count} rows of {row}")
        scales = np.frombuffer(payload, "<f4", count, _HEAD.size)
        integers = np.frombuffer(payload, np.int8, count * row, _HEAD.size + 4 * count).reshape(count, row)
        _put(integers.astype(np.float32) * scales[:, None], self._dtype, out)


def _floats(block: memoryview, dtype: str) -> Any:
    """The block's numbers as float32."""
    if dtype == "bfloat16":
        return (np.frombuffer(block, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(block, "<f2" if dtype == "float16" else "<f4").astype(np.float32)


def _put(numbers: Any, dtype: str, out: memoryview) -> None:
    """Writes float32 numbers as the dtype, rounded to the nearest, ties to even."""
    if dtype == "bfloat16":
        bits = numbers.reshape(-1).view(np.uint32)
        np.frombuffer(out, "<u2")[:] = (
            bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        ) >> np.uint32(16)
    else:
        kind = "<f2" if dtype == "float16" else "<f4"
        np.frombuffer(out, kind)[:] = numbers.reshape(-1)

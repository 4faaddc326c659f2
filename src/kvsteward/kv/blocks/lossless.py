"""Lossless compression of floats: bytes of one place in their numbers go together, and each such plane is compressed
alone.

In 16-bit floats the plane with sign and exponent holds few different values, the one with the mantissa's low bits is
noise. A plane that does not shrink is stored as it is, so a block grows by 8 bytes a plane at worst.

    width 1 | for each plane: method 1 | length 4 | data           (little-endian)

Pure; needs only the standard library, except for `compressor="zstd"` (Python 3.14's `compression.zstd`, or
`zstandard`). Invariant: `decode` gives back the same bytes, or raises ValueError.
"""

from __future__ import annotations

import importlib
import struct
import zlib
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from kvsteward.errors import ConfigError
from kvsteward.kv.blocks.codecs import Codec

STORED, DEFLATE, ZSTD = 0, 1, 2
WORTH_IT = 0.95
"""A plane that shrinks to more than this part of itself is stored: reading it back would cost more than it saves."""
_PLANE = struct.Struct("<BI")


class _Zstd(Protocol):
    def compress(self, data: bytes) -> bytes: ...

    def decompress(self, data: bytes, size: int) -> bytes: ...


class Lossless(Codec):
    """`width` is the bytes of one number (2 for float16 and bfloat16, 1 for fp8). Deflate uses Huffman codes alone:
    in KV there is next to nothing to find for its search of repeats. `compressor` "zstd" can be read only where there
    is zstd.

    Raises ConfigError where that is missing.
    """

    number: ClassVar[int] = 1
    name: ClassVar[str] = "lossless"
    lossless: ClassVar[bool] = True

    def __init__(self, width: int, compressor: str = "deflate") -> None:
        if not 1 <= width <= 8:
            raise ConfigError(f"numbers of {width} bytes cannot be split into planes")
        self._width = width
        self._zstd = _zstd()
        compressors: dict[str, tuple[int, Callable[[bytes], bytes]]] = {"deflate": (DEFLATE, _deflate)}
        if self._zstd is not None:
            compressors["zstd"] = (ZSTD, self._zstd.compress)
        if compressor not in compressors:
            raise ConfigError(
                f"the compressor {compressor!r} is not there; there is {', '.join(compressors)}",
                hint="zstd needs Python 3.14 or the package 'zstandard'.",
            )
        self._method, self._compress = compressors[compressor]

    def encode(self, block: memoryview) -> bytes:
        data = bytes(block)
        parts = [bytes([self._width])]
        for place in range(self._width):
            plane = data[place :: self._width]
            packed = self._compress(plane)
            method = self._method if len(packed) < WORTH_IT * len(plane) else STORED
            parts += [_PLANE.pack(method, len(packed if method else plane)), packed if method else plane]
        return b"".join(parts)

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if not payload or not 1 <= payload[0] <= 8:
            raise ValueError("no planes")
        width, at = payload[0], 1
        block = bytearray(out.nbytes)
        for place in range(width):
            size_bytes = len(range(place, out.nbytes, width))
            if at + _PLANE.size > payload.nbytes:
                raise ValueError("a plane is missing")
            method, length = _PLANE.unpack_from(payload, at)
            at += _PLANE.size
            plane = self._unpack(method, bytes(payload[at : at + length]), size_bytes)
            if len(plane) != size_bytes:
                raise ValueError(f"a plane of {len(plane)} bytes, not {size_bytes}")
            block[place::width] = plane
            at += length
        if at != payload.nbytes:
            raise ValueError(f"{payload.nbytes - at} bytes are left")
        out[:] = block

    def _unpack(self, method: int, data: bytes, size_bytes: int) -> bytes:
        """At most one byte more than `size_bytes` comes out, whatever the data say."""
        if method == STORED:
            return data
        if method == ZSTD and self._zstd is not None:
            return self._zstd.decompress(data, size_bytes)
        if method != DEFLATE:
            raise ValueError(f"compression {method} is unknown here")
        try:
            return zlib.decompressobj(-15).decompress(data, size_bytes + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error


def _deflate(plane: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(plane) + packer.flush()


class _Std:
    def __init__(self, module: Any) -> None:
        self._module = module

    def compress(self, data: bytes) -> bytes:
        return bytes(self._module.compress(data, level=1))

    def decompress(self, data: bytes, size: int) -> bytes:
        try:
            return bytes(self._module.ZstdDecompressor().decompress(data, max_length=size + 1))
        except (self._module.ZstdError, EOFError) as error:
            raise ValueError(str(error)) from error


class _Package:
    def __init__(self, module: Any) -> None:
        self._module = module

    def compress(self, data: bytes) -> bytes:
        return bytes(self._module.ZstdCompressor(level=1).compress(data))

    def decompress(self, data: bytes, size: int) -> bytes:
        try:
            if self._module.frame_content_size(data) > size:
                raise ValueError("larger than its plane")
            return bytes(self._module.ZstdDecompressor().decompress(data, max_output_size=size))
        except self._module.ZstdError as error:
            raise ValueError(str(error)) from error


def _zstd() -> _Zstd | None:
    kinds: tuple[tuple[str, Callable[[Any], _Zstd]], ...] = (("compression.zstd", _Std), ("zstandard", _Package))
    for name, kind in kinds:
        try:
            return kind(importlib.import_module(name))
        except ImportError:
            continue
    return None

"""Reads the header of a GGUF file from bytes: key-value pairs and the tensor table.

Pure: takes bytes (or a memory map), opens nothing. Bounded: every length is checked against what is there, long arrays
are walked but not kept. Invariant: a damaged file is a ConfigError that says what is wrong, never a struct error.

Source: the GGUF specification, versions 2 and 3 (ggml, docs/gguf.md); little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsteward.errors import ConfigError
from kvsteward.ledger.formats import Format, get

MAGIC = b"GGUF"
MAX_PAIRS = 65_536
MAX_TENSORS = 1_000_000
MAX_KEPT_ARRAY = 4_096
MAX_DEPTH = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TENSOR_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k",
    12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64",
    29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file: its shape (fastest dimension first), type and place after the header."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset_bytes: int

    @property
    def values(self) -> int:
        total = 1
        for dim in self.shape:
            total *= dim
        return total

    @property
    def size_bytes(self) -> int:
        """Rows are padded to whole blocks."""
        row = self.shape[0] if self.shape else 1
        return _format(self.type_name).size_bytes(row) * (self.values // row if row else 0)


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `metadata` keeps scalars, strings and arrays of at most `MAX_KEPT_ARRAY` numbers."""

    version: int
    metadata: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    header_bytes: int

    @property
    def weight_bytes(self) -> int:
        """The sum over all tensors: what the weights take in memory."""
        return sum(tensor.size_bytes for tensor in self.tensors)


class _Cursor:
    """A place in a buffer that never reads past its end."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int, what: str) -> bytes:
        if size > len(self.data) - self.at:
            raise ConfigError(
                f"the GGUF file ends inside its header: {what} at byte {self.at} needs {size} bytes, "
                f"{len(self.data) - self.at} are left",
                hint="The file is truncated or not a GGUF file; download it again.",
            )
        piece = bytes(self.data[self.at : self.at + size])
        self.at += size
        return piece

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str) -> str:
        size = self.scalar("Q", what)
        try:
            return self.take(size, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"the GGUF file is damaged: {what} is not UTF-8 text") from error


def parse_header(data: bytes | memoryview, *, file_bytes: int | None = None) -> Header:
    """The header of a GGUF file whose first bytes are `data`.

    Give `file_bytes`, the size of the whole file, to check that the tensors are all there. ConfigError if the file is
    no GGUF, of an unknown version, damaged, or cut.
    """
    cursor = _Cursor(data)
    if cursor.take(4, "the magic number") != MAGIC:
        raise ConfigError("not a GGUF file: it does not start with 'GGUF'")
    version = cursor.scalar("I", "the version")
    if version not in {2, 3}:
        raise ConfigError(f"GGUF version {version} is not known (2 and 3 are; big-endian files are not read)")
    tensor_count = _bounded(cursor.scalar("Q", "the tensor count"), MAX_TENSORS, "tensors")
    pair_count = _bounded(cursor.scalar("Q", "the pair count"), MAX_PAIRS, "key-value pairs")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.text("a key")
        metadata[key] = _value(cursor, cursor.scalar("I", f"the type of {key}"), key, MAX_DEPTH)
    tensors = tuple(_tensor(cursor) for _ in range(tensor_count))
    header = Header(version, metadata, tensors, cursor.at)
    if file_bytes is not None:
        _check_data(header, file_bytes)
    return header


def _bounded(count: int, most: int, what: str) -> int:
    if count > most:
        raise ConfigError(f"the GGUF file is damaged: it claims {count} {what}")
    return count


def _value(cursor: _Cursor, type_id: int, key: str, depth: int) -> Any:
    if type_id in _SCALARS:
        return cursor.scalar(_SCALARS[type_id], key)
    if type_id == _STRING:
        return cursor.text(key)
    if type_id != _ARRAY or depth == 0:
        raise ConfigError(f"the GGUF file is damaged: {key} has the unknown type {type_id}")
    item_type = cursor.scalar("I", key)
    count = cursor.scalar("Q", key)
    if item_type in _SCALARS:
        code = _SCALARS[item_type]
        raw = cursor.take(count * struct.calcsize("<" + code), key)
        return list(struct.unpack(f"<{count}{code}", raw)) if count <= MAX_KEPT_ARRAY else None
    items = (_value(cursor, item_type, key, depth - 1) for _ in range(count))
    return list(items) if count <= MAX_KEPT_ARRAY else _exhaust(items)


def _exhaust(items: Any) -> None:
    for _ in items:
        pass


def _tensor(cursor: _Cursor) -> Tensor:
    name = cursor.text("a tensor's name")
    dims = cursor.scalar("I", f"the rank of {name}")
    if dims > 8:
        raise ConfigError(f"the GGUF file is damaged: tensor {name} has {dims} dimensions")
    shape = tuple(cursor.scalar("Q", f"the shape of {name}") for _ in range(dims))
    type_id = cursor.scalar("I", f"the type of {name}")
    offset = cursor.scalar("Q", f"the offset of {name}")
    return Tensor(name, shape, _TENSOR_TYPES.get(type_id, f"type-{type_id}"), offset)


def _format(type_name: str) -> Format:
    if type_name.startswith("type-"):
        raise ConfigError(f"GGUF tensor {type_name} is of an unknown type: its size cannot be computed")
    return get(type_name)


def _check_data(header: Header, file_bytes: int) -> None:
    align = header.metadata.get("general.alignment", 32)
    if isinstance(align, bool) or not isinstance(align, int) or not 1 <= align <= 1 << 20:
        raise ConfigError(f"the GGUF file is damaged: general.alignment is {align!r}")
    start = -(-header.header_bytes // align) * align
    needed = start + max((tensor.offset_bytes + tensor.size_bytes for tensor in header.tensors), default=0)
    if needed > file_bytes:
        raise ConfigError(
            f"the GGUF file is cut: its tensors end at byte {needed}, the file at {file_bytes}",
            hint="Download the file again.",
        )

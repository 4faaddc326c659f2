"""The few facts of a GGUF file's header that the embedded engine reports: `describe_gguf(path)`.

It reads the key-value part of the header and no tensor. Invariant: a file that is not a whole header raises
ConfigError; nothing is guessed. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvsteward.errors import ConfigError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING_BYTES = 1 << 24
_MAX_PAIRS = 1 << 16
_BYTES_PER_BLOCK = {"f32": (4, 1), "f16": (2, 1), "bf16": (2, 1), "q8_0": (34, 32), "q5_1": (24, 32)} | {
    "q5_0": (22, 32),
    "q4_1": (20, 32),
    "q4_0": (18, 32),
    "iq4_nl": (18, 32),
}


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What the header says, for a model whose layers are all alike. `None`: not said, or layers differ."""

    architecture: str
    layers: int | None
    kv_heads: int | None
    k_dim: int | None
    v_dim: int | None
    context_tokens: int | None
    weight_bytes: int
    """The file's size: tensors plus a header of a few MB."""

    def kv_bytes_per_token(self, k_type: str, v_type: str) -> int | None:
        """`layers x kv_heads x (k_dim x bytes(k) + v_dim x bytes(v))`, in bytes, over all layers."""
        if not (self.layers and self.kv_heads and self.k_dim and self.v_dim):
            return None
        if k_type not in _BYTES_PER_BLOCK or v_type not in _BYTES_PER_BLOCK:
            return None
        (k_bytes, k_block), (v_bytes, v_block) = _BYTES_PER_BLOCK[k_type], _BYTES_PER_BLOCK[v_type]
        heads = self.layers * self.kv_heads
        return heads * self.k_dim * k_bytes // k_block + heads * self.v_dim * v_bytes // v_block


def describe_gguf(path: Path) -> GgufFacts:
    """Reads a GGUF header (some tens of milliseconds: call it off the event loop). Raises ConfigError."""
    try:
        with path.open("rb") as file:
            pairs = _read_pairs(file)
            size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read the model file {path}: {error.strerror or error}", param="model") from error
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise ConfigError(f"{path} is not a whole GGUF file", param="model", hint="Download it again.") from error
    return _facts(pairs, size)


def _facts(pairs: dict[str, Any], size: int) -> GgufFacts:
    arch = str(pairs.get("general.architecture", "unknown"))

    def number(key: str) -> int | None:
        value = pairs.get(f"{arch}.{key}")
        return value if isinstance(value, int) else None

    heads = number("attention.head_count")
    width = number("embedding_length")
    head_dim = width // heads if width and heads else None
    return GgufFacts(
        architecture=arch,
        layers=number("block_count"),
        kv_heads=number("attention.head_count_kv") or heads,
        k_dim=number("attention.key_length") or head_dim,
        v_dim=number("attention.value_length") or head_dim,
        context_tokens=number("context_length"),
        weight_bytes=size,
    )


def _read_pairs(file: BinaryIO) -> dict[str, Any]:
    if file.read(4) != b"GGUF":
        raise KeyError("magic")
    version, _tensors, count = struct.unpack("<IQQ", file.read(20))
    if version < 2 or count > _MAX_PAIRS:
        raise KeyError("version")
    return {_string(file): _value(file, *_unpack(file, "<I")) for _ in range(count)}


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    if length > _MAX_STRING_BYTES:
        raise KeyError("string")
    data = file.read(length)
    if len(data) != length:
        raise struct.error("short")
    return data.decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind in _SCALARS:
        return _unpack(file, _SCALARS[kind])[0]
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        raise KeyError(kind)
    inner, length = _unpack(file, "<IQ")
    if inner in _SCALARS:
        _skip(file, length * struct.calcsize(_SCALARS[inner]))
    else:
        for _ in range(length):
            _value(file, inner)
    return None


def _skip(file: BinaryIO, count: int) -> None:
    if count > 0:
        file.seek(count - 1, 1)
        if len(file.read(1)) != 1:
            raise struct.error("short")

"""How many bytes a stored number takes: plain types, types with scales, and llama.cpp's block formats.

A format is a block: `block_values` numbers in `block_bytes` bytes, scales included. Knows nothing of models or engines.
Invariant: sizes are whole bytes and never smaller than the bits that the numbers themselves need.

Sources: IEEE 754 and OCP FP8 / MX for plain types; ggml's block structs (`block_q8_0` = one fp16 scale + 32 int8, and
so on) for llama.cpp; NVFP4 = 16 E2M1 values and one E4M3 scale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsteward.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Format:
    """`block_values` numbers stored in `block_bytes` bytes; `bits` are the bits of one number without its scale."""

    name: str
    block_values: int
    block_bytes: int
    bits: float
    source: str

    def size_bytes(self, values: int) -> int:
        """Bytes of a row of `values` numbers: whole blocks, as every engine pads a row."""
        if values < 0:
            raise ConfigError(f"a row cannot have {values} values")
        return -(-values // self.block_values) * self.block_bytes

    @property
    def bits_per_value(self) -> float:
        """Bits per number with its share of the scales."""
        return 8 * self.block_bytes / self.block_values


_PLAIN = "IEEE 754 / OCP FP8"
_GGML = "ggml block struct"
_FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("f32", 1, 4, 32, _PLAIN),
        Format("f16", 1, 2, 16, _PLAIN),
        Format("bf16", 1, 2, 16, _PLAIN),
        Format("fp8", 1, 1, 8, _PLAIN),
        Format("fp8_ds_mla", 1, 1, 8, "vLLM, SGLang: 8-bit latent with scales, 16-bit rope; see Layer"),
        Format("int8", 1, 1, 8, "one byte, scale per tensor"),
        Format("int4", 2, 1, 4, "two values a byte, scale per tensor"),
        Format("nvfp4", 16, 9, 4, "NVFP4: 16 E2M1 values and one E4M3 scale"),
        Format("mxfp4", 32, 17, 4, "OCP MX: 32 E2M1 values and one E8M0 scale"),
        Format("mxfp8", 32, 33, 8, "OCP MX: 32 FP8 values and one E8M0 scale"),
        Format("q8_0", 32, 34, 8, _GGML),
        Format("q5_1", 32, 24, 5, _GGML),
        Format("q5_0", 32, 22, 5, _GGML),
        Format("q4_1", 32, 20, 4, _GGML),
        Format("q4_0", 32, 18, 4, _GGML),
        Format("iq4_nl", 32, 18, 4, _GGML),
        Format("q8_1", 32, 36, 8, _GGML),
        Format("q2_k", 256, 84, 2, _GGML),
        Format("q3_k", 256, 110, 3, _GGML),
        Format("q4_k", 256, 144, 4, _GGML),
        Format("q5_k", 256, 176, 5, _GGML),
        Format("q6_k", 256, 210, 6, _GGML),
        Format("q8_k", 256, 292, 8, _GGML),
        Format("iq1_s", 256, 50, 1.5, _GGML),
        Format("iq1_m", 256, 56, 1.75, _GGML),
        Format("iq2_xxs", 256, 66, 2, _GGML),
        Format("iq2_xs", 256, 74, 2, _GGML),
        Format("iq2_s", 256, 82, 2, _GGML),
        Format("iq3_xxs", 256, 98, 3, _GGML),
        Format("iq3_s", 256, 110, 3, _GGML),
        Format("iq4_xs", 256, 136, 4, _GGML),
        Format("tq1_0", 256, 54, 1.6, _GGML),
        Format("tq2_0", 256, 66, 2, _GGML),
        Format("i8", 1, 1, 8, _GGML),
        Format("i16", 1, 2, 16, _GGML),
        Format("i32", 1, 4, 32, _GGML),
        Format("i64", 1, 8, 64, _GGML),
        Format("f64", 1, 8, 64, _GGML),
    )
}

_GROUPED = re.compile(r"int([2-8])-g([1-9][0-9]{0,5})")
_ALIASES = {
    "float32": "f32",
    "fp32": "f32",
    "float": "f32",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "fp8_inc": "fp8",
}


def get(name: str) -> Format:
    """The format called `name` (any of the usual spellings, `torch.` allowed). ConfigError for an unknown one.

    `int4-g64` is `grouped(4, 64)`: 4 bits, groups of 64 with an fp16 scale each.
    """
    key = name.lower().removeprefix("torch.")
    group = _GROUPED.fullmatch(key)
    if group is not None:
        return grouped(int(group[1]), int(group[2]))
    found = _FORMATS.get(_ALIASES.get(key, key))
    if found is None:
        known = ", ".join(sorted(_FORMATS))
        raise ConfigError(f"unknown number format {name!r}", hint=f"Known formats: {known}.")
    return found


def grouped(bits: int, group_values: int, *, scale_bytes: int = 2, zero_bytes: int = 0) -> Format:
    """An integer format with a scale (and a zero point) per group: `group * bits / 8 + scale + zero` bytes a group.

    `grouped(8, head_dim, scale_bytes=4)` is vLLM's int8_per_token_head; `grouped(4, 64, zero_bytes=2)` HQQ's int4.
    """
    if bits not in {2, 3, 4, 5, 6, 8} or group_values <= 0 or scale_bytes < 0 or zero_bytes < 0:
        raise ConfigError(f"no such group format: {bits} bits, groups of {group_values}")
    size = -(-group_values * bits // 8) + scale_bytes + zero_bytes
    return Format(f"int{bits}-g{group_values}", group_values, size, bits, "values + scale + zero point per group")


def names() -> tuple[str, ...]:
    """The canonical names."""
    return tuple(_FORMATS)


def resolve(choice: Format | str, model_dtype: str) -> Format:
    """`choice` itself, or the format of that name; `auto` follows the model's dtype, as the engines do."""
    if isinstance(choice, Format):
        return choice
    return get(model_dtype if choice == "auto" else choice)

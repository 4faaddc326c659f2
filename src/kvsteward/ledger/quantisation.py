"""What a quantised checkpoint says of itself: the format of its linear layers, and the KV format it was made for.

Knows `quantization_config` of transformers (fp8, gptq, awq, auto-round, bitsandbytes, mxfp4, compressed-tensors,
modelopt) and ModelOpt's `hf_quant_config.json`. Invariant: None rather than a guess for what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsteward.ledger.formats import Format, get, grouped
from kvsteward.ledger.reading import Reader

_NAMED = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}


def linear_format(outer: Reader, inner: Reader, quant: Mapping[str, Any] | None) -> Format | None:
    """The format of the quantised linear layers, or None if the checkpoint is not quantised or not understood."""
    for reader in (outer, inner):
        found = reader.sub("quantization_config")
        if found is not None:
            return _of(found)
    section = Reader(quant).sub("quantization") if quant else None
    return _algorithm(section.text("quant_algo")) if section is not None else None


def kv_format(outer: Reader, inner: Reader, quant: Mapping[str, Any] | None) -> str | None:
    """`fp8` if the checkpoint carries scales for, or asks for, an 8-bit KV cache."""
    for reader in (outer, inner):
        found = reader.sub("quantization_config")
        scheme = found.sub("kv_cache_scheme") if found is not None else None
        if scheme is not None and scheme.raw("num_bits") == 8 and scheme.raw("type") == "float":
            return "fp8"
    section = Reader(quant).sub("quantization") if quant else None
    algorithm = section.text("kv_cache_quant_algo") if section is not None else None
    return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(algorithm or "")


def _of(reader: Reader) -> Format | None:
    method = reader.text("quant_method") or ""
    if method in _NAMED:
        return get(_NAMED[method])
    bits = reader.optional_count("bits", "w_bit", least=1)
    if method in {"gptq", "awq", "auto-round", "auto_round"} and bits in {2, 3, 4, 8}:
        group = reader.optional_count("group_size", "q_group_size", least=1) or 128
        return grouped(bits, group, zero_bytes=-(-bits // 8))
    if method == "bitsandbytes":
        return grouped(4, 64, scale_bytes=4) if reader.flag("load_in_4bit") else get("int8")
    return _algorithm(reader.text("quant_algo", "moe_quant_algo")) or _groups(reader)


def _algorithm(name: str | None) -> Format | None:
    found = {"FP8": "fp8", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "MXFP4": "mxfp4", "MXFP8": "mxfp8"}.get(name or "")
    return get(found) if found else None


def _groups(reader: Reader) -> Format | None:
    """compressed-tensors: the weights of the first group."""
    groups = reader.sub("config_groups")
    first = next((groups.sub(key) for key in groups.config if groups.sub(key) is not None), None) if groups else None
    weights = first.sub("weights") if first is not None else None
    if weights is None:
        return None
    bits, kind = weights.optional_count("num_bits", least=1), weights.text("type")
    group = weights.optional_count("group_size", least=1)
    if bits == 8:
        return get("fp8" if kind == "float" else "int8")
    if bits == 4 and kind == "float":
        return get("nvfp4" if group == 16 else "mxfp4")
    return grouped(bits, group or 128) if bits in {2, 3, 4} else None

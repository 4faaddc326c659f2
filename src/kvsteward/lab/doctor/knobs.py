"""The settings that the doctor reads and tells people to change, with the exact flag of each engine.

Knows names and values of flags, no metrics. Invariant: a flag stands in this file or it is not advised; a test checks
each against the engine's own parser (vLLM 0.32, SGLang 0.5.23, llama-server of 2026-10).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from enum import Enum, auto

from kvsteward.errors import ConfigError


class Knob(Enum):
    """A setting, whatever an engine calls it."""

    MAX_RUNNING = auto()
    CONTEXT = auto()
    MEMORY_SHARE = auto()
    PREFIX_ON = auto()
    PREFIX_OFF = auto()
    KV_DTYPE = auto()
    V_DTYPE = auto()
    TENSOR_PARALLEL = auto()
    DATA_PARALLEL = auto()
    CONTEXT_PARALLEL = auto()
    ATTENTION_DP = auto()
    BATCHED_TOKENS = auto()
    CHUNKED_ON = auto()
    CHUNKED_OFF = auto()
    CHUNK_TOKENS = auto()
    LONG_PREFILL = auto()
    CONSERVATIVENESS = auto()
    BLOCK = auto()
    STATE_MODE = auto()
    STATE_SIZE = auto()
    STATE_RATIO = auto()
    CHECKPOINTS = auto()
    FULL_WINDOW = auto()
    UNIFIED = auto()
    OFFLOAD_SIZE = auto()
    OFFLOAD_IO = auto()
    LAYERS_ON_GPU = auto()
    WEIGHT_FORMAT = auto()
    ANSWER_LIMIT = auto()
    HOST_CACHE = auto()


FLAGS: Mapping[Knob, Mapping[str, str]] = {
    Knob.MAX_RUNNING: {"vllm": "--max-num-seqs", "sglang": "--max-running-requests", "llama-server": "--parallel"},
    Knob.CONTEXT: {"vllm": "--max-model-len", "sglang": "--context-length", "llama-server": "--ctx-size"},
    Knob.MEMORY_SHARE: {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"},
    Knob.PREFIX_ON: {"vllm": "--enable-prefix-caching", "llama-server": "--cache-prompt"},
    Knob.PREFIX_OFF: {
        "vllm": "--no-enable-prefix-caching",
        "sglang": "--disable-radix-cache",
        "llama-server": "--no-cache-prompt",
    },
    Knob.KV_DTYPE: {"vllm": "--kv-cache-dtype", "sglang": "--kv-cache-dtype", "llama-server": "--cache-type-k"},
    Knob.V_DTYPE: {"llama-server": "--cache-type-v"},
    Knob.TENSOR_PARALLEL: {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"},
    Knob.DATA_PARALLEL: {"vllm": "--data-parallel-size", "sglang": "--dp-size"},
    Knob.CONTEXT_PARALLEL: {"vllm": "--decode-context-parallel-size"},
    Knob.ATTENTION_DP: {"sglang": "--attn-dp-size"},
    Knob.BATCHED_TOKENS: {"vllm": "--max-num-batched-tokens", "llama-server": "--batch-size"},
    Knob.CHUNKED_ON: {"vllm": "--enable-chunked-prefill"},
    Knob.CHUNKED_OFF: {"vllm": "--no-enable-chunked-prefill"},
    Knob.CHUNK_TOKENS: {"sglang": "--chunked-prefill-size", "llama-server": "--ubatch-size"},
    Knob.LONG_PREFILL: {"vllm": "--long-prefill-token-threshold"},
    Knob.CONSERVATIVENESS: {"sglang": "--schedule-conservativeness"},
    Knob.BLOCK: {"vllm": "--block-size", "sglang": "--page-size"},
    Knob.STATE_MODE: {"vllm": "--mamba-cache-mode"},
    Knob.STATE_SIZE: {"sglang": "--max-mamba-cache-size"},
    Knob.STATE_RATIO: {"sglang": "--mamba-full-memory-ratio"},
    Knob.CHECKPOINTS: {"llama-server": "--ctx-checkpoints"},
    Knob.FULL_WINDOW: {"llama-server": "--swa-full"},
    Knob.UNIFIED: {"llama-server": "--kv-unified"},
    Knob.OFFLOAD_SIZE: {"vllm": "--kv-offloading-size", "sglang": "--hicache-size"},
    Knob.OFFLOAD_IO: {"sglang": "--hicache-io-backend"},
    Knob.LAYERS_ON_GPU: {"llama-server": "--n-gpu-layers"},
    Knob.WEIGHT_FORMAT: {"vllm": "--quantization", "sglang": "--quantization"},
    Knob.ANSWER_LIMIT: {"llama-server": "--n-predict"},
    Knob.HOST_CACHE: {"llama-server": "--cache-ram"},
}
"""The flag of each dialect; a dialect that is missing has no such setting."""

_ALIASES = {
    "vllm": {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size", "-dcp": "--decode-context-parallel-size"},
    "sglang": {"--tensor-parallel-size": "--tp-size", "--data-parallel-size": "--dp-size", "--tp": "--tp-size"},
    "llama-server": {
        "-c": "--ctx-size",
        "-np": "--parallel",
        "-ctk": "--cache-type-k",
        "-ctv": "--cache-type-v",
        "-b": "--batch-size",
        "-ub": "--ubatch-size",
        "-n": "--n-predict",
        "--predict": "--n-predict",
        "-kvu": "--kv-unified",
        "-cram": "--cache-ram",
    },
}

Flags = Mapping[str, str]


def change(dialect: str, knob: Knob, value: object = None) -> str | None:
    """The flag as it is typed, `--max-num-seqs 4`; None where this engine has no such setting."""
    flag = FLAGS[knob].get(dialect)
    if flag is None:
        return None
    return flag if value is None else f"{flag} {value}"


def changes(dialect: str, *wanted: tuple[Knob, object]) -> tuple[str, ...]:
    """All of `wanted` that this engine has."""
    return tuple(flag for knob, value in wanted if (flag := change(dialect, knob, value)) is not None)


def read_flags(text: str, dialect: str) -> dict[str, str]:
    """The engine's command line as flag -> value; "" for a flag without one. ConfigError if quotes do not close."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--flags cannot be read: {error}", param="flags") from error
    found: dict[str, str] = {}
    last = None
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, _, value = word.partition("=")
            name = name.replace("_", "-") if name.startswith("--") else name
            last = _ALIASES.get(dialect, {}).get(name, name)
            found[last] = value
        elif last is not None:
            found[last] = f"{found[last]} {word}".strip()
    return found


def given(flags: Flags, dialect: str, knob: Knob) -> str | None:
    """What the user's command line says of a setting: its value, "" for a bare flag, None if it is not there."""
    flag = FLAGS[knob].get(dialect)
    return flags.get(flag) if flag is not None else None


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdigit()

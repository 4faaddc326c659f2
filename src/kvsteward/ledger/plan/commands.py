"""Command lines that start an engine with the settings of a plan.

Knows the flags of vLLM, SGLang and llama-server. Invariant: every flag printed is one the engine takes; values are
quoted for a shell.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from kvsteward.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    """What a plan decided, engine-neutral. `kv_dtype` as the ledger names it."""

    model: str
    tp: int
    pp: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float
    kv_dtype: str
    prefix_caching: bool
    static_ratio: float = 0.85
    port: int = 8000


def command(engine: str, settings: Settings) -> str:
    """The command line for `engine` (vllm, sglang, llamacpp)."""
    builders = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llamacpp}
    if engine not in builders:
        raise ConfigError(f"no command line for engine {engine!r}", hint=f"Known: {', '.join(builders)}.")
    return shlex.join(builders[engine](settings))


def _vllm(s: Settings) -> list[str]:
    line = ["vllm", "serve", s.model, "--port", str(s.port), "--max-model-len", str(s.max_model_len)]
    line += ["--max-num-seqs", str(s.max_num_seqs), "--max-num-batched-tokens", str(s.max_num_batched_tokens)]
    line += ["--gpu-memory-utilization", f"{s.utilization:.2f}", "--tensor-parallel-size", str(s.tp)]
    if s.pp > 1:
        line += ["--pipeline-parallel-size", str(s.pp)]
    if s.kv_dtype == "fp8":
        line += ["--kv-cache-dtype", "fp8"]
    return [*line, "--enable-prefix-caching" if s.prefix_caching else "--no-enable-prefix-caching"]


def _sglang(s: Settings) -> list[str]:
    line = ["python", "-m", "sglang.launch_server", "--model-path", s.model, "--port", str(s.port)]
    line += ["--tp-size", str(s.tp), "--context-length", str(s.max_model_len)]
    line += ["--max-running-requests", str(s.max_num_seqs), "--chunked-prefill-size", str(s.max_num_batched_tokens)]
    line += ["--mem-fraction-static", f"{s.static_ratio:.2f}"]
    if s.pp > 1:
        line += ["--pp-size", str(s.pp)]
    if s.kv_dtype == "fp8":
        line += ["--kv-cache-dtype", "fp8_e4m3"]
    return line if s.prefix_caching else [*line, "--disable-radix-cache"]


def _llamacpp(s: Settings) -> list[str]:
    kind = {"fp8": "q8_0"}.get(s.kv_dtype, s.kv_dtype)
    line = ["llama-server", "-m", s.model, "--port", str(s.port), "-c", str(s.max_model_len * s.max_num_seqs)]
    line += ["-np", str(s.max_num_seqs), "-b", str(s.max_num_batched_tokens), "--n-gpu-layers", "999"]
    if kind in {"q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"}:
        line += ["-fa", "on", "-ctk", kind, "-ctv", kind]
    return line

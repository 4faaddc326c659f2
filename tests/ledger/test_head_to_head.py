"""Bytes that engines charge one request, on the eight cases where calculators disagree; all within 1 %."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import reports

from kvsteward.ledger import ModelSpec
from kvsteward.ledger.alloc import vllm

GIB = 2**30
CASES = {
    "Llama-3.1-8B": (8_192, 1.000),
    "DeepSeek-R1": (131_072, 8.578),
    "MiniMax-M2.5": (128_000, 30.273),
    "gpt-oss-20b": (8_192, 0.375),
    "gemma-3-27b": (8_192, 4.382),
    "gemma-4-31B": (8_192, 6.887),
    "Qwen3.5-35B": (131_072, 1.379),
    "Nemotron-3-Nano": (131_072, 0.796),
}


def charged_bytes(name: str, tokens: int) -> int:
    """vLLM's charge at 8,192 batched tokens; SGLang keeps one state per request, which the model's own bytes are."""
    spec = ModelSpec.from_hf_config(reports.models()[name])
    if name == "Nemotron-3-Nano":
        return spec.kv_bytes(tokens)
    if name == "MiniMax-M2.5":
        return 4 * vllm.layout(spec, vllm.VLLM(max_model_len=tokens, tp=4)).request_bytes(tokens)
    kv_dtype = "fp8" if name == "Qwen3.5-35B" else "auto"
    return vllm.layout(spec, vllm.VLLM(max_model_len=tokens, kv_dtype=kv_dtype)).request_bytes(tokens)


@pytest.mark.parametrize("name", CASES)
def test_within_a_percent_of_the_engine(name: str) -> None:
    tokens, truth_gib = CASES[name]
    assert charged_bytes(name, tokens) / GIB == pytest.approx(truth_gib, rel=0.01)


@pytest.mark.parametrize(("name", "pages"), [("gpt-oss-20b", 1_025), ("gemma-3-27b", 3_590), ("gemma-4-31B", 2_821)])
def test_pages_per_request(name: str, pages: int) -> None:
    spec = ModelSpec.from_hf_config(reports.models()[name])
    assert vllm.layout(spec, vllm.VLLM()).pages(8_192) == pages


@pytest.mark.parametrize(
    ("name", "kv_dtype", "drafted", "block"),
    [
        ("Qwen3.5-0.8B", "bf16", 0, 544), ("Qwen3.5-27B", "bf16", 0, 784), ("Qwen3.5-9B", "fp8", 0, 1056),
        ("Qwen3.5-27B", "fp8", 0, 1568), ("Qwen3.5-27B", "fp8", 3, 1600), ("Qwen3.5-27B", "fp8", 4, 1616),
        ("Qwen3.5-35B", "fp8", 0, 2096), ("Qwen3.5-122B", "fp8", 0, 4176), ("Qwen3.5-122B", "fp8", 1, 4192),
    ],
)  # fmt: skip
def test_attention_block_that_vllm_announces(name: str, kv_dtype: str, drafted: int, block: int) -> None:
    spec = ModelSpec.from_hf_config(reports.models()[name])
    assert vllm.layout(spec, vllm.VLLM(kv_dtype=kv_dtype, draft_tokens=drafted)).block_tokens == block


def test_padding_layers() -> None:
    made = vllm.layout(ModelSpec.from_hf_config(reports.models()["gemma-3-27b"]), vllm.VLLM())
    assert (made.group_count, made.group_layers, made.padding_layers) == (7, 10, 8)
    with_mtp = vllm.layout(ModelSpec.from_hf_config(reports.models()["Qwen3.5-27B"]), vllm.VLLM(draft_tokens=1))
    assert (with_mtp.group_layers, with_mtp.padding_layers) == (17, 3)

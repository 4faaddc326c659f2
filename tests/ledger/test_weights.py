"""Weight bytes against what vLLM said it loaded ("Model loading took ... GiB"), plain and quantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsteward.errors import ConfigError
from kvsteward.ledger import ModelSpec

GIB = 2**30
CONFIGS = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "configs"
FP8 = {"quant_method": "fp8"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
W8A8 = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}}


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return loaded


@pytest.mark.shared_data
@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the recorded configs are not beside the repository")
@pytest.mark.parametrize(
    ("name", "quantised", "loaded_gib"),
    [
        ("meta-llama__Meta-Llama-3-8B", None, 14.99),
        ("meta-llama__Meta-Llama-3-8B", FP8, 8.49),
        ("meta-llama__Meta-Llama-3-8B", GPTQ, 5.38),
        ("meta-llama__Meta-Llama-3-70B", FP8, 2 * 33.88),
        ("meta-llama__Meta-Llama-3-70B", W8A8, 2 * 33.88),
        ("Qwen__Qwen2.5-7B-Instruct", None, 14.25),
        ("Qwen__Qwen2.5-7B-Instruct", FP8, 8.14),
        ("Qwen__Qwen3-30B-A3B", None, 56.88),
        ("deepseek-ai__DeepSeek-V2-Lite", None, 29.43),
        ("google__gemma-2-27b", None, 50.72),
        ("google__gemma-2-9b", None, 17.22),
        ("google__gemma-2-2b", None, 4.90),
    ],
)
def test_loaded_weights(name: str, quantised: dict[str, Any] | None, loaded_gib: float) -> None:
    config = load(name) | ({"quantization_config": quantised} if quantised else {})
    assert ModelSpec.from_hf_config(config).weight_bytes() / GIB == pytest.approx(loaded_gib, rel=0.015)


@pytest.mark.shared_data
@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the recorded configs are not beside the repository")
def test_checkpoints_name_their_kv_dtype() -> None:
    spec = ModelSpec.from_hf_config(load("nvidia__MiniMax-M2.5-NVFP4"))
    assert spec.kv_dtype_hint == "fp8"
    plain = load("nvidia__Llama-3.1-70B-Instruct-FP8")
    quant = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    told = ModelSpec.from_hf_config(plain, quant=quant)
    assert told.kv_dtype_hint == "fp8"
    assert told.weight_bytes() < 0.55 * ModelSpec.from_hf_config(plain).weight_bytes()
    assert any(item.field == "quantization_config" for item in told.assumed)


def test_unknown_families_are_not_counted() -> None:
    config = {
        "model_type": "opt", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128, "vocab_size": 99,
        "torch_dtype": "float16",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be counted"):
        ModelSpec.from_hf_config(config).weight_bytes()

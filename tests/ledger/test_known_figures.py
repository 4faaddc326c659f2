"""Figures that everyone knows, from the models' own configs and the formats' own block sizes."""

from __future__ import annotations

from typing import Any

import pytest

from kvsteward.errors import ConfigError
from kvsteward.ledger import ModelSpec, budget_for, capacity_tokens, tokens_in
from kvsteward.ledger.formats import get, grouped

LLAMA2_7B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "torch_dtype": "float16",
}
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "torch_dtype": "bfloat16",
}
LLAMA_70B: dict[str, Any] = {
    **LLAMA2_7B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [(LLAMA2_7B, 524_288), (SMOLLM2, 23_040), (LLAMA_70B, 327_680), (DEEPSEEK_V3, 70_272)],
)
def test_bytes_per_token(config: dict[str, Any], bytes_per_token: int) -> None:
    assert ModelSpec.from_hf_config(config).kv_bytes_per_token() == bytes_per_token


def test_long_sessions_of_a_70b() -> None:
    spec = ModelSpec.from_hf_config(LLAMA_70B)
    session = spec.kv_bytes(32 * 1024)
    assert round(session / 1e9, 1) == 10.7
    assert round(32 * session / 1e9, 1) == 343.6


def test_a_latent_is_not_split_by_tensor_parallelism() -> None:
    spec = ModelSpec.from_hf_config(DEEPSEEK_V3)
    assert spec.kv_bytes_per_token(tp=8) == 70_272


def test_heads_are_replicated_beyond_their_number() -> None:
    spec = ModelSpec.from_hf_config({**LLAMA_70B, "num_key_value_heads": 4})
    assert spec.kv_bytes_per_token(tp=4) == spec.kv_bytes_per_token(tp=8) == 80 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("name", "block_bytes", "block_values"),
    [
        ("q8_0", 34, 32), ("q4_0", 18, 32), ("q4_1", 20, 32), ("q5_0", 22, 32), ("q5_1", 24, 32), ("iq4_nl", 18, 32),
        ("f16", 2, 1), ("bf16", 2, 1), ("f32", 4, 1), ("fp8", 1, 1), ("nvfp4", 9, 16),
    ],
)  # fmt: skip
def test_block_formats(name: str, block_bytes: int, block_values: int) -> None:
    assert get(name).size_bytes(block_values) == block_bytes
    assert get(name).size_bytes(block_values + 1) > block_bytes


def test_grouped_formats_count_their_scales() -> None:
    assert get("int4-g64").size_bytes(128) == 2 * (32 + 2)
    assert grouped(8, 128, scale_bytes=4).size_bytes(128) == 132
    assert grouped(4, 64, zero_bytes=2).size_bytes(64) == 36
    for wrong in ("int9-g64", "int4-g0", "int4-g"):
        with pytest.raises(ConfigError):
            get(wrong)


def test_falcon_7b_has_one_kv_head() -> None:
    config = {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "num_kv_heads": 71,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_hidden_layers": 32,
        "torch_dtype": "bfloat16",
    }
    assert ModelSpec.from_hf_config(config).kv_bytes_per_token() == 32 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", float("nan")),
        ("num_hidden_layers", float("inf")),
        ("num_hidden_layers", True),
        ("num_hidden_layers", "32"),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", 0),
        ("num_attention_heads", 2.5),
        ("head_dim", -64),
        ("torch_dtype", "float7"),
    ],
)
def test_bad_values_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key if key != "torch_dtype" else "float7"):
        ModelSpec.from_hf_config({**LLAMA2_7B, key: value})


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        ModelSpec.from_hf_config({k: v for k, v in LLAMA2_7B.items() if k != key})


def test_a_gibibyte_of_smollm2_on_vllm_cpu() -> None:
    budget = tokens_in(ModelSpec.from_hf_config(SMOLLM2), 2**30, block_tokens=128)
    assert budget.tokens == 46_592
    assert int(capacity_tokens(ModelSpec.from_hf_config(SMOLLM2), 2**30, engine="vllm-cpu")) == 46_592
    assert budget_for(ModelSpec.from_hf_config(SMOLLM2), 46_592, block_tokens=128) <= 2**30


@pytest.mark.parametrize(
    ("extra", "parameters"),
    [
        ({**LLAMA2_7B, "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False}, 6_738_415_616),
        ({**SMOLLM2, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}, 134_515_008),
    ],
)
def test_parameters_as_published(extra: dict[str, Any], parameters: int) -> None:
    spec = ModelSpec.from_hf_config(extra)
    assert spec.weights is not None
    assert spec.weights.total == parameters
    assert spec.weight_bytes() == 2 * parameters

"""All recorded configs are read, or refused with the name of what is missing; the traps among them are read right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsteward.errors import ConfigError
from kvsteward.ledger import Kind, ModelSpec

CONFIGS = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "configs"
NO_CACHE = {"Snowflake__snowflake-arctic-embed-m", "sentence-transformers__all-MiniLM-L6-v1"}

pytestmark = [
    pytest.mark.shared_data,
    pytest.mark.skipif(not CONFIGS.is_dir(), reason="the recorded configs are not beside the repository"),
]


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return loaded


def test_all_are_read_or_refused() -> None:
    read, refused = 0, {}
    for path in sorted(CONFIGS.glob("*.json")):
        try:
            spec = ModelSpec.from_hf_config(json.loads(path.read_text()))
        except ConfigError as error:
            refused[path.stem] = error.message
            continue
        read += 1
        assert spec.kv_bytes(4096) > 0
        assert spec.kv_bytes(4096) <= spec.kv_bytes(8192)
    assert set(refused) == NO_CACHE
    assert all("encoder" in message for message in refused.values())
    assert read >= 127


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("HuggingFaceTB__SmolLM2-135M-Instruct", 23_040),
        ("meta-llama__Llama-2-7b-chat-hf", 524_288),
        ("deepseek-ai__DeepSeek-V3", 70_272),
        ("nvidia__Kimi-K2.5-NVFP4", 70_272),
        ("tiiuae__falcon-7b", 8_192),
        ("THUDM__chatglm2-6b", 28_672),
        ("WizardLM__WizardCoder-15B-V1.0", 20_480),
        ("Qwen__Qwen3.5-27B", 65_536),
        ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 6_144),
        ("MiniMaxAI__MiniMax-M2.5", 253_952),
        ("nvidia__Gemma-4-31B-IT-NVFP4", 901_120),
        ("Qwen__Qwen2.5-Omni-7B", 57_344),
        ("openai__gpt-oss-120b", 73_728),
        ("deepseek-ai__DeepSeek-V3.2", 78_324),
    ],
)
def test_bytes_per_token(name: str, bytes_per_token: int) -> None:
    assert ModelSpec.from_hf_config(load(name)).kv_bytes_per_token() == bytes_per_token


def test_every_default_is_listed() -> None:
    spec = ModelSpec.from_hf_config(load("google__gemma-3-4b-it"))
    fields = {item.field for item in spec.assumed}
    assert {f"text_config.{key}" for key in ("num_attention_heads", "num_key_value_heads", "head_dim")} <= fields
    assert all(item.reason for item in spec.assumed)


def test_a_whole_config_assumes_nothing() -> None:
    assert ModelSpec.from_hf_config(load("Qwen__Qwen3-8B")).assumed == ()


def test_encoder_decoder_keeps_a_fixed_part() -> None:
    spec = ModelSpec.from_hf_config(load("openai__whisper-tiny"))
    assert spec.encoder_tokens == 1_500
    assert spec.kv_bytes(0) == 4 * 2 * 6 * 64 * 4 * 1_500
    assert spec.kv_bytes(10) - spec.kv_bytes(0) == 10 * spec.kv_bytes_per_token()


def test_vision_cross_attention_does_not_grow_with_text() -> None:
    spec = ModelSpec.from_hf_config(load("meta-llama__Llama-3.2-11B-Vision-Instruct"))
    assert (spec.count(Kind.FULL), spec.count(Kind.CROSS)) == (32, 8)
    assert spec.kv_bytes(100, encoder_tokens=6404) - spec.kv_bytes(100) == 8 * 6404 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama__Meta-Llama-3-8B", 8_030_261_248),
        ("deepseek-ai__DeepSeek-V3", 671_026_419_200),
        ("openai-community__gpt2", 124_439_808),
        ("Qwen__Qwen3-8B", 8_190_735_360),
        ("google__gemma-2-2b", 2_614_341_888),
        ("google__gemma-3-1b-it", 999_885_952),
    ],
)
def test_parameters_as_published(name: str, parameters: int) -> None:
    weights = ModelSpec.from_hf_config(load(name)).weights
    assert weights is not None
    assert weights.total == parameters


def test_an_unknown_architecture_is_not_guessed() -> None:
    strange = {**load("Qwen__Qwen3-8B"), "model_type": "brand_new"}
    assert any(item.field == "model_type" for item in ModelSpec.from_hf_config(strange).assumed)
    with pytest.raises(ConfigError, match="brand_new"):
        ModelSpec.from_hf_config({**strange, "ssm_state_size": 128})

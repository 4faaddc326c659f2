"""The traps of real configs, each with the keys that make it one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import reports

from kvsteward.errors import ConfigError
from kvsteward.ledger import Kind, ModelSpec
from kvsteward.ledger.alloc import transformers, vllm

GIB = 2**30
BASE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.from_hf_config({key: value for key, value in (BASE | changes).items() if value is not None})


def kinds(made: ModelSpec) -> str:
    return "".join(layer.kind[0] for layer in made.layers)


def test_deepseek_v4_pro_at_a_million_tokens() -> None:
    """9.62 GiB a sequence in bf16, as vLLM published it with its support of the model (blog, April 2026)."""
    ratios = [128, 128] + [4, 128] * 29 + [4]
    made = spec(
        model_type="deepseek_v4", num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=1, head_dim=512,
        qk_rope_head_dim=64, index_head_dim=128, sliding_window=128, compress_ratios=[*ratios, 0],
        num_nextn_predict_layers=1,
    )  # fmt: skip
    assert round(made.kv_bytes(2**20) / GIB, 2) == 9.62
    assert len(made.draft_layers) == 1


def test_deepseek_v4_pages_in_vllm() -> None:
    """Five groups in a block as wide as the main caches; a short request is charged almost what a long one is."""
    made = ModelSpec.from_hf_config(reports.models()["DeepSeek-V4-Flash"])
    pages = vllm.layout(made, vllm.VLLM(kv_dtype="fp8", max_model_len=2**20))
    assert pages.block_bytes == 21 * 37_440 + 20 * 1_728 + 21 * 8_640
    assert [(group.count, group.block_tokens) for group in pages.groups] == [(1, 256), (2, 64), (1, 4), (1, 8)]
    assert pages.request_bytes(20_000) > 0.6 * pages.request_bytes(2**20)
    with pytest.raises(ConfigError, match="only known for vLLM"):
        vllm.layout(made, vllm.VLLM(version=(0, 21)))


def test_minicpm3_without_a_model_type() -> None:
    made = spec(
        model_type=None, architectures=["MiniCPM3ForCausalLM"], kv_lora_rank=256, qk_rope_head_dim=32,
        qk_nope_head_dim=64, v_head_dim=64,
    )  # fmt: skip
    assert made.count(Kind.LATENT) == 4
    assert made.kv_bytes_per_token() == 4 * 288 * 2
    assert transformers.dynamic_bytes(made, 10) == 10 * 4 * 8 * (96 + 64) * 2


def test_mimo_has_its_own_heads_in_windows() -> None:
    made = spec(
        model_type="mimo_v2_flash", hybrid_layer_pattern=[0, 1, 1, 1], v_head_dim=48, swa_num_key_value_heads=4,
        swa_head_dim=64, swa_v_head_dim=48, sliding_window=128,
    )  # fmt: skip
    assert kinds(made) == "fsss"
    assert made.kv_bytes_per_token() == 2 * (2 * (64 + 48) + 3 * 4 * (64 + 48))


def test_gemma4_shares_its_last_layers() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    made = spec(
        model_type="gemma4_text", layer_types=types, global_head_dim=128, num_global_key_value_heads=1,
        sliding_window=64, num_kv_shared_layers=2,
    )  # fmt: skip
    assert [layer.kind for layer in made.layers] == [Kind.SLIDING, Kind.FULL, Kind.SHARED, Kind.SHARED]
    assert made.kv_bytes(1_000) == 2 * (64 * 2 * 2 * 64 + 1_000 * 2 * 128)
    with pytest.raises(ConfigError, match="num_kv_shared_layers"):
        spec(model_type="gemma4_text", layer_types=types, sliding_window=64, num_kv_shared_layers=4)


def test_llama4_is_full_where_it_has_no_rope() -> None:
    made = spec(model_type="llama4_text", attention_chunk_size=32, no_rope_layers=[1, 1, 1, 0])
    assert kinds(made) == "cccf"
    assert kinds(spec(model_type="llama4_text", attention_chunk_size=32)) == "cccf"


def test_qwen2_slides_only_if_it_says_so() -> None:
    window: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 2}
    assert kinds(spec(**window)) == "ffff"
    assert kinds(spec(**window, use_sliding_window=True)) == "ffss"


def test_a_window_as_long_as_the_context_is_no_window() -> None:
    made = spec(model_type="phi3", sliding_window=4096, max_position_embeddings=4096)
    assert kinds(made) == "ffff"
    assert any(item.field == "sliding_window" for item in made.assumed)
    assert kinds(spec(model_type="mistral", sliding_window=1024, max_position_embeddings=4096)) == "ssss"


def test_llava_nests_and_omits() -> None:
    nested = ModelSpec.from_hf_config({"model_type": "llava", "text_config": {"model_type": "llama"}})
    assert nested.kv_bytes_per_token() == 524_288
    assert {item.field for item in nested.assumed} >= {"text_config.num_hidden_layers", "text_config.hidden_size"}
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        ModelSpec.from_hf_config({"model_type": "llava_llama", "llm_cfg": {"architectures": ["LlamaForCausalLM"]}})


def test_a_pattern_may_be_all_that_names_the_layers() -> None:
    mamba: dict[str, Any] = {
        "model_type": "nemotron_h", "num_hidden_layers": None, "mamba_num_heads": 8, "mamba_head_dim": 32,
        "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "mamba_ssm_cache_dtype": "float32",
    }  # fmt: skip
    made = spec(**mamba, layers_block_type=["mamba", "moe", "attention", "mlp"])
    assert kinds(made) == "snfn"
    assert made.state_bytes() == 8 * 32 * 16 * 4 + (8 * 32 + 2 * 2 * 16) * 3 * 2
    assert kinds(spec(**mamba, hybrid_override_pattern="ME*-")) == "snfn"
    with pytest.raises(ConfigError, match="hybrid_override_pattern"):
        spec(**mamba | {"num_hidden_layers": 4})


def test_lightning_attention_keeps_a_state() -> None:
    made = spec(model_type="minimax_text_01", attn_type_list=[0, 0, 0, 1])
    assert kinds(made) == "sssf"
    assert made.state_bytes() == 3 * 8 * 64 * 64 * 4


def test_side_by_side_attention_and_mamba() -> None:
    made = spec(
        model_type="falcon_h1", mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_d_conv=4
    )
    assert made.state_bytes() > 0
    assert made.kv_bytes(10) == made.state_bytes() + 10 * made.kv_bytes_per_token()


def test_shared_indexers_are_counted_once() -> None:
    latent: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    made = spec(model_type="glm_moe_dsa", **latent, indexer_types=["full", "shared", "shared", "full"])
    assert made.kv_bytes_per_token() == 4 * 1152 + 2 * 132
    assert made.kv_bytes_per_token(kv_dtype="fp8_ds_mla") == 4 * 656 + 2 * 132
    assert vllm.layout(made, vllm.VLLM(kv_dtype="fp8")).block_bytes == 16 * (4 * 656 + 2 * 132)


@pytest.mark.parametrize(
    "strange",
    [
        {"attn_type_list": [0, 1, 1, 1]}, {"hybrid_layer_ids": [1]}, {"kv_lora_rank": 512}, {"ssm_cfg": {"d": 1}},
        {"is_encoder_decoder": True}, {"num_kv_shared_layers": 2},
    ],
)  # fmt: skip
def test_unknown_architectures_with_another_state_are_refused(strange: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="brand_new"):
        spec(model_type="brand_new", **strange)


def test_unknown_architectures_may_mix_windows() -> None:
    types = ["full_attention", "sliding_attention"] * 2
    made = spec(model_type="brand_new", layer_types=types, sliding_window=64)
    assert kinds(made) == "fsfs"
    with pytest.raises(ConfigError, match="quantum_attention"):
        spec(model_type="brand_new", layer_types=["quantum_attention"] * 4)


@pytest.mark.parametrize("empty", [{}, [], None, {"text_config": {}}, {"text_config": {"text_config": {}}}])
def test_empty_configs_are_refused(empty: Any) -> None:
    with pytest.raises(ConfigError):
        ModelSpec.from_hf_config(empty)


def test_nesting_is_bounded() -> None:
    deep: dict[str, Any] = dict(BASE)
    for _ in range(50):
        deep = {"text_config": deep}
    with pytest.raises(ConfigError):
        ModelSpec.from_hf_config(deep)

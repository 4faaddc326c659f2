"""What must hold for every model, format and split."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsteward.errors import ConfigError
from kvsteward.ledger import ModelSpec, budget_for, capacity_tokens, tokens_in
from kvsteward.ledger.alloc import llamacpp, sglang, transformers, vllm
from kvsteward.ledger.formats import get, names

relaxed = settings(deadline=None)  # shared machines stall
DIMS = st.sampled_from([32, 64, 80, 96, 128, 256])
FORMATS = st.sampled_from(["f32", "f16", "bf16", "fp8", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"])


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Plain, windowed, latent and recurrent models of all sizes."""
    kv, dim, layers = draw(st.sampled_from([1, 2, 4, 8, 16])), draw(DIMS), draw(st.integers(1, 40))
    base: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": kv * draw(st.sampled_from([1, 2, 4])),
        "num_key_value_heads": kv,
        "head_dim": dim,
        "hidden_size": kv * dim,
        "torch_dtype": draw(st.sampled_from(["float16", "bfloat16", "float32"])),
    }
    kind = draw(st.sampled_from(["plain", "windowed", "latent", "recurrent"]))
    if kind == "windowed":
        types = draw(
            st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers)
        )
        return base | {"model_type": "gpt_oss", "layer_types": types, "sliding_window": draw(st.integers(1, 4096))}
    if kind == "latent":
        return base | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    if kind == "recurrent":
        return base | {
            "model_type": "qwen3_5_text",
            "full_attention_interval": 4,
            "num_hidden_layers": 4 * layers,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
        }
    return base


SPECS = configs().map(ModelSpec.from_hf_config)
TOKENS = st.integers(0, 200_000)


@relaxed
@given(SPECS, TOKENS, st.integers(0, 5_000), FORMATS)
def test_monotone_in_context(spec: ModelSpec, tokens: int, more: int, fmt: str) -> None:
    assert spec.kv_bytes(tokens, kv_dtype=fmt) <= spec.kv_bytes(tokens + more, kv_dtype=fmt)


@relaxed
@given(SPECS, TOKENS, st.sampled_from([1, 16, 32, 128]))
def test_blocks_round_up_by_less_than_one(spec: ModelSpec, tokens: int, block: int) -> None:
    exact, padded = spec.kv_bytes(tokens), spec.kv_bytes(tokens, block_tokens=block)
    assert exact <= padded <= exact + (block - 1) * spec.kv_bytes_per_token()
    assert padded == spec.kv_bytes(-(-tokens // block) * block)


@relaxed
@given(SPECS, TOKENS, st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_ranks_hold_at_least_the_whole(spec: ModelSpec, tokens: int, tp: int) -> None:
    assert tp * spec.kv_bytes(tokens, tp=tp) >= spec.kv_bytes(tokens)
    assert spec.kv_bytes(tokens, tp=tp) <= spec.kv_bytes(tokens)


@relaxed
@given(SPECS, TOKENS, st.integers(1, 8))
def test_stages_hold_the_whole(spec: ModelSpec, tokens: int, pp: int) -> None:
    if pp <= len(spec.layers):
        assert sum(len(stage) for stage in spec.stages(1, pp)) == len(spec.layers)
        assert pp * spec.kv_bytes(tokens, pp=pp) >= spec.kv_bytes(tokens)


@relaxed
@given(SPECS, TOKENS, FORMATS, FORMATS)
def test_keys_and_values_add_up(spec: ModelSpec, tokens: int, k: str, v: str) -> None:
    mixed = spec.kv_bytes(tokens, k_dtype=k, v_dtype=v)
    swapped = spec.kv_bytes(tokens, k_dtype=v, v_dtype=k)
    both = spec.kv_bytes(tokens, kv_dtype=k) + spec.kv_bytes(tokens, kv_dtype=v)
    assert mixed + swapped == both


@relaxed
@given(SPECS, st.integers(0, 2**38), st.sampled_from([1, 16, 128]))
def test_budget_and_tokens_are_inverse(spec: ModelSpec, budget: int, block: int) -> None:
    fits = tokens_in(spec, budget, block_tokens=block)
    assert budget_for(spec, fits.tokens, block_tokens=block) <= budget
    assert budget_for(spec, fits.tokens + 1, block_tokens=block) > budget


@relaxed
@given(SPECS, st.integers(1, 100_000), st.integers(1, 16_384))
def test_vllm_charges_at_least_what_the_model_keeps(spec: ModelSpec, tokens: int, batched: int) -> None:
    made = vllm.layout(spec, vllm.VLLM(max_model_len=tokens, max_num_batched_tokens=batched))
    assert made.request_bytes(tokens) >= spec.kv_bytes(tokens)
    assert made.pages(tokens) <= made.pages(tokens + 1)


@relaxed
@given(SPECS, st.integers(0, 2**36))
def test_no_pool_is_larger_than_its_bytes(spec: ModelSpec, budget: int) -> None:
    made = vllm.layout(spec, vllm.VLLM())
    assert made.blocks(budget) * made.block_bytes <= budget
    pools = sglang.pools(spec, budget, sglang.SGLang())
    page = sglang.sized(spec, 0, 0, sglang.SGLang()).total_bytes
    assert pools.total_bytes <= budget + page
    context = llamacpp.context_for(spec, budget, llamacpp.LlamaCpp())
    if context:
        assert llamacpp.buffers(spec, llamacpp.LlamaCpp(n_ctx=context)).total_bytes <= budget


@relaxed
@given(SPECS, st.integers(1, 50_000))
def test_dynamic_never_exceeds_static(spec: ModelSpec, tokens: int) -> None:
    assert transformers.dynamic_bytes(spec, tokens) <= transformers.static_bytes(spec, tokens)


@relaxed
@given(SPECS, st.integers(1, 32_768), st.integers(1, 8))
def test_full_windows_are_the_dearest(spec: ModelSpec, context: int, slots: int) -> None:
    some = llamacpp.buffers(spec, llamacpp.LlamaCpp(n_ctx=context, slots=slots))
    full = llamacpp.buffers(spec, llamacpp.LlamaCpp(n_ctx=context, slots=slots, swa_full=True))
    assert some.total_bytes <= full.total_bytes


@relaxed
@given(st.sampled_from(names()), st.integers(0, 10_000))
def test_formats_hold_their_bits(name: str, values: int) -> None:
    fmt = get(name)
    assert fmt.size_bytes(values) * 8 >= int(values * fmt.bits)
    assert fmt.size_bytes(values) <= fmt.size_bytes(values + 1)


@relaxed
@given(SPECS, st.sampled_from(["vllm", "vllm-cpu", "sglang", "llamacpp", "transformers", "blocks"]))
def test_every_engine_explains_its_figures(spec: ModelSpec, engine: str) -> None:
    made = capacity_tokens(spec, 2**34, engine=engine, max_model_len=4096)
    assert made.tokens >= 0
    assert made.figures
    assert all(figure.formula and figure.source for figure in made.figures)
    assert made.to_dict()["tokens"] == int(made)


@pytest.mark.parametrize(
    "bad", [{"engine": "none"}, {"max_model_len": 0}, {"tp": 0}, {"block_size": -1}, {"slots": 0}, {"draft_tokens": -1}]
)
def test_bad_sizes_are_refused(bad: dict[str, Any]) -> None:
    spec = ModelSpec.from_hf_config(
        {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128}
    )
    with pytest.raises(ConfigError):
        capacity_tokens(spec, 2**30, **bad)

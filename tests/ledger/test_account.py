"""The account adds up, and says how."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import reports

from kvsteward.errors import ConfigError
from kvsteward.ledger import ModelSpec, account


@pytest.mark.parametrize("name", sorted(reports.models()))
@pytest.mark.parametrize("tp", [1, 2])
def test_lines_add_up(name: str, tp: int) -> None:
    spec = ModelSpec.from_hf_config(reports.models()[name])
    made = account(spec, 10_000, kv_dtype="fp8", tp=tp, pp=2)
    assert sum(line.value for line in made.lines) == made.total_bytes
    assert made.total_bytes == spec.kv_bytes(10_000, kv_dtype="fp8", tp=tp, pp=2)
    assert all(line.formula and line.source for line in made.lines)
    assert len(made.rows()) == len(made.lines) + 1
    assert made.to_dict()["total_bytes"] == made.total_bytes


def test_a_separate_draft_model_adds_its_layers() -> None:
    big, small = (ModelSpec.from_hf_config(reports.models()[name]) for name in ("Llama-3-70B", "Llama-3.1-8B"))
    both = big.with_draft(small)
    assert both.kv_bytes(1_000) == big.kv_bytes(1_000) + small.kv_bytes(1_000)


def test_a_mixed_latent_is_656_bytes() -> None:
    spec = ModelSpec.from_hf_config(reports.models()["DeepSeek-R1"])
    assert spec.kv_bytes_per_token(kv_dtype="fp8_ds_mla") == 61 * 656
    with pytest.raises(ConfigError, match="latents"):
        ModelSpec.from_hf_config(reports.models()["Llama-3.1-8B"]).kv_bytes_per_token(kv_dtype="fp8_ds_mla")

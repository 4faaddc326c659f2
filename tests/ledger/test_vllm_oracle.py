"""The page rules against vLLM's own code, where its environment is at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import reports

from kvsteward.ledger import Kind, ModelSpec
from kvsteward.ledger.alloc import vllm

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("KVSTEWARD_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
POOL_BYTES = 40 * 2**30
LENGTHS = ((8_192, 8_192, "bf16", 1), (131_072, 2_048, "bf16", 1), (65_536, 8_192, "fp8", 2))
NOT_SPLIT_BY_TWO = {"bitnet-2b"}


def case_of(spec: ModelSpec, settings: vllm.VLLM) -> dict[str, Any]:
    made = vllm.layout(spec, settings)
    kept = [layer for layer in spec.layers if layer.kind not in {Kind.NONE, Kind.SHARED, Kind.CROSS}]
    states = any(layer.kind is Kind.STATE for layer in kept)
    layers = [
        {
            "kind": str(layer.kind),
            "heads": layer.heads_on_rank(settings.tp),
            "k_dim": layer.k_dim,
            "v_dim": layer.v_dim,
            "span": layer.span_tokens,
            "index_dim": layer.index_dim,
            "state_bytes": vllm.state_page_bytes(layer, settings),
        }
        for layer in kept
    ]
    return {
        "layers": layers,
        "block_tokens": made.block_tokens if states else settings.block_tokens,
        "max_model_len": settings.max_model_len,
        "in_flight_tokens": settings.in_flight_tokens,
        "bytes": 1 if settings.kv_dtype == "fp8" else 2,
        "state_page": made.page_bytes if states else None,
        "state_mode": settings.resolved_state_mode,
        "draft_tokens": settings.draft_tokens,
        "hybrid_manager": True,
        "pool_bytes": POOL_BYTES,
        "ratios": [layer.ratio for layer in kept] if kept[0].kind is Kind.COMPRESSED else [],
    }


def ours(spec: ModelSpec, settings: vllm.VLLM) -> dict[str, int]:
    made = vllm.layout(spec, settings)
    blocks = made.blocks(POOL_BYTES)
    return {
        "groups": made.group_count,
        "block_bytes": made.block_bytes,
        "blocks": blocks,
        "tokens": made.printed_tokens(blocks),
        "pages": made.pages(settings.max_model_len),
    }


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM environment (make setup-vllm, or KVSTEWARD_VLLM_PYTHON)")
def test_pages_are_those_of_vllm() -> None:
    cases, answers, names = [], [], []
    for name, config in reports.models().items():
        spec = ModelSpec.from_hf_config(config)
        for length, batched, kv_dtype, tp in LENGTHS:
            if tp > 1 and name in NOT_SPLIT_BY_TWO:
                continue
            settings = vllm.VLLM(max_model_len=length, max_num_batched_tokens=batched, kv_dtype=kv_dtype, tp=tp)
            cases.append(case_of(spec, settings))
            answers.append(ours(spec, settings))
            names.append((name, length, kv_dtype, tp))
    script = Path(__file__).with_name("vllm_oracle.py")
    done = subprocess.run(
        [str(PYTHON), str(script)], input=json.dumps(cases).encode(), capture_output=True, check=True, timeout=110
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    wrong = [(name, our, their) for name, our, their in zip(names, answers, theirs, strict=True) if our != their]
    assert not wrong
    assert len(theirs) > 150

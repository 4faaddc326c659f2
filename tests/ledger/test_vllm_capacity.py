"""What the ledger predicts is what vLLM prints when it starts: SmolLM2 on the CPU, two KV formats, three block sizes.

A CPU without AVX-512 cannot run an fp8 cache: vLLM then sizes and prints it, and stops at its warm-up. The figure
counts all the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from kvsteward.ledger import ModelSpec, capacity_tokens

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL = ROOT / ".venv-vllm" / "smollm2"
START = """
import sys
from vllm import LLM
LLM(sys.argv[1], max_model_len=2048, enforce_eager=True, block_size=int(sys.argv[2]), kv_cache_dtype=sys.argv[3])
"""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("block_tokens", [32, 64, 128])
def test_predicted_capacity_is_what_vllm_prints(kv_dtype: str, block_tokens: int, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("no vLLM environment; 'make setup-vllm' makes one")
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [str(PYTHON), "-c", START, str(MODEL), str(block_tokens), kv_dtype]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    said = done.stdout + done.stderr
    printed = re.search(r"KV cache size: ([\d,]+) tokens", said)
    assert printed, said[-3000:]
    assert done.returncode == 0 or "requires x86 with AVX-512" in said, said[-3000:]
    spec = ModelSpec.from_hf_config(json.loads((MODEL / "config.json").read_text()))
    predicted = capacity_tokens(
        spec, 2**30, engine="vllm-cpu", block_size=block_tokens, max_model_len=2048, kv_dtype=kv_dtype
    )
    assert predicted.tokens == int(printed.group(1).replace(",", ""))

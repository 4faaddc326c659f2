"""Writes the KV of a real model for 128 tokens of text, as one block for `benchmarks/blocks.py --block FILE`.

    VLLM_PYTHON scripts/kv_block.py MODEL_DIR FILE

bfloat16, in the order layer, K or V, head, token, number. Needs torch and transformers; the text is Python's own help.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path

TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = " ".join(list(pydoc_data.topics.topics.values())[:4])
    tokens = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[:, : 2 * TOKENS]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    with torch.no_grad():
        layers = model(tokens, use_cache=True).past_key_values.layers
    parts = [part[0][:, TOKENS:] for layer in layers for part in (layer.keys, layer.values)]
    block = torch.stack(parts).contiguous().view(torch.int16).numpy().tobytes()
    args.file.write_bytes(block)
    print(f"{len(block)} bytes: {len(layers)} layers, {tuple(parts[0].shape)} heads, tokens, numbers")


if __name__ == "__main__":
    main()

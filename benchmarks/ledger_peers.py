"""Runs inside an environment of its own: asks other calculators for the bytes of one request, from a config alone.

Reads the cases as JSON on standard input, prints one JSON object: tool -> case -> bytes or the reason why not. No
network: each tool's own formula is called on the config that it would have downloaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any
from unittest import mock

Case = dict[str, Any]
BYTES = {"bf16": 2, "fp8": 1}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **config.get("text_config", {})}


def kvfit(case: Case) -> float:
    from kvfit.architectures import estimate_cache

    size = BYTES[case["kv_dtype"]]
    return float(estimate_cache(case["config"], context_tokens=case["tokens"], kv_bytes=size).total_bytes)


def ridgepoint(case: Case) -> float:
    import ridgepoint as tool
    import ridgepoint.hf

    def download(_repo: str, filename: str, _revision: str) -> Any:
        if filename != "config.json":
            raise OSError("offline")
        return case["config"]

    count = mock.patch.object(ridgepoint.hf, "_safetensors_numel", lambda *_: 8_000_000_000)
    with mock.patch.object(ridgepoint.hf, "_download_json", download), count:
        dtype = "fp8" if case["kv_dtype"] == "fp8" else "fp16"
        answer = tool.fit("a/b", "h100-80gb", count=8, ctx=case["tokens"], kv_cache_dtype=dtype, as_json=True)
    return float(json.loads(answer)["capacity"]["bytes_per_seq"])


def llm_cal(case: Case) -> float:
    from llm_cal.architecture.detector import detect
    from llm_cal.architecture.formulas.kv_cache import compute_kv_cache_bytes

    answer = compute_kv_cache_bytes(detect(case["config"]), case["tokens"], BYTES[case["kv_dtype"]])
    if answer.value == 0:
        raise ValueError(answer.source)
    return float(answer.value)


def hf_mem(case: Case) -> float:
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size

    dtype = "F8_E4M3" if case["kv_dtype"] == "fp8" else "BF16"
    return float(compute_safetensors_kv_cache_size(flat(case["config"]), dtype, case["tokens"]))


def modelinfo(case: Case) -> float:
    from modelinfo.architecture import extract_architecture

    layers, width, _ = extract_architecture({}, flat(case["config"]))
    return float(2 * layers * width * case["tokens"] * 2)


TOOLS: dict[str, tuple[str, Callable[[Case], float]]] = {
    "kvfit": ("kvfit", kvfit),
    "ridgepoint": ("ridgepoint", ridgepoint),
    "llm-cal": ("llm-cal", llm_cal),
    "hf-mem": ("hf-mem", hf_mem),
    "modelinfo": ("modelinfo-cli", modelinfo),
}


def ask(tool: Callable[[Case], float], case: Case) -> dict[str, Any]:
    """Bytes, or the tool's own words of refusal. Whatever a foreign tool raises is its answer."""
    try:
        return {"bytes": tool(case)}
    except Exception as error:  # noqa: BLE001 - any failure of a foreign tool is a result here
        return {"error": f"{type(error).__name__}: {error}"[:160]}


def main() -> None:
    cases = json.load(sys.stdin)["cases"]
    answer: dict[str, Any] = {}
    for name, (package, tool) in TOOLS.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        answer[name] = {"version": version, "cases": {case["name"]: ask(tool, case) for case in cases}}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

"""The ledger beside other calculators: bytes that one request is charged, eight models, ratio to the engine's figure.

    python benchmarks/ledger.py [--quick] [--json] [--env .venv-peers]

The first run makes the environment `--env` and installs the peers there; `--quick` leaves them out. Sliding hybrids are
charged at admission for 8,192 batched tokens; a tool that counts logical bytes answers another question, and that is
the point of the table. `--json` prints one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

from kvsteward.ledger import ModelSpec
from kvsteward.ledger.alloc import vllm

HERE = Path(__file__).parent
PEERS = ("kvfit", "ridgepoint", "llm-cal", "hf-mem", "modelinfo-cli")
GIB = 2**30
TOLERANCE = 0.01
INSTALL_TIMEOUT_S = 300
RUN_TIMEOUT_S = 120


def ours(case: dict[str, Any]) -> float:
    """What the engine named by the case charges: vLLM's pages, or a state and plain tokens (SGLang)."""
    spec, tokens = ModelSpec.from_hf_config(case["config"]), case["tokens"]
    if case["truth"].startswith("SGLang"):
        return spec.kv_bytes(tokens, kv_dtype=case["kv_dtype"])
    ranks = 4 if "4 ranks" in case["truth"] else 1
    settings = vllm.VLLM(max_model_len=tokens, kv_dtype=case["kv_dtype"], tp=ranks)
    return ranks * vllm.layout(spec, settings).request_bytes(tokens)


def peers(env: Path, cases: dict[str, Any]) -> dict[str, Any]:
    """The answers of the peers that could be installed."""
    python = env / "bin" / "python"
    if not python.exists():
        venv.create(env, with_pip=True)
    for package in PEERS:
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
        if subprocess.run(install, check=False, capture_output=True, timeout=INSTALL_TIMEOUT_S).returncode:
            print(f"not installable here: {package}", file=sys.stderr)
    done = subprocess.run(
        [str(python), str(HERE / "ledger_peers.py")],
        input=json.dumps(cases).encode(),
        check=True,
        capture_output=True,
        timeout=RUN_TIMEOUT_S,
    )
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def grade(size: float | None, truth_gib: float) -> dict[str, Any]:
    """The ratio to the truth, and whether it is within the tolerance."""
    if size is None:
        return {"gib": None, "ratio": None, "right": False}
    ratio = size / GIB / truth_gib
    return {"gib": round(size / GIB, 3), "ratio": round(ratio, 4), "right": abs(ratio - 1) <= TOLERANCE}


def cell(result: dict[str, Any]) -> str:
    return "refused" if result["gib"] is None else f"{result['gib']:.3f} ({(result['ratio'] - 1) * 100:+.0f}%)"


def show(table: dict[str, dict[str, Any]], truths: dict[str, float]) -> None:
    names = list(table)
    print("| one request | engine GiB | " + " | ".join(names) + " |")
    print("| --- " * (len(names) + 2) + "|")
    for case, truth in truths.items():
        print(f"| {case} | {truth:.3f} | " + " | ".join(cell(table[name][case]) for name in names) + " |")
    right = (f"{sum(1 for case in truths if table[name][case]['right'])}/{len(truths)}" for name in names)
    print("| within 1 % | | " + " | ".join(right) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="our own figures only: nothing is installed")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--env", type=Path, default=Path(".venv-peers"), help="environment for the other tools")
    options = parser.parse_args()
    cases = json.loads((HERE / "data" / "ledger_cases.json").read_text())
    truths = {case["name"]: case["truth_gib"] for case in cases["cases"]}
    started = time.perf_counter()
    table = {"kvsteward": {case["name"]: grade(ours(case), case["truth_gib"]) for case in cases["cases"]}}
    own_ms = (time.perf_counter() - started) * 1000
    if not options.quick:
        for name, answer in peers(options.env, cases).items():
            label = f"{name} {answer['version']}"
            table[label] = {case: grade(answer["cases"][case].get("bytes"), truths[case]) for case in truths}
    show(table, truths)
    if options.json:
        right = {name: sum(1 for case in row.values() if case["right"]) for name, row in table.items()}
        print(
            json.dumps(
                {"benchmark": "ledger", "cases": len(truths), "right": right, "ms": round(own_ms, 2), "table": table}
            )
        )


if __name__ == "__main__":
    main()

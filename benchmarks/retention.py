"""How much of a prompt is reused when agents pause: LRU, kvsteward's retention, and an oracle.

    python benchmarks/retention.py --simulate [--seeds 3] [--pools 1,2,4,8,16] [--alive 50] [--held]
        [--quick] [--json]

Replays the WEKA sessions (../shared/data/traces/weka: 471 whole coding-agent sessions) against one pool of a size in
millions of tokens, interleaved in real time. `closed` is the part of the way from LRU to the oracle. `final` is the
same policy where clients say that a session is over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from retention_sim import BLOCK_TOKENS, LRU, Learned, Oracle, Policy, Request, replay, trace

WEKA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "traces" / "weka" / "weka_compact.jsonl.gz"
Make = Callable[[Sequence[Request], bool, int], Policy]
POLICIES: dict[str, Make] = {
    "lru": lambda requests, held, blocks: LRU(held),
    "ours": lambda requests, held, blocks: Learned(blocks),
    "final": lambda requests, held, blocks: Learned(blocks, finals=True),
    "oracle": lambda requests, held, blocks: Oracle(requests),
}


def simulate(pools: Sequence[float], seeds: int, alive: float, held: bool) -> list[dict[str, float]]:
    """A row for each pool, printed as it comes: the shares that are reused, %."""
    if not WEKA.exists():
        sys.exit(f"no recorded sessions: {WEKA} is absent; they lie beside the repository in ../shared")
    traces = [trace(WEKA, seed, alive) for seed in range(1, seeds + 1)]
    print(f"{len(traces[0])} requests, {alive:g} alive, {seeds} seeds, blocks of running requests held: {held}")
    print(
        "| pool, M tokens | " + " | ".join(POLICIES) + " | closed | its halves | closed, final | its halves | seconds |"
    )
    print("|" + " --- |" * (len(POLICIES) + 6))
    rows: list[dict[str, float]] = []
    for pool in pools:
        began = time.monotonic()
        blocks = int(pool * 1e6 / BLOCK_TOKENS)
        shares: dict[str, list[float]] = {}
        for name, make in POLICIES.items():
            outcomes = [replay(t, blocks, make(t, held, blocks), held=held) for t in traces]
            each = [(o.share, *o.halves) for o in outcomes]
            shares[name] = [100 * sum(column) / seeds for column in zip(*each, strict=True)]
        cells = [f"{pool:g}", *(f"{share[0]:.2f}" for share in shares.values())]
        for name in ("ours", "final"):
            whole, first, second = (closed(*(shares[n][i] for n in ("lru", name, "oracle"))) for i in range(3))
            cells += [whole, f"{first}, {second}"]
        print("| " + " | ".join(cells) + f" | {time.monotonic() - began:.0f} |", flush=True)
        rows.append({"pool_m_tokens": pool, **{name: share[0] for name, share in shares.items()}})
    return rows


def closed(lru: float, ours: float, oracle: float) -> str:
    gap = oracle - lru
    return f"{(ours - lru) / gap:.0%}" if gap > 0.05 else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pools", default="1,2,4,8,16")
    parser.add_argument("--alive", type=float, default=50.0)
    parser.add_argument("--held", action="store_true", help="blocks of running requests cannot be taken")
    parser.add_argument("--quick", action="store_true", help="one seed, the first of the pools")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    if not options.simulate:
        parser.error("say what to do: --simulate")
    pools = [float(p) for p in options.pools.split(",")]
    if options.quick:
        pools, options.seeds = pools[:1], 1
    rows = simulate(pools, options.seeds, options.alive, options.held)
    if options.json:
        print(json.dumps({"seeds": options.seeds, "alive": options.alive, "held": options.held, "rows": rows}))


if __name__ == "__main__":
    main()

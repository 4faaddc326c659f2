"""WEKA's order on a real vLLM: its own free list, kvsteward's connector, and the oracle.

    python benchmarks/retention_order.py --python VLLM_PYTHON --model DIR [--pools 0.2,0.3,0.45,0.6]
        [--kinds stock,ours,stops,finals] [--layers 4] [--json FILE]

Recorded coding-agent sessions (../shared/data/traces/weka), `--alive` at once, in the order of their requests, one
after the other and without waiting: a pause is as long as the other sessions' work in it. All lengths are divided by
one number so that the longest prompt fits `--context`; what two requests share is scaled alike. Prompts are token
ids, answers one token. `--pools`: sizes as shares of what the live sessions hold at their peak.

`ours` is told nothing but the session's id, `stops` also why each turn stopped (as a gateway tells it), `finals` also
which turn of a session was the last. Oracle: Belady on blocks, simulated on the same turns; LRU is simulated too, to
be compared with stock. `--layers` cuts the model and leaves its weights random: what is reused is the same, and more
turns fit the time. Without `--python` all is simulated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from retention_engine import BLOCK_TOKENS, server
from retention_sim import LRU, Learned, Oracle, Policy, Request, replay, trace

WEKA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "traces" / "weka" / "weka_compact.jsonl.gz"
WEKA_BLOCK = 64
STOPS = {"tool_use": "tool_calls", "end_turn": "stop"}
HINTS = ("ours", "stops", "finals")
FIRST_ID, LAST_ID = 1000, 40000


class Turn(NamedTuple):
    """`request` in blocks of the engine; `prompt` token ids."""

    request: Request
    prompt: tuple[int, ...]


def turns(requests: Sequence[Request], context_tokens: int) -> list[Turn]:
    """The requests with all lengths divided by one number, in their order, one a second."""
    ratio = (context_tokens - 8) / (max(r.blocks for r in requests) * WEKA_BLOCK)
    made: dict[tuple[str, int], tuple[int, ...]] = {}
    found: list[Turn] = []
    last = {r.session: i for i, r in enumerate(requests)}
    for at, r in enumerate(requests):
        rng = random.Random(f"{r.session} {r.number}")
        parent = made.get((r.session, r.parent), ())
        head = parent[: int(r.shared * WEKA_BLOCK * ratio)]
        fresh = max(1, int(r.blocks * WEKA_BLOCK * ratio) - len(head))
        prompt = head + tuple(rng.randrange(FIRST_ID, LAST_ID) for _ in range(fresh))
        made[r.session, r.number] = prompt
        shared, whole = len(head) // BLOCK_TOKENS, len(prompt) // BLOCK_TOKENS
        over = last[r.session] == at and r.last
        request = r._replace(t=float(at), ends=at + 0.5, shared=shared, blocks=max(1, whole), last=over)
        found.append(Turn(request, prompt))
    return found


def peak_blocks(requests: Sequence[Request]) -> int:
    """The most that sessions which are not over hold at once, each its newest path."""
    held: dict[str, int] = {}
    peak = 0
    for r in requests:
        held[r.session] = r.blocks
        peak = max(peak, sum(held.values()))
        if r.last:
            del held[r.session]
    return peak


def play(url: str, played: Sequence[Turn], kind: str, budget_s: float) -> tuple[list[tuple[int, int, float]], float]:
    """(prompt tokens, cached tokens, started at) of each turn, and the wall time. Stops at `budget_s`."""
    usages, began = [], time.monotonic()
    for turn in played:
        if time.monotonic() - began > budget_s:
            break
        r = turn.request
        body: dict[str, Any] = {"model": "smol", "prompt": turn.prompt, "max_tokens": 1, "temperature": 0}
        hint: dict[str, Any] = {"version": 1}
        if kind in ("stops", "finals") and r.stop in STOPS:
            hint["stop"] = STOPS[r.stop]
        if kind == "finals" and r.last:
            hint["final"] = True
        if len(hint) > 1:
            body["kv_transfer_params"] = {"kvsteward": hint}
        headers = {"Content-Type": "application/json", "X-Session-ID": r.session}
        at_s = time.monotonic() - began
        ask = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(ask, timeout=300) as response:
            usage = json.load(response)["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        usages.append((usage["prompt_tokens"], cached, at_s))
    return usages, time.monotonic() - began


def simulated(played: Sequence[Turn], blocks: int, policy: Policy) -> float:
    """Share of prompt tokens reused, as vLLM counts: whole blocks; one block is its null block."""
    asked = sum(len(turn.prompt) for turn in played) / BLOCK_TOKENS
    return replay([turn.request for turn in played], blocks - 1, policy, held=True).reused / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="of an environment that has vLLM; without it all is simulated")
    parser.add_argument("--model")
    parser.add_argument("--pools", default="0.2,0.4,0.8")
    parser.add_argument("--kinds", default="stock,ours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alive", type=float, default=20.0)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--turns", type=int, default=1500)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for each kind")
    parser.add_argument("--log", default="retention-order.log")
    parser.add_argument("--json", help="a file to which a line is added for each run")
    options = parser.parse_args()
    if not WEKA.exists():
        sys.exit(f"no recorded sessions: {WEKA} is absent; they lie beside the repository in ../shared")
    requests = trace(WEKA, options.seed, options.alive, options.sessions)[: options.turns]
    played = turns(requests, options.context)
    peak = peak_blocks([turn.request for turn in played])
    mean = sum(len(turn.prompt) for turn in played) / len(played)
    print(
        f"{len(played)} turns of {len({t.request.session for t in played})} sessions, {mean:.0f} tokens a prompt,"
        f" live sessions hold {peak} blocks of {BLOCK_TOKENS} at their peak",
        flush=True,
    )
    cut = ["--hf-overrides", json.dumps({"num_hidden_layers": options.layers}), "--load-format", "dummy"]
    for pool in (float(p) for p in options.pools.split(",")):
        blocks = int(pool * peak)
        if not options.python:
            policies: dict[str, Policy] = {
                "lru": LRU(True),
                "stops": Learned(blocks),
                "finals": Learned(blocks, finals=True),
                "oracle": Oracle([t.request for t in played]),
            }
            shares = {name: simulated(played, blocks, policy) for name, policy in policies.items()}
            print(f"{pool:g} ({blocks} blocks) simulated: {in_percent(shares)}", flush=True)
            continue
        for kind in options.kinds.split(","):
            with server(
                options.python,
                options.model,
                blocks,
                {} if kind in HINTS else None,
                Path(options.log),
                context_tokens=options.context,
                more=cut if options.layers else [],
            ) as url:
                usages, wall_s = play(url, played, kind, options.budget)
            done = played[: len(usages)]
            tokens = sum(prompt for prompt, _, _ in usages)
            shares = {
                kind: sum(cached for _, cached, _ in usages) / tokens,
                "simulated lru": simulated(done, blocks, LRU(True)),
                "oracle": simulated(done, blocks, Oracle([t.request for t in done])),
            }
            print(
                f"{pool:g} ({blocks} blocks), {len(usages)} turns, {tokens} tokens, {wall_s:.0f} s:"
                f" {in_percent(shares)}",
                flush=True,
            )
            if options.json:
                row = {"pool": pool, "blocks": blocks, "kind": kind, "wall_s": wall_s, **shares, "usages": usages}
                with Path(options.json).open("a") as out:
                    out.write(json.dumps(row) + "\n")


def in_percent(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.2f} %" for name, share in shares.items())


if __name__ == "__main__":
    main()

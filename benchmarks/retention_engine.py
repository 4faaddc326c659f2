"""The same turns on a real vLLM, with its own free list and with kvsteward's connector.

    python benchmarks/retention_engine.py --python VLLM_PYTHON --model DIR [--over 1.3] [--kinds stock,ours]
        [--quick] [--json]

Sessions take turns in a circle, each turn with its whole history and a little more. `--over`: the sessions' tokens at
the end over the pool's. Printed: prompt tokens reused as vLLM reports them (`cached_tokens`), the wall time of all
turns, and beside them what LRU and the oracle reuse of the same turns in the simulator (answers' tokens not counted).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _serving import free_url, process
from retention_sim import LRU, Oracle, Request, replay

SRC = Path(__file__).resolve().parents[1] / "src"
BLOCK_TOKENS = 32
CONNECTOR = {
    "kv_connector": "KVStewardConnector",
    "kv_connector_module_path": "kvsteward.kv.vllm.connector",
    "kv_role": "kv_both",
}
WORDS = [
    "time",
    "person",
    "year",
    "way",
    "day",
    "thing",
    "man",
    "world",
    "life",
    "hand",
    "part",
    "child",
    "eye",
    "work",
]


@contextlib.contextmanager
def server(
    python: str,
    model: str,
    blocks: int,
    options: dict[str, Any] | None,
    log: Path,
    *,
    context_tokens: int = 4096,
    path: str = str(SRC),
    more: Sequence[str] = (),
    children: list[subprocess.Popen[bytes]] | None = None,
    **more_env: str,
) -> Iterator[str]:
    """A vLLM server's URL; with the connector if there are `options` for it. `path`: its PYTHONPATH;
    `more`: arguments; `children` gets its process."""
    url, port = free_url()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "smol"]
    command += ["--max-model-len", str(context_tokens), "--enforce-eager", "--block-size", str(BLOCK_TOKENS)]
    command += ["--num-gpu-blocks-override", str(blocks), "--enable-prompt-tokens-details"]
    command += ["--host", "127.0.0.1", "--port", str(port), *more]
    command += (
        ["--kv-transfer-config", json.dumps({**CONNECTOR, "kv_connector_extra_config": options})]
        if options is not None
        else []
    )
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # With a connector vLLM on the CPU keeps one core more free; of two cores none is left, and then it takes both for
    # its kernels and fights with its own scheduler. So that kinds differ by the connector alone, all get the same.
    env |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1", "PYTHONPATH": path, **more_env}
    with process(command, log, url, 480, **env) as child:
        if children is not None:
            children.append(child)
        yield url


def chat(url: str, session: str, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    body = {"model": "smol", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    headers = {"Content-Type": "application/json", "X-Session-ID": session}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def play(url: str, sessions: int, rounds: int, words: int, more: int) -> tuple[list[tuple[int, int]], float]:
    """(prompt tokens, cached tokens) of each turn in order, and the wall time."""
    rng = random.Random(5)

    def text(n: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(n))

    histories = [[{"role": "user", "content": f"Session {i}. {text(words)}"}] for i in range(sessions)]
    usages, began = [], time.monotonic()
    for turn in range(rounds * sessions):
        history = histories[turn % sessions]
        answer = chat(url, f"s{turn % sessions}", history)
        usage = answer["usage"]
        usages.append((usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0))
        history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        history.append({"role": "user", "content": text(more)})
    return usages, time.monotonic() - began


def simulated(usages: list[tuple[int, int]], sessions: int, blocks: int) -> tuple[float, float]:
    """Shares of prompt tokens that LRU and the oracle reuse."""
    trace = []
    for turn, (tokens, _) in enumerate(usages):
        number = turn // sessions
        shared = usages[turn - sessions][0] // BLOCK_TOKENS if number else 0
        at = float(turn)
        whole = tokens // BLOCK_TOKENS
        trace.append(Request(at, f"s{turn % sessions}", number, number - 1, shared, whole, at, "tool_use", False))
    asked = sum(tokens for tokens, _ in usages) / BLOCK_TOKENS
    return (
        replay(trace, blocks, LRU()).reused / asked,
        replay(trace, blocks, Oracle(trace), held=True).reused / asked,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of an environment that has vLLM")
    parser.add_argument("--model", required=True)
    parser.add_argument("--over", type=float, default=1.3)
    parser.add_argument("--kinds", default="stock,ours")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--words", type=int, default=400)
    parser.add_argument("--log", default="retention-engine.log")
    parser.add_argument("--quick", action="store_true", help="at most 2 rounds of 4 sessions")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    if options.quick:
        options.sessions, options.rounds = min(options.sessions, 4), min(options.rounds, 2)
    more = 40
    rows: list[dict[str, Any]] = []
    tokens = options.sessions * (options.words + 14 + (options.rounds - 1) * (more + 20))
    blocks = int(tokens / options.over / BLOCK_TOKENS)
    print(f"{options.sessions} sessions, {options.rounds} rounds, {blocks} blocks of {BLOCK_TOKENS} tokens")
    for kind in options.kinds.split(","):
        with server(
            options.python,
            options.model,
            blocks,
            {} if kind == "ours" else None,
            Path(options.log),
            context_tokens=2048,
        ) as url:
            usages, wall_s = play(url, options.sessions, options.rounds, options.words, more)
        lru, oracle = simulated(usages, options.sessions, blocks)
        share = sum(cached for _, cached in usages) / sum(tokens for tokens, _ in usages)
        last = sum(tokens for tokens, _ in usages[-options.sessions :])
        print(
            f"{kind}: {share:.1%} of {sum(t for t, _ in usages)} prompt tokens reused, {wall_s:.1f} s;"
            f" simulated LRU {lru:.1%}, oracle {oracle:.1%}; working set {last / blocks / BLOCK_TOKENS:.2f} x pool",
            flush=True,
        )
        rows.append({"kind": kind, "share": share, "wall_s": wall_s, "lru": lru, "oracle": oracle})
    if options.json:
        print(json.dumps({"blocks": blocks, "block_tokens": BLOCK_TOKENS, "rows": rows}))


if __name__ == "__main__":
    main()

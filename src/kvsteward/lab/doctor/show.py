"""The diagnosis on a terminal: the verdict first, then findings by severity, then what was looked at in vain.

Invariant: with `--json` standard output carries one line for each window; all else goes to standard error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import orjson
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from kvsteward.lab.doctor.finding import Clear, Finding, Judged, Severity, Unknown
from kvsteward.lab.doctor.report import Report, engine, sessions, snapshot
from kvsteward.lab.doctor.run import DoctorOptions, Given, examine, read_given
from kvsteward.lab.doctor.verdict import findings

_COLOURS = {Severity.CRITICAL: "bold red", Severity.WARNING: "bold yellow", Severity.ADVICE: "bold cyan"}


def show_doctor(options: DoctorOptions, *, as_json: bool, watch: bool) -> None:
    """Looks for one window and prints; with `watch` again and again until it is interrupted."""
    given = read_given(options)
    try:
        while True:
            report = asyncio.run(_with_progress(options, given))
            if as_json:
                print(orjson.dumps(report.as_json()).decode(), flush=True)
            else:
                Console().print(rendered(report))
            if not watch or options.url is None:
                return
    except (KeyboardInterrupt, asyncio.CancelledError):  # asyncio gives the one or the other for the same Ctrl-C
        return


async def _with_progress(options: DoctorOptions, given: Given) -> Report:
    columns = (TextColumn("looking at {task.description}"), BarColumn(), TextColumn("{task.completed:.0f} s"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = Text(options.url or "saved metrics").plain
        task = bar.add_task(shown, total=options.window_s)
        return await examine(options, given, lambda passed: bar.update(task, completed=passed))


def rendered(report: Report) -> RenderableType:
    """The whole report."""
    found = findings(report.judged)
    return Group(
        _verdict(report),
        *(_finding(judged, finding) for judged, finding in found),
        _figures(report),
        *_rest(report),
        *(Text(f"note: {note}", style="dim") for note in report.notes),
    )


def _verdict(report: Report) -> Panel:
    word, o = report.verdict.word, report.observation
    style = "bold green" if word == "healthy" else "bold yellow"
    what = engine(o)
    version = f" {what['version']}" if what["version"] else ""
    span = "since its start" if o.since_start else f"{o.window_s:.0f} s, {len(o.readings)} readings"
    lines = (
        Text.assemble((word.upper(), style), ": ", report.verdict.why),
        Text(f"Is it the KV cache? {report.verdict.is_kv[0].upper()}{report.verdict.is_kv[1:]}."),
        Text(f"{what['dialect']}{version} at {what['source']} ({span})", style="dim"),
    )
    return Panel(Group(*lines), border_style=style.removeprefix("bold "))


def _finding(judged: Judged, finding: Finding) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for line in finding.evidence:
        table.add_row("seen", Text(line))
    for index, line in enumerate(finding.do):
        table.add_row("do this" if index == 0 else "or", Text(line, style="bold" if index == 0 else ""))
    table.add_row("costs", Text(finding.cost))
    table.add_row("gains", Text(finding.gain))
    table.add_row("source", Text(judged.check.source, style="dim"))
    title = Text.assemble(
        (finding.severity.name, _COLOURS[finding.severity]), f"  {finding.what}", (f"  [{judged.check.name}]", "dim")
    )
    return Group(Text(), title, table)


def _figures(report: Report) -> RenderableType:
    o = report.observation
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    pool = engine(o)["kv_capacity_tokens"]
    if pool:
        table.add_row("pool", f"{pool:,} tokens")
    for name, value in (*snapshot(o).items(), *sessions(o, report.sessions_tokens).items()):
        if value is not None:
            shown = f"{value:.1%}" if name.endswith("ratio") else f"{value:,.0f}"
            table.add_row(name.replace("_", " ").removesuffix(" ratio"), shown)
    for gpu in o.readings[-1].gpus:
        table.add_row(f"GPU {gpu.index}", f"{gpu.name}: {gpu.used_bytes / gpu.total_bytes:.0%} of its memory in use")
    return Group(Text(), Text("Figures of the window", style="bold"), table)


def _rest(report: Report) -> Iterator[RenderableType]:
    clear = [one for one in report.judged if isinstance(one.outcome, Clear)]
    unknown = [one for one in report.judged if isinstance(one.outcome, Unknown)]
    yield Text()
    if clear:
        yield Text.assemble(("Not found: ", "bold"), ", ".join(one.check.name for one in clear))
    if unknown:
        yield Text("Could not be judged:", style="bold")
        for one in unknown:
            assert isinstance(one.outcome, Unknown)
            yield Text.assemble("  ", one.check.name, (f": {one.outcome.why}", "dim"))

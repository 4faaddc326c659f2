"""The findings on a terminal, or as one JSON object. Asks a gateway for its sessions where a URL is given.

Invariants: with `--json` standard output carries one line; the exit status is 1 if something was found.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvsteward.engines.http import HttpClient, HttpOptions
from kvsteward.errors import ConfigError
from kvsteward.lab.lint.read import Logged, read_file, requests_of_logs
from kvsteward.lab.lint.report import Finding, Report, lint
from kvsteward.lab.lint.turns import is_trace, lint_trace

MOST_SESSIONS = 200
MOST_MESSAGES = 100_000
MOST_OF_A_SESSION = 10_000
"""Of a gateway, and of one session of it, so much is read."""
_PAGE = 500


def show_lint(source: str, *, as_json: bool, key: str | None = None, limit: int = 20) -> int:
    """Prints what is found in a file or at a gateway. The exit status: 1 if something was."""
    report = _report(source, key)
    if as_json:
        print(orjson.dumps(report.as_json()).decode())
    else:
        Console().print(rendered(report, limit))
    return 1 if report.findings else 0


def _report(source: str, key: str | None) -> Report:
    if "://" in source:
        return asyncio.run(of_gateway(source, key))
    path = Path(source)
    return lint_trace(path) if is_trace(path) else lint(read_file(path))


async def of_gateway(url: str, key: str | None = None) -> Report:
    """What is found in the requests that clients of a running gateway sent: all branches of the sessions that were used
    last."""
    client = HttpClient(HttpOptions(url.rstrip("/").removesuffix("/v1"), api_key=key)).open()
    try:
        listed = (await _get(client, f"/v1/sessions?limit={MOST_SESSIONS + 1}"))["data"]
        rows, logs, left = listed[:MOST_SESSIONS], list[Logged](), MOST_MESSAGES
        cut = 0
        for row in rows:
            path = f"/v1/sessions/{quote(row['id'], safe='')}"
            most = min(left, MOST_OF_A_SESSION)
            entries = await _entries(client, path, most)
            cut += len(entries) == most
            left -= len(entries)
            if entries:
                logs.append(Logged(row, entries, (await _get(client, f"{path}/view"))["decisions"]))
    finally:
        await client.close()
    left_out = [f"sessions but the {MOST_SESSIONS} that were used last"] if len(listed) > len(rows) else []
    left_out += [f"newer messages of {cut:,} long sessions"] if cut else []
    report = await asyncio.to_thread(lambda: lint(requests_of_logs(logs)))
    return replace(report, left_out=" and ".join(left_out))


async def _entries(client: HttpClient, path: str, most: int) -> list[Any]:
    """The first messages of all branches, page by page."""
    found: list[Any] = []
    while len(found) < most:
        limit = min(_PAGE, most - len(found))
        page = (await _get(client, f"{path}/log?branches=all&offset={len(found)}&limit={limit}"))["data"]
        if not page:
            break
        found += page
    return found


async def _get(client: HttpClient, path: str) -> Any:
    status, body = await client.get_json(path)
    if status != 200 or not isinstance(body, dict):
        raise ConfigError(
            f"{path} answered {status}: is this the URL of a kvsteward gateway?",
            hint="Give the URL that `kvsteward serve` printed, and --key if it asks for one.",
        )
    return body


def rendered(report: Report, limit: int = 20) -> RenderableType:
    """The whole report: figures, then one block for each finding."""
    head = Text.assemble(
        (f"{report.requests:,} requests", "bold"),
        f" of {report.sessions:,} sessions; {report.followed:,} go on from an earlier one; "
        f"about {report.prompt_tokens:,} prompt tokens",
    )
    if report.left_out:
        head = Text.assemble(head, f"; not read: {report.left_out}")
    if not report.findings:
        return Group(head, Text("Nothing breaks the prefix.", style="bold green"))
    lost = Text.assemble(
        (f"{report.lost_ratio:.1%} of the prompt tokens", "bold yellow"),
        f" (about {report.lost_tokens:,}) were in the cache and are computed again:",
    )
    shown = [_block(number, one) for number, one in enumerate(report.findings[:limit], 1)]
    left = len(report.findings) - limit
    more = [Text(f"and {left} more (--limit)", style="dim")] if left > 0 else []
    return Group(head, lost, *shown, *more)


def _block(number: int, found: Finding) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    session = f"session {found.session}, " if found.session else ""
    place = f"{session}request {found.request} (line {found.line}): {found.part}"
    if found.lost_tokens:
        place += f", character {found.character:,}, about" if found.character else ","
        place += f" token {found.token:,}"
    table.add_row("where", Text(place))
    table.add_row("was", Text(repr(found.before)))
    table.add_row("is", Text(repr(found.after)))
    table.add_row("do", Text(found.advice))
    if found.mended_by:
        table.add_row("mended", Text(f"by kvsteward serve: {found.mended_by}", style="green"))
    if found.rule:
        table.add_row("rule", Text(f"hygiene: {{rules: [{found.rule}]}} in a policy", style="green"))
    if found.behind:
        table.add_row("then", Text(f"more of this part changes behind it: {', '.join(found.behind)}"))
    times = "once" if found.times == 1 else f"{found.times:,} times"
    cost = f"{found.lost_ratio:.1%}, about {found.lost_tokens:,} tokens" if found.lost_tokens else "no tokens"
    title = Text.assemble((f"{number}. {found.kind}", "bold yellow"), f"  {times}, {cost}")
    return Group(Text(), title, table)

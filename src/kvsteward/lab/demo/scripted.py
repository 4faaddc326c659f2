"""The scripted agent: what it is asked, which tools it calls, and which results it comes back to much later.

A cycle has four tasks of five turns: four calls and an answer in the engine's own words. The last task of each cycle
goes back to ids, numbers and paths of this and of earlier cycles; the user names them only by where they came from,
so the agent must still have them.

Knows the workshop's tools by name. Invariant: the fourth call of each cycle's first task brings a long result, which
arrives at turn 5, 25, 45, ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from kvsteward.lab.demo.base import Message, Script, Turn, call, result
from kvsteward.lab.demo.workshop import Workshop, declarations

TURNS_PER_CYCLE = 20
_SYSTEM = (
    "You are the maintenance agent of a web shop. You work with tools in the project folder. Answer in short, plain "
    "sentences, and name ids, numbers and paths exactly."
)
_PACKAGES = ("rich", "orjson", "aiohttp", "uvicorn", "starlette", "msgspec", "pyyaml", "typer")
_TOPICS = ("json.dumps", "sqlite3.connect", "shutil.copytree", "textwrap.wrap", "random.sample", "bisect.insort")
_LONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sql", {"query": "SELECT * FROM orders ORDER BY placed"}),
    ("read_file", {"path": "logs/app.log", "start": 1, "lines": 400}),
    ("docs", {"topic": "argparse"}),
    ("list_dir", {"path": "stdlib", "recursive": True}),
    ("run_tests", {"path": "tests/test_rows_0.py"}),
    ("package_info", {"names": []}),
)


@dataclass(slots=True)
class _Notebook:
    """What the agent found in each cycle. Mutable, one for each session."""

    orders: list[list[str]] = field(default_factory=list)
    customers: list[str] = field(default_factory=list)
    emails: list[str] = field(default_factory=list)
    skus: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Task:
    """A request of the user and the calls that it takes."""

    asked: str
    calls: Iterator[tuple[str, dict[str, Any]]]


def scripted_session(folder: Path, turns: int) -> Script:
    """A session of `turns` turns, its tools run in `folder`, which must be empty."""
    cycles = -(-turns // TURNS_PER_CYCLE)
    agent = _Agent(Workshop(folder, cycles))
    made = islice(agent.session(cycles), turns)
    return Script("scripted", tuple(made), tuple(declarations()))


class _Agent:
    """Works through the tasks. Mutable, one for each session."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._notes = _Notebook()
        self._last = ""
        self._calls = 0

    def session(self, cycles: int) -> Iterator[Turn]:
        before: list[Message] = [{"role": "system", "content": _SYSTEM}]
        for cycle in range(cycles):
            for task in (self._orders(cycle), self._code(cycle), self._packages(cycle), self._look_back(cycle)):
                yield from self._worked(task, before)
                before = []

    def _worked(self, task: _Task, before: list[Message]) -> Iterator[Turn]:
        arrivals: list[Message] = [*before, {"role": "user", "content": task.asked}]
        for name, arguments in task.calls:
            self._calls += 1
            call_id = f"call_{self._calls:04}"
            yield Turn(tuple(arrivals), call(call_id, name, json.dumps(arguments)))
            self._last = self._workshop.call(name, arguments)
            arrivals = [result(call_id, self._last)]
        yield Turn(tuple(arrivals), None)

    def _rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self._last)["rows"]
        return rows

    # -- tasks ----------------------------------------------------------------------------------------------------

    def _orders(self, cycle: int) -> _Task:
        month = f"2026-{cycle % 6 + 1:02}"

        def calls() -> Iterator[tuple[str, dict[str, Any]]]:
            notes = self._notes
            newest = (
                f"SELECT * FROM orders WHERE placed LIKE '{month}%' ORDER BY total_cents DESC LIMIT 6 OFFSET {cycle}"
            )
            yield "sql", {"query": newest}
            rows = self._rows()
            notes.orders.append([row["id"] for row in rows])
            notes.customers.append(rows[0]["customer_id"])
            yield "sql", {"query": f"SELECT * FROM items WHERE order_id = '{rows[0]['id']}'"}
            notes.skus.append(self._rows()[0]["sku"])
            yield "sql", {"query": f"SELECT * FROM customers WHERE id = '{notes.customers[-1]}'"}
            notes.emails.append(self._rows()[0]["email"])
            yield _LONG[cycle % len(_LONG)]

        return _Task(
            f"Ticket OPS-{4400 + 17 * cycle}: finance asks about the largest orders of {month}. List six of them, show "
            "the lines and the customer of the first, then fetch the long report, because I will ask about it.",
            calls(),
        )

    def _code(self, cycle: int) -> _Task:
        source, tests = f"shop/pricing_{cycle}.py", f"tests/test_pricing_{cycle}.py"

        def calls() -> Iterator[tuple[str, dict[str, Any]]]:
            yield "list_dir", {"path": "shop"}
            yield "read_file", {"path": source, "start": 1, "lines": 22}
            self._notes.steps.append(self._last.split("STEPS = ((")[1].split(",")[0])
            yield "run_tests", {"path": tests}
            yield "read_file", {"path": tests, "start": 6, "lines": 12}

        return _Task(
            f"The discount in version {cycle} of the price rules is wrong for totals that lie exactly on a step. "
            "Look at the code, run its tests and tell me why they fail.",
            calls(),
        )

    def _packages(self, cycle: int) -> _Task:
        package = _PACKAGES[cycle % len(_PACKAGES)]

        def calls() -> Iterator[tuple[str, dict[str, Any]]]:
            yield "package_info", {"names": [package]}
            self._notes.versions.append(json.loads(self._last)[0]["version"])
            yield "docs", {"topic": _TOPICS[cycle % len(_TOPICS)]}
            note = f"INSERT INTO notes VALUES ('OPS-{4400 + 17 * cycle}', '{package}', '{self._notes.versions[-1]}')"
            yield "sql", {"query": note}
            yield "read_file", {"path": "logs/app.log", "start": 700 + 9 * cycle, "lines": 8}

        return _Task(
            f"Which version of {package} is installed here? Note it under the ticket, check the documentation of "
            f"{_TOPICS[cycle % len(_TOPICS)]} and show me the newest lines of the log.",
            calls(),
        )

    def _look_back(self, cycle: int) -> _Task:
        early, row = cycle // 2, 1 + cycle % 2 * 2
        place = "the first list of this session" if cycle < 2 else f"list {early + 1} of this session"
        which = "second" if row == 1 else "fourth"

        def calls() -> Iterator[tuple[str, dict[str, Any]]]:
            notes = self._notes
            yield "sql", {"query": f"SELECT * FROM items WHERE order_id = '{notes.orders[early][row]}'"}
            yield "sql", {"query": f"SELECT id, city FROM customers WHERE email = '{notes.emails[early]}'"}
            tickets = f"INSERT INTO notes VALUES ('OPS-{4400 + 17 * early}', 'step', '{notes.steps[cycle]}')"
            yield "sql", {"query": tickets}
            query = f"SELECT order_id FROM items WHERE sku = '{notes.skus[0]}'"
            if cycle % 2:
                query = f"SELECT * FROM notes WHERE value = '{notes.versions[early]}'"
            yield "sql", {"query": query}

        return _Task(
            f"Back to {place}: show the lines of its {which} order and the city of the customer whose address you looked "
            "up then. Note the discount step that you read in the code under that list's ticket, and look up what you "
            "found after it.",
            calls(),
        )

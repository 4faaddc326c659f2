"""The place where the scripted agent works: a small project in a temporary folder, and tools that really run on it.

The project is a shop: Python files with tests of which some fail, an SQLite database and a log. It is built from a
seed, so that two workshops hold the same. Tools read this machine too (the interpreter's documentation, metadata of
installed packages, the standard library's folder) but write nowhere outside the folder.

Invariant: a tool never raises for what an agent asks of it; it answers with the error, as agents' tools do.
"""

from __future__ import annotations

import json
import os
import pydoc
import random
import sqlite3
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import PackageNotFoundError, distributions, metadata
from pathlib import Path
from typing import Any

ORDERS, CUSTOMERS = 420, 60
SHOWN_ROOT = "/srv/shop"
"""How the folder is called in what tools print: its real name differs from run to run."""
_SEED = 20
_TEST_LIMIT_S = 60
_MAX_CHARS = 60_000
_CITIES = ("Aarhus", "Bergen", "Cork", "Delft", "Espoo", "Faro", "Ghent", "Hanover")
_GOODS = ("lamp", "kettle", "desk", "chair", "radio", "clock", "shelf", "carpet", "mirror", "stool")

_PRICING = '''"""Prices of orders."""

{constants}


def discount_rate(total_cents):
    """The rate for a total, from the table of steps."""
    rate = 0.0
    for step, value in STEPS:
        if total_cents > step:
            rate = value
    return rate


def order_total(lines, shipping_cents=SHIPPING_CENTS):
    """Sum of the lines with discount and shipping."""
    total = sum(quantity * price for quantity, price in lines)
    return round(total * (1 - discount_rate(total))) + shipping_cents


def parse_sku(sku):
    """Splits a SKU into kind and serial number."""
    kind, serial = sku.split("-")
    return kind, int(serial)
'''
_TESTS = """import unittest

from shop import pricing_{cycle} as pricing


class Pricing{cycle}(unittest.TestCase):
    def test_step_{step}(self):
        self.assertEqual(pricing.discount_rate({step}), {rate})

    def test_sku(self):
        self.assertEqual(pricing.parse_sku("lamp-0{serial}"), ("lamp", {serial}))

    def test_total(self):
        self.assertEqual(pricing.order_total([(2, {price})]), {total})
{many}

if __name__ == "__main__":
    unittest.main()
"""
_MANY = """
    def test_row_{row}(self):
        self.assertEqual(pricing.order_total([({row}, {price})]), {wrong}, "invoice INV-{invoice}")
"""


class Workshop:
    """Builds the project in an empty folder. `call` runs one tool."""

    def __init__(self, folder: Path, cycles: int) -> None:
        self.folder = folder
        self._random = random.Random(_SEED)
        for name in ("shop", "tests", "logs", "data"):
            (folder / name).mkdir()
        self._write_code(cycles)
        self._write_log()
        self._fill_database()

    @property
    def tools(self) -> dict[str, Callable[..., str]]:
        return {
            "list_dir": self._list_dir,
            "read_file": self._read_file,
            "sql": self._sql,
            "package_info": self._package_info,
            "docs": self._docs,
            "run_tests": self._run_tests,
        }

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What a tool prints, at most `_MAX_CHARS` of it."""
        try:
            text = self.tools[name](**arguments)
        except (OSError, sqlite3.Error, PackageNotFoundError, ImportError, ValueError) as error:
            text = f"error: {type(error).__name__}: {error}"
        return text.replace(str(self.folder), SHOWN_ROOT)[:_MAX_CHARS]

    # -- tools ----------------------------------------------------------------------------------------------------

    def _list_dir(self, path: str, recursive: bool = False) -> str:
        root = Path(sysconfig.get_path("stdlib")) if path == "stdlib" else self._inside(path)
        found = sorted(p for p in (root.rglob("*.py") if recursive else root.iterdir()) if "packages" not in str(p))
        rows = [f"{p.stat().st_size:>9} {p.relative_to(root)}{'/' if p.is_dir() else ''}" for p in found]
        return "\n".join([f"total {len(rows)}", *rows])

    def _read_file(self, path: str, start: int = 1, lines: int = 40) -> str:
        text = self._inside(path).read_text().splitlines()
        window = text[start - 1 : start - 1 + lines]
        numbered = [f"{number:>6}\t{line}" for number, line in enumerate(window, start)]
        return "\n".join([f"[{path}, lines {start} to {start + len(window) - 1} of {len(text)}]", *numbered])

    def _sql(self, query: str) -> str:
        with closing(sqlite3.connect(self.folder / "data" / "shop.db")) as db:
            db.row_factory = sqlite3.Row
            cursor = db.execute(query)
            rows = [dict(row) for row in cursor.fetchall()]
            db.commit()
            return json.dumps({"rows": rows, "row_count": len(rows), "changed": max(0, cursor.rowcount)})

    def _package_info(self, names: list[str]) -> str:
        """Metadata of installed packages as JSON; all of them for an empty list."""
        wanted = [metadata(name) for name in names] if names else [d.metadata for d in distributions()]
        return json.dumps([_described(m.json, whole=not names) for m in wanted], indent=1)

    def _docs(self, topic: str) -> str:
        return pydoc.plain(pydoc.render_doc(topic, title="%s"))

    def _run_tests(self, path: str) -> str:
        target = self._inside(path).relative_to(self.folder).with_suffix("")
        done = subprocess.run(
            [sys.executable, "-B", "-m", "unittest", ".".join(target.parts)],
            cwd=self.folder,
            env={k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE"))},
            capture_output=True,
            text=True,
            timeout=_TEST_LIMIT_S,
            check=False,
        )
        return f"{done.stdout}{done.stderr}exit status {done.returncode}"

    def _inside(self, path: str) -> Path:
        whole = (self.folder / path).resolve()
        if not whole.is_relative_to(self.folder.resolve()):
            raise ValueError(f"{path} is outside the project")
        return whole

    # -- the project ----------------------------------------------------------------------------------------------

    def _write_code(self, cycles: int) -> None:
        for package in ("shop", "tests"):
            (self.folder / package / "__init__.py").write_text("")
        for cycle in range(cycles):
            step = self._random.randrange(20_000, 90_000, 100)
            shipping = self._random.randrange(400, 990, 10)
            price, serial = self._random.randrange(3_000, 9_900), self._random.randrange(100, 999)
            constants = f"STEPS = (({step}, 0.05), ({step * 3}, 0.08))\nSHIPPING_CENTS = {shipping}"
            (self.folder / "shop" / f"pricing_{cycle}.py").write_text(_PRICING.format(constants=constants))
            names = {"cycle": cycle, "step": step, "rate": 0.05, "serial": serial}
            for name, many in ((f"test_pricing_{cycle}", ""), (f"test_rows_{cycle}", self._many(price))):
                total = 2 * price + shipping
                text = _TESTS.format(**names, price=price, total=total, many=many)
                (self.folder / "tests" / f"{name}.py").write_text(text)

    def _many(self, price: int) -> str:
        invoices = [self._random.randrange(100_000, 999_999) for _ in range(60)]
        return "".join(
            _MANY.format(row=row, price=price, wrong=row * price + 1, invoice=invoice)
            for row, invoice in enumerate(invoices, 1)
        )

    def _write_log(self) -> None:
        lines = []
        for minute in range(900):
            level = self._random.choice(("INFO", "INFO", "INFO", "WARN", "ERROR"))
            request, customer = f"req-{self._random.getrandbits(32):08x}", self._random.randrange(CUSTOMERS)
            what = f"customer=C-{3100 + customer} path=/cart/{self._random.randrange(1000, 9999)}"
            took = self._random.randrange(3, 2_500)
            lines.append(
                f"2026-03-{minute // 60 + 1:02}T08:{minute % 60:02}:00Z {level} {request} {what} took={took}ms"
            )
        (self.folder / "logs" / "app.log").write_text("\n".join(lines) + "\n")

    def _fill_database(self) -> None:
        chance = self._random
        with closing(sqlite3.connect(self.folder / "data" / "shop.db")) as db:
            db.executescript(
                "CREATE TABLE customers (id TEXT PRIMARY KEY, name TEXT, email TEXT, city TEXT);"
                "CREATE TABLE orders (id TEXT PRIMARY KEY, customer_id TEXT, placed TEXT, total_cents INTEGER);"
                "CREATE TABLE items (order_id TEXT, sku TEXT, quantity INTEGER, price_cents INTEGER);"
                "CREATE TABLE notes (ticket TEXT, subject TEXT, value TEXT);"
            )
            for number in range(CUSTOMERS):
                name = f"customer{chance.randrange(1000, 9999)}"
                row = (f"C-{3100 + number}", name, f"{name}@example.org", chance.choice(_CITIES))
                db.execute("INSERT INTO customers VALUES (?, ?, ?, ?)", row)
            for number in range(ORDERS):
                self._insert_order(db, f"ORD-{48000 + number * 7}")
            db.commit()

    def _insert_order(self, db: sqlite3.Connection, order_id: str) -> None:
        chance, total = self._random, 0
        for _ in range(chance.randrange(1, 5)):
            quantity, price = chance.randrange(1, 9), chance.randrange(900, 25_000)
            sku = f"{chance.choice(_GOODS)}-{chance.randrange(1000, 9999)}"
            db.execute("INSERT INTO items VALUES (?, ?, ?, ?)", (order_id, sku, quantity, price))
            total += quantity * price
        placed = f"2026-{chance.randrange(1, 7):02}-{chance.randrange(1, 29):02}"
        customer = f"C-{3100 + chance.randrange(CUSTOMERS)}"
        db.execute("INSERT INTO orders VALUES (?, ?, ?, ?)", (order_id, customer, placed, total))


def _described(found: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    keep = ("name", "version", "summary", "requires_python", "license_expression", "requires_dist", "project_url")
    described = {name: found[name] for name in keep if found.get(name)}
    if whole:
        described["description"] = str(found.get("description", ""))[:1_500]
    return described


def declarations() -> list[dict[str, Any]]:
    """The tools as a request declares them."""
    text, number = {"type": "string"}, {"type": "integer"}
    shapes: dict[str, tuple[str, dict[str, Any]]] = {
        "list_dir": ("Lists a folder with sizes", {"path": text, "recursive": {"type": "boolean"}}),
        "read_file": ("Shows lines of a file", {"path": text, "start": number, "lines": number}),
        "sql": ("Runs a query on the shop's database", {"query": text}),
        "package_info": ("Metadata of installed packages", {"names": {"type": "array", "items": text}}),
        "docs": ("Python's documentation of a name", {"topic": text}),
        "run_tests": ("Runs the tests of a file", {"path": text}),
    }
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": fields},
            },
        }
        for name, (description, fields) in shapes.items()
    ]

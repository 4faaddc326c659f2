"""`kvsteward sessions`: looks into a store of session logs from outside, while no gateway or one is running on it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from kvsteward.sessions import Fault, open_store


def listed(store: str, limit: int) -> list[dict[str, Any]]:
    """The newest sessions as plain values."""
    with closing(open_store(store)) as opened:
        return [asdict(session) for session in opened.list(limit=limit)]


def faults(store: str, session_id: str | None) -> Sequence[Fault]:
    """What `verify` finds."""
    with closing(open_store(store)) as opened:
        return opened.verify(session_id)


def show_sessions(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("session", "state", "turns", "log", "view", "saved", "last used", "title"):
        table.add_column(
            name, justify="right" if name in {"turns", "log", "view", "saved"} else "left", overflow="fold"
        )
    for row in rows:
        used = datetime.fromtimestamp(row["last_used_s"], UTC).strftime("%Y-%m-%d %H:%M")
        figures = (f"{row[name]:,}" for name in ("turns", "log_tokens", "view_tokens", "saved_tokens"))
        table.add_row(row["id"], row["state"], *figures, used, row["title"])
    Console().print(table)

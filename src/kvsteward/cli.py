"""The command line: one short function per verb."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.callback()
def _root() -> None:
    """Keep long LLM-agent sessions inside a fixed KV-cache budget."""


def main() -> None:
    app()

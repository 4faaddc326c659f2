"""`kvsteward plan`: from a model, GPUs and a workload to settings, pictures and the commands that start."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kvsteward.errors import ConfigError
from kvsteward.lab.planner.answer import PlanAnswer, answer
from kvsteward.lab.planner.drawing import draw
from kvsteward.lab.planner.question import PlanQuestion
from kvsteward.lab.planner.show import show

__all__ = ["PlanAnswer", "PlanQuestion", "answer", "draw", "present", "show"]


def present(found: PlanAnswer, console: Console | None, svg: Path | None) -> None:
    """Shows on the console, if there is one, and writes the picture. ConfigError if the file cannot be written."""
    if svg is not None:
        title = f"{found.name} on {found.hardware.count} x {found.hardware.device.name}, {found.plan.engine}"
        try:
            svg.write_text(draw(title, found.gpus), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the picture cannot be written to '{svg}': {error.strerror}") from error
    if console is not None:
        show(found, console)

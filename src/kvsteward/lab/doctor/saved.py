"""A metrics page that was saved to a file, or two of them: the start and the end of a window.

Invariant: files are read in the order given; with one, counters count from the engine's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvsteward.engines.base import EngineLoad
from kvsteward.engines.metrics import parse_load
from kvsteward.errors import ConfigError
from kvsteward.lab.doctor.observation import Reading, Setup
from kvsteward.lab.doctor.page import read_page
from kvsteward.lab.doctor.probe import DIALECTS, Seen, check_readable
from kvsteward.lab.doctor.setup import dialect_of, sglang_setup, vllm_setup

_MOST = 32


def read_saved(files: Sequence[Path], window_s: float) -> Seen:
    """Reads saved pages, `window_s` apart from first to last. Raises ConfigError or EngineError."""
    if not 1 <= len(files) <= _MOST:
        raise ConfigError(f"{len(files)} files of metrics; one to {_MOST} make sense", param="metrics")
    texts = [_read(file) for file in files]
    kind = dialect_of(read_page(texts[0], EngineLoad(), str(files[0])))
    if kind is None:
        raise ConfigError(
            f"{files[0]} holds no metrics of vLLM, SGLang or llama-server",
            hint="Save the engine's own page: curl -s http://HOST:PORT/metrics > FILE.",
        )
    step = window_s / max(1, len(files) - 1)
    readings = []
    for index, (file, text) in enumerate(zip(files, texts, strict=True)):
        page = read_page(text, parse_load(text, DIALECTS[kind]), str(file))
        check_readable(page, kind, str(file))
        readings.append(Reading(index * step, page))
    setup = _setup(kind, texts[-1], readings[-1])
    return Seen(replace(setup, source=", ".join(str(file) for file in files)), tuple(readings))


def _setup(kind: str, text: str, last: Reading) -> Setup:
    if kind == "vllm":
        return vllm_setup(text, last.page)
    return sglang_setup(last.page, {}) if kind == "sglang" else Setup(kind)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}", param="metrics") from error

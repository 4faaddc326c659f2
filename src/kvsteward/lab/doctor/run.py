"""From what the user typed to a report: reads files, watches the engine, hands all to the checks.

Invariant: everything that can go wrong with what the user gave is a ConfigError before the window begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from kvsteward.errors import ConfigError
from kvsteward.lab.doctor.knobs import read_flags
from kvsteward.lab.doctor.names import GATEWAY
from kvsteward.lab.doctor.observation import Observation, TorchMemory
from kvsteward.lab.doctor.probe import Probe, Seen
from kvsteward.lab.doctor.report import Report, diagnose
from kvsteward.lab.doctor.saved import read_saved
from kvsteward.lab.doctor.setup import with_flags
from kvsteward.lab.prompts import PromptReport, compare_prompts, read_requests
from kvsteward.ledger import ModelSpec, parse_header, read_header

_HEADER_BYTES = 64 << 20
_LARGEST_FILE_BYTES = 1 << 30
_LONGEST_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What to look at. Either `url` or `metrics` files; times in seconds."""

    url: str | None = None
    window_s: float = 60.0
    flags: str | None = None
    metrics: Sequence[Path] = field(default=())
    requests: Path | None = None
    config: Path | None = None
    torch: Path | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What the user added to what the engine says, read and checked."""

    flags: str | None = None
    spec: ModelSpec | None = None
    prompts: PromptReport | None = None
    torch: TorchMemory | None = None


def read_given(options: DoctorOptions) -> Given:
    """Reads the user's files. ConfigError names what cannot be used."""
    if (options.url is None) == (not options.metrics):
        raise ConfigError("name an engine's URL, or saved pages with --metrics FILE", hint="kvsteward doctor --help")
    if not 0 < options.window_s <= _LONGEST_S:
        raise ConfigError(f"a window of {options.window_s:g} s makes no sense", param="window")
    read_flags(options.flags or "", "vllm")  # a quote that does not close is told before the window, not after
    return Given(
        options.flags,
        None if options.config is None else read_spec(options.config),
        None if options.requests is None else compare_prompts(read_requests(_text(options.requests))),
        None if options.torch is None else read_torch(_text(options.torch), options.torch),
    )


async def examine(options: DoctorOptions, given: Given, progress: Callable[[float], None] = lambda _: None) -> Report:
    """One window, and what is found in it. Raises ConfigError or EngineError."""
    if options.url is None:
        seen = read_saved(options.metrics, options.window_s)
    else:
        async with Probe(options.url, options.api_key) as probe:
            seen = await probe.watch(options.window_s, progress)
    return diagnose(observe(seen, given), missed=seen.missed, sessions_tokens=seen.sessions_tokens)


def observe(seen: Seen, given: Given) -> Observation:
    """Puts together what was seen and what the user gave."""
    flags = read_flags(given.flags or "", seen.setup.dialect)
    return Observation(
        with_flags(seen.setup, flags),
        seen.readings,
        flags,
        given.flags is not None,
        given.spec,
        given.torch,
        given.prompts,
        GATEWAY if seen.setup.gateway else None,
    )


def read_spec(path: Path) -> ModelSpec:
    """From a `config.json`, a folder with one, or a GGUF file."""
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".gguf":
        try:
            with path.open("rb") as file:
                return read_header(parse_header(file.read(_HEADER_BYTES)))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}", param="config") from error
    return ModelSpec.from_hf_config(_object(_text(path), path))


def read_torch(text: str, path: Path) -> TorchMemory:
    """From `torch.cuda.memory_stats()` as JSON, or an object with `reserved_bytes` and `allocated_bytes`."""
    stats = _object(text, path)

    def figure(*names: str) -> int:
        value = next((stats[name] for name in names if isinstance(stats.get(name), int)), None)
        if value is None or value < 0:
            raise ConfigError(f"{path} does not hold {names[0]}", param="torch")
        return int(value)

    reserved = figure("reserved_bytes.all.current", "reserved_bytes")
    return TorchMemory(reserved, figure("allocated_bytes.all.current", "allocated_bytes"))


def _object(text: str, path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {_LARGEST_FILE_BYTES >> 30} GiB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error

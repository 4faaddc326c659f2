"""What a user may say in `kv_connector_extra_config`, and what follows from it.

Pure. Invariant: `parse` answers with options that can be honoured or raises ConfigError; unknown names are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvsteward.errors import ConfigError

GIB = 1 << 30
_NUMBERS = ("reorder_s", "host_gib", "host_bytes", "disk_gib", "valkey_ttl_s", "stage_within_s")
_TEXTS = ("allow_version", "figures_path", "learned_path", "disk_path", "valkey_url", "codec", "salt")
_FLAGS = ("check", "valkey_cluster")
CODECS = ("raw", "lossless", "int8")


@dataclass(frozen=True, slots=True)
class Options:
    """`host_bytes` 0: no tiers, only retention. `None`: not said."""

    reorder_s: float = 0.25
    allow_version: str | None = None
    figures_path: Path | None = None
    learned_path: Path | None = None
    check: bool = False
    host_bytes: int = 0
    disk_path: Path | None = None
    disk_bytes: int = 0
    valkey_url: str | None = None
    valkey_cluster: bool = False
    valkey_ttl_s: float = 86_400.0
    codec: str = "raw"
    stage_within_s: float = 5.0
    salt: str = ""

    @property
    def tiers(self) -> bool:
        return self.host_bytes > 0


def parse(extra: Mapping[str, object]) -> Options:
    """Raises ConfigError where something is unknown, of a wrong type, or says nothing without something else."""
    unknown = sorted(set(extra) - {*_NUMBERS, *_TEXTS, *_FLAGS})
    if unknown:
        known = ", ".join(sorted((*_NUMBERS, *_TEXTS, *_FLAGS)))
        raise ConfigError(
            f"kv_connector_extra_config has unknown options: {', '.join(unknown)}", hint=f"Known: {known}."
        )
    if extra.get("host_gib") is not None and extra.get("host_bytes") is not None:
        raise ConfigError("host_gib and host_bytes say the same thing; give one of them")
    figures, disk, learned = (_text(extra, name) for name in ("figures_path", "disk_path", "learned_path"))
    options = Options(
        reorder_s=_number(extra, "reorder_s", 0.25),
        allow_version=_text(extra, "allow_version"),
        figures_path=Path(figures) if figures else None,
        learned_path=Path(learned) if learned else None,
        check=_flag(extra, "check"),
        host_bytes=int(_number(extra, "host_bytes", 0.0) or GIB * _number(extra, "host_gib", 0.0)),
        disk_path=Path(disk) if disk else None,
        disk_bytes=int(GIB * _number(extra, "disk_gib", 0.0)),
        valkey_url=_text(extra, "valkey_url"),
        valkey_ttl_s=_number(extra, "valkey_ttl_s", 86_400.0),
        valkey_cluster=_flag(extra, "valkey_cluster"),
        codec=_text(extra, "codec") or "raw",
        stage_within_s=_number(extra, "stage_within_s", 5.0),
        salt=_text(extra, "salt") or "",
    )
    if bool(options.disk_path) != bool(options.disk_bytes):
        raise ConfigError("the disk tier needs both disk_path and disk_gib")
    if options.codec not in CODECS:
        raise ConfigError(f"the codec {options.codec!r} is unknown", hint=f"Known: {', '.join(CODECS)}.")
    if options.codec != "raw" and not (options.disk_path or options.valkey_url):
        raise ConfigError(f"the codec {options.codec} is for disk and Valkey, and neither is there")
    if options.valkey_cluster and not options.valkey_url:
        raise ConfigError("valkey_cluster needs a valkey_url")
    if not options.tiers:
        idle = [name for name in ("disk_path", "valkey_url", "codec", "salt") if extra.get(name)]
        if idle:
            raise ConfigError(
                f"{', '.join(idle)}: every tier needs host memory in front of it",
                hint="Add host_gib: what is loaded from disk or Valkey passes through it.",
            )
    return options


def _number(extra: Mapping[str, object], name: str, default: float) -> float:
    value = extra.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"kv_connector_extra_config.{name} must be a number, 0 or more, not {value!r}")
    return float(value)


def _text(extra: Mapping[str, object], name: str) -> str | None:
    value = extra.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"kv_connector_extra_config.{name} must be text, not {value!r}")
    return value


def _flag(extra: Mapping[str, object], name: str) -> bool:
    value = extra.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"kv_connector_extra_config.{name} must be true or false, not {value!r}")
    return value

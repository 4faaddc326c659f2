"""GPUs as people write them: `8xH100`, `A100 80GB`, or only a size. Knows the ledger's table, not the machine.

Invariant: a name that fits no device, or several that differ in memory, is refused with the near ones.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from kvsteward.errors import ConfigError
from kvsteward.ledger import Device, devices

MOST_GPUS = 4_096
_COUNTED = re.compile(r"\s*(?:(-?\d+)\s*[x×*]\s*)?(\S.*?)\s*", re.IGNORECASE)
_NOISE = frozenset({"nvidia", "geforce", "amd", "instinct", "intel", "tesla", "gpu", "tensor", "core", "hbm2", "hbm3"})


@dataclass(frozen=True, slots=True)
class Hardware:
    """`count` devices of one kind; `note` says what was taken for granted, or nothing."""

    device: Device
    count: int
    note: str = ""


def named(text: str) -> Hardware:
    """`8xH100`, `H200`, `2 x RTX 4090`. ConfigError names near devices."""
    count, name = _counted(text, "--gpu")
    wanted = _words(name)
    exact = [device for device in devices() if _key(device.name) == _key(name)]
    found = exact or [device for device in devices() if wanted and _fits(wanted, _key(name), device)]
    sxm = [device for device in found if "SXM" in device.name]
    if len(found) > 1 and len(sxm) == 1:
        others = ", ".join(device.name for device in found if device != sxm[0])
        return Hardware(sxm[0], count, f"{name} is taken as {sxm[0].name}; there is also {others}")
    if len(found) == 1:
        return Hardware(found[0], count)
    near = found or _near(name)
    known = ", ".join(device.name for device in near or devices())
    raise ConfigError(
        f"{'several GPUs are called' if found else 'no GPU in the table is called'} {name!r}",
        hint=f"{'Near ones' if near else 'Known'}: {known}. For another GPU give its size: --gpu-gib {count}x80.",
    )


def sized(text: str) -> Hardware:
    """`80` or `8x80`: GiB as the device's sheet has them. Speed is taken from the device of nearest size, and said."""
    count, amount = _counted(text, "--gpu-gib")
    try:
        gib = float(amount)
    except ValueError as error:
        raise ConfigError(f"--gpu-gib takes a size such as 80 or 8x80, not {text!r}") from error
    if not 1 <= gib <= 4_096:
        raise ConfigError(f"--gpu-gib must be between 1 and 4096 GiB, not {amount}")
    like = min(devices(), key=lambda device: abs(device.memory_gib - gib))
    usable = gib * like.usable_gib / like.memory_gib
    made = replace(like, name=f"{gib:g} GiB GPU", memory_gib=gib, usable_gib=usable, source="the size that was given")
    return Hardware(made, count, f"speed and usable share as of {like.name}, the nearest in size")


def _counted(text: str, option: str) -> tuple[int, str]:
    found = _COUNTED.fullmatch(text)
    if found is None:
        raise ConfigError(f"{option} takes COUNTxNAME such as 8xH100, not {text!r}")
    count = int(found.group(1) or 1)
    if not 1 <= count <= MOST_GPUS:
        raise ConfigError(f"{option}: there must be 1 to {MOST_GPUS} GPUs, not {count}")
    return count, found.group(2)


def _words(name: str) -> frozenset[str]:
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d)\s+(?=g[i]?b\b)", r"\1", name.lower()))
    return frozenset(re.sub(r"^sxm\d$", "sxm", word) for word in words) - _NOISE


def _key(name: str) -> str:
    return "".join(re.findall(r"[a-z0-9]", name.lower()))


def _fits(wanted: frozenset[str], key: str, device: Device) -> bool:
    has = _words(device.name) | {f"{device.memory_gib:g}gb"}
    return wanted <= has or _key(device.name).startswith(key)


def _near(name: str) -> list[Device]:
    by_key = {_key(device.name): device for device in devices()}
    firsts = {key: device for key, device in by_key.items() if key[:2] == _key(name)[:2]}
    close = difflib.get_close_matches(_key(name), by_key, n=4, cutoff=0.5)
    return [by_key[key] for key in dict.fromkeys([*close, *firsts])][:6]

"""Listings of files and search hits: grouped by folder or file, the shared part of a path said once.

It does not touch a file system. Invariant: every kept name is whole; a line that is no path stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.columns import Table
from kvsteward.context.distill.lines import wrapped
from kvsteward.context.distill.meter import Meter, calibrated
from kvsteward.context.distill.pack import Unit, pack
from kvsteward.context.distill.rows import lay
from kvsteward.context.distill.salience import Focus, focus_of

_PATH = re.compile(r"[~.]{0,2}/?[\w.@+%{}\[\]~-]+(?:/[\w.@+%{}\[\]~ -]*)*[*@=|/]?")
_HIT = re.compile(r"([^\s:]{1,300}):(\d+)[:-](.*)")
_LS = re.compile(
    r"[-dlbcps][-rwxsStT]{9}[.+@]?\s+\d+\s+(\S+)\s+(\S+)\s+(\S+)\s+(\w{3}\s+\d+\s+[\d:]+|[\d-]+ [\d:]+)\s+(.*)"
)
_SAMPLE_LINES = 200
_NAMES_PER_UNIT = 12


class Hits(Distiller):
    """`grep -n` and alike: path:line:text."""

    kind = "hits"

    def matches(self, text: str) -> bool:
        lines = _sample(text)
        return len(lines) >= 4 and sum(1 for line in lines if _HIT.match(line[:600])) * 10 >= 7 * len(lines)

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        units: list[Unit] = []
        last = ""
        for line in text.split("\n"):
            found = _HIT.match(line)
            if found is None:
                units += [Unit(part) for part in wrapped(line) if part.strip()]
                continue
            if found.group(1) != last:
                last = found.group(1)
                units.append(Unit(f"{last}:", 1.5))
            units.append(Unit(f" {found.group(2)}:{found.group(3).strip()[:240]}"))
        packed = pack(units, limit_tokens, focus_of(hints), calibrated(text, count), "hits")
        return Distillate(self.kind, packed.text, f"{packed.total - packed.kept} of {packed.total} lines")


class Listings(Distiller):
    """`find`, `ls -R`, `git ls-files`, `ls -l`: one path a line."""

    kind = "listing"

    def matches(self, text: str) -> bool:
        lines = _sample(text)
        if len(lines) < 6:
            return False
        if sum(1 for line in lines if _LS.match(line[:500])) * 10 >= 7 * len(lines):
            return True
        paths = sum(1 for line in lines if len(line) <= 300 and _PATH.fullmatch(line.strip()))
        deep = sum(1 for line in lines if "/" in line.strip()[1:-1] or "." in line.strip()[1:-1])
        return paths * 10 >= 9 * len(lines) and deep * 2 >= len(lines)

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        lines = [line.rstrip() for line in text.split("\n") if line.strip()]
        meter, focus = calibrated(text, count), focus_of(hints)
        details = [found for found in map(_LS.match, lines) if found]
        if len(details) * 2 > len(lines):
            table = Table(("name", "size", "modified", "owner"), [_columns(found) for found in details], len(details))
            laid = lay(table, limit_tokens, focus, meter)
            return Distillate(self.kind, laid.text, laid.note or "permissions")
        return _grouped(self.kind, lines, limit_tokens, focus, meter)


def _sample(text: str) -> list[str]:
    return [line for line in text[:60_000].split("\n")[:_SAMPLE_LINES] if line.strip()]


def _columns(found: re.Match[str]) -> tuple[str, ...]:
    owner, _, size, modified, name = found.groups()
    return name, size, modified, owner


def by_folder(paths: Sequence[str]) -> dict[str, list[str]]:
    """Names by the folder they are in, in order of appearance; "" for those without one."""
    folders: dict[str, list[str]] = {}
    for path in paths:
        folder, slash, name = path.strip().rstrip("/").rpartition("/")
        folders.setdefault(folder + slash, []).append(name + ("/" if path.endswith("/") else ""))
    return folders


def _grouped(kind: str, lines: Sequence[str], limit: float, focus: Focus, meter: Meter) -> Distillate:
    folders = by_folder(lines)
    counts = f"{len(lines)} paths in {len(folders)} folders"
    units: list[Unit] = []
    for folder, names in folders.items():
        for at in range(0, len(names), _NAMES_PER_UNIT):
            part = ", ".join(names[at : at + _NAMES_PER_UNIT])
            units.append(Unit(f"{folder} {part}" if not at else f"  {part}", 0.5))
    packed = pack(units, limit - meter.tokens(counts) - 2, focus, meter, "lines")
    return Distillate(
        kind, f"{counts}\n{packed.text}", f"{packed.total - packed.kept} of {packed.total} groups of names"
    )

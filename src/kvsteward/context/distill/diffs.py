"""Unified diffs and `--stat` listings: file names, hunk headers and changed lines before context.

It does not apply anything. Invariant: lines stay as they are, in order.
"""

from __future__ import annotations

import re

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.meter import calibrated
from kvsteward.context.distill.pack import Unit, pack
from kvsteward.context.distill.salience import focus_of

_HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@", re.MULTILINE)
_NOISE = ("index ", "similarity ", "--- ", "new file mode", "deleted file mode")
_DEFINITION = re.compile(
    r"^[+-]\s*(?:def|class|fn|func|function|struct|enum|interface|type|public|private|export|async|static|#define)\b"
)
_MAX_LINE_CHARS = 240


class Diffs(Distiller):
    """The output of diff -u, git diff, git show."""

    kind = "diff"

    def matches(self, text: str) -> bool:
        return _HUNK.search(text[:30_000]) is not None

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        units: list[Unit] = []
        for line in text.split("\n"):
            if line.startswith("index ") or (line.startswith("--- a/") and units):
                continue
            shown = line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]}…"
            units.append(Unit(_header(shown), _prior(line)))
        packed = pack(units, limit_tokens, focus_of(hints), calibrated(text, count), "lines")
        return Distillate(self.kind, packed.text, f"{packed.total - packed.kept} of {packed.total} lines of the diff")


def _header(line: str) -> str:
    """`diff --git a/x b/x` names the file twice: once will do."""
    if line.startswith("diff --git a/"):
        name = line[13:].split(" b/")[0]
        return f"diff {name}" if line.endswith(f" b/{name}") else line
    return line


def _prior(line: str) -> float:
    if line.startswith("diff "):
        return 6.0
    if line.startswith(("+++ ", "rename ", "Subject:")):
        return 0.4
    if line.startswith(_NOISE):
        return -0.5
    if line.startswith("@@"):
        return 1.5
    if line[:1] in ("+", "-"):
        return 0.2 if not line[1:].strip() else 1.4 if _DEFINITION.match(line[:200]) else 0.7
    return -0.4

"""Source code and windows of it with line numbers: definitions and named symbols first, both ends.

It does not parse a language. Invariant: lines stay as they are, in order, their numbers with them.
"""

from __future__ import annotations

import re

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.lines import squeezed, wrapped
from kvsteward.context.distill.meter import calibrated
from kvsteward.context.distill.pack import Unit, pack
from kvsteward.context.distill.salience import focus_of

_NUMBERED = re.compile(r"^\s*\d{1,6}(?:[:|\t]| {1,4}\S|→)")
_DEFINITION = re.compile(
    r"^(?:export |default |public |private |protected |static |final |async |pub(?:\(\w+\))? |virtual "
    r"|inline |extern )*"
    r"(?:def|class|fn|func|function|struct|enum|interface|trait|impl|type|module|namespace|package"
    r"|CREATE TABLE|const)\b"
)
_ENTRY = re.compile(
    r"^(?:import|from|#include|use|using|require|include|package)\b|^(?:const|let|var) .{1,80}= require\("
)
_CODE = re.compile(
    r"^(?:def|class|fn|func|function|struct|enum|interface|import|from|#include|return|if|for|while|else|elif|try|except"
    r"|catch|switch|case|const|let|var|public|private|static|void|int|assert|raise|throw|with|@\w)\b|[{};]$|\):$|^\}|^\)"
)
_COMMENT = ("#", "//", "/*", "* ", '"""', "'''")
_SAMPLE_CHARS = 30_000


def _bare(line: str) -> str:
    found = _NUMBERED.match(line[:40])
    return line[found.end() - 1 :].lstrip(" :|\t→") if found else line.strip()


class Code(Distiller):
    """Source code, numbered or not."""

    kind = "code"

    def matches(self, text: str) -> bool:
        lines = [line for line in text[:_SAMPLE_CHARS].split("\n") if line.strip()]
        if len(lines) < 8:
            return False
        return sum(1 for line in lines if _CODE.search(_bare(line[:300])) is not None) * 10 >= 3 * len(lines)

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        units = [Unit(line, _prior(_bare(line))) for line in squeezed(wrapped(text))]
        packed = pack(units, limit_tokens, focus_of(hints), calibrated(text, count), "lines")
        return Distillate(self.kind, packed.text, f"{packed.total - packed.kept} of {packed.total} lines")


def _prior(bare: str) -> float:
    if _DEFINITION.match(bare[:200]):
        return 1.6
    if _ENTRY.match(bare[:200]):
        return 0.2
    return -0.3 if bare.startswith(_COMMENT) else 0.0

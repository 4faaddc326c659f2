"""Stack traces: the exception and its message, own frames, both ends; frames of libraries fold into a count.

It does not know the program. Invariant: lines are kept whole or counted.
"""

from __future__ import annotations

import re

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.lines import folded, squeezed, wrapped
from kvsteward.context.distill.meter import calibrated
from kvsteward.context.distill.pack import Unit, pack
from kvsteward.context.distill.salience import focus_of

_FRAME = re.compile(
    r'^\s*(?:File "[^"\n]{1,300}", line \d+|at [\w$.<>/]{1,200}\s?\(|at .{1,200}:\d+|\d+: 0x[0-9a-f]+|#\d+\s)'
)
_FOREIGN = re.compile(
    r"site-packages|dist-packages|/lib/python|node_modules|node:internal|\bjava\.|\bjavax\.|\bsun\.|jdk\.internal"
    r"|org\.springframework|org\.apache|/usr/lib|/rustc/|\bstd::|\bcore::|/usr/local/go/|<frozen"
)
_HEADLINE = re.compile(
    r"^\s*(?:Traceback \(most recent|Caused by:|Exception in thread|panic:|goroutine \d+|thread '.{0,80}' panicked"
    r"|During handling of|The above exception|[\w.$]{1,120}(?:Error|Exception|Warning|Interrupt|Exit)\b)"
)
_SAMPLE_CHARS = 60_000


def prior(line: str) -> float:
    """What a line of a trace is worth: a headline most, an own frame something, a foreign frame nothing."""
    if _HEADLINE.match(line[:400]):
        return 5.0
    if _FRAME.match(line[:400]):
        return -0.8 if _FOREIGN.search(line[:400]) else 1.2
    return 0.0


class Traces(Distiller):
    """A text that is mostly one or more stack traces."""

    kind = "trace"

    def matches(self, text: str) -> bool:
        lines = text[:_SAMPLE_CHARS].split("\n")
        frames = sum(1 for line in lines if _FRAME.match(line[:400]))
        return frames >= 3 and frames * 5 >= len(lines)

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        units: list[Unit] = []
        source = folded(squeezed(wrapped(text)))
        foreign = False
        for line in source:
            worth = prior(line)
            if worth == 0.0 and foreign and line.startswith("    "):
                worth = -0.8
            else:
                foreign = worth < 0
            units.append(Unit(line, worth))
        packed = pack(units, limit_tokens, focus_of(hints), calibrated(text, count), "lines")
        return Distillate(self.kind, packed.text, f"{packed.total - packed.kept} of {packed.total} lines of the trace")

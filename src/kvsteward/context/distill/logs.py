"""Logs and test reports: errors and summaries first, both ends, lines of one pattern said once with their count.

It does not know the program that wrote them. Invariant: linear; a pattern is a line with its numbers masked.
"""

from __future__ import annotations

import re
from collections import Counter

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.lines import folded, squeezed, wrapped
from kvsteward.context.distill.meter import calibrated
from kvsteward.context.distill.pack import Unit, pack
from kvsteward.context.distill.salience import error_weight, focus_of
from kvsteward.context.distill.traces import prior

_LEVEL = re.compile(
    r"\b(?:DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|FATAL|CRITICAL|TRACE|PASS(?:ED)?|FAIL(?:ED)?|SKIPPED|ok|XFAIL)\b"
)
_STAMP = re.compile(
    r"^[\[(]?(?:\d{4}[-/]\d\d[-/]\d\d|\w{3} +\d+ \d\d:\d\d|\d\d:\d\d:\d\d|\d{9,13}[.\d]*\b|[IWEF]\d{4} )"
)
_SUMMARY = re.compile(
    r"\b\d+ (?:passed|failed|errors?|warnings?|tests?|skipped|failures?|examples?)\b|^=+ |^-+ "
    r"|Finished|Total|Summary|Result"
    r"|exit(?:ed)? (?:code|status|with)|BUILD (?:SUCCESS|FAIL)|Successfully|Tests run|\breturncode\b",
    re.IGNORECASE,
)
_MASK = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+")
_SAMPLE_CHARS = 40_000
_SAME_PATTERN_KEPT = 2


class Logs(Distiller):
    """Lines with time stamps or levels, or the report of a test run or a build."""

    kind = "log"

    def matches(self, text: str) -> bool:
        lines = [line for line in text[:_SAMPLE_CHARS].split("\n") if line.strip()]
        marked = sum(1 for line in lines if _STAMP.match(line[:60]) or _LEVEL.search(line[:200]))
        return len(lines) >= 6 and marked * 3 >= len(lines)

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        lines = folded(squeezed(wrapped(text)))
        patterns = [_MASK.sub("0", line[:200]) for line in lines]
        times = Counter(patterns)
        met: Counter[str] = Counter()
        units: list[Unit] = []
        for line, pattern in zip(lines, patterns, strict=True):
            met[pattern] += 1
            units.append(Unit(_told(line, times[pattern], met[pattern]), _prior(line, times[pattern], met[pattern])))
        packed = pack(units, limit_tokens, focus_of(hints), calibrated(text, count), "lines")
        return Distillate(self.kind, packed.text, f"{packed.total - packed.kept} of {packed.total} lines of the log")


def _told(line: str, times: int, place: int) -> str:
    return f"{line}  (×{times} like this)" if place == 1 and times > _SAME_PATTERN_KEPT + 2 else line


def _prior(line: str, times: int, place: int) -> float:
    worth = prior(line) + (1.8 if _SUMMARY.search(line[:300]) else 0.0) + 0.8 * error_weight(line)
    if times > _SAME_PATTERN_KEPT:
        worth = worth / (1 + place) if place > 1 else worth + 0.5
    return worth

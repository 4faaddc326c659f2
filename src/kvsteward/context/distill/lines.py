"""Any text by its lines: head, tail and the lines with values, errors and asked words. Repeats are said once.

The last distiller: it understands every text. Invariant: linear in the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.meter import calibrated
from kvsteward.context.distill.pack import Unit, pack
from kvsteward.context.distill.salience import focus_of

_MAX_LINE_CHARS = 300
_BREAK = re.compile(r"[\s,;|]")


def wrapped(text: str) -> list[str]:
    """Lines; a very long one is cut where a space or a comma stands."""
    found: list[str] = []
    for line in text.split("\n"):
        line = line.rstrip()
        while len(line) > _MAX_LINE_CHARS:
            at = max(line.rfind(sign, _MAX_LINE_CHARS // 2, _MAX_LINE_CHARS) for sign in " ,;|")
            at = at + 1 if at > 0 else _MAX_LINE_CHARS
            found.append(line[:at])
            line = line[at:]
        found.append(line)
    return found


def folded(lines: Sequence[str]) -> list[str]:
    """Lines with runs that differ in one stretch said once: `prefix{a, b, c}suffix ×3`."""
    found: list[str] = []
    i = 0
    while i < len(lines):
        end, prefix, suffix = _run(lines, i)
        if end - i < 3:
            found.append(lines[i])
            i += 1
            continue
        found.extend(_folded_run(lines[i:end], prefix, suffix))
        i = end
    return found


_MAX_RUN = 4_000
_RUN_PART_CHARS = 240


def _run(lines: Sequence[str], start: int) -> tuple[int, int, int]:
    """The end of the run of lines from `start` that share most of their text, and the lengths they share."""
    first = lines[start]
    prefix = suffix = len(first)
    end = start + 1
    while end < len(lines) and end - start < _MAX_RUN:
        line = lines[end]
        p = _common(first, line, prefix)
        s = (
            _common(first[::-1], line[::-1], min(suffix, len(line) - p, len(first) - p))
            if p < len(first) or p < len(line)
            else 0
        )
        if p + s < 10 or p + s < 0.5 * max(len(line), 12):
            break
        prefix, suffix, end = p, min(s, suffix), end + 1
    prefix = _at_word(first, prefix)
    return end, prefix, _at_word(first[::-1], min(suffix, len(first) - prefix))


def _common(a: str, b: str, most: int) -> int:
    most = min(most, len(a), len(b))
    if a[:most] == b[:most]:
        return most
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _at_word(text: str, length: int) -> int:
    """Shorten a shared stretch so that it does not end inside a word."""
    while 0 < length < len(text) and _wordy(text[length - 1]) and _wordy(text[length]):
        length -= 1
    return length if length < len(text) else 0 if length == 0 else length


def _wordy(char: str) -> bool:
    return char.isalnum() or char in "_-./"


def _folded_run(run: Sequence[str], prefix: int, suffix: int) -> list[str]:
    head = run[0][:prefix]
    tail = run[0][len(run[0]) - suffix :] if suffix else ""
    parts = [line[prefix : len(line) - suffix if suffix else None] for line in run]
    if len(set(parts)) == 1:
        return [f"{run[0]} ×{len(run)}"]
    if prefix + suffix < 10:
        return list(run)
    counts = Counter(parts)
    words = [part.strip() + (f"×{n}" if n > 1 else "") for part, n in counts.items()]
    found: list[str] = []
    while words:
        taken, size = 0, 0
        while taken < len(words) and size < _RUN_PART_CHARS:
            size += len(words[taken]) + 2
            taken += 1
        found.append(f"{head}{{{', '.join(words[:taken])}}}{tail}")
        words = words[taken:]
        head, tail = head[: len(head) - len(head.lstrip())] + "+ ", ""
    return found


def squeezed(lines: Sequence[str]) -> list[str]:
    """Blank runs as one blank; lines that stand elsewhere already, word for word, dropped after the third time."""
    seen: Counter[str] = Counter()
    found: list[str] = []
    for line in lines:
        if not line.strip():
            if found and found[-1]:
                found.append("")
            continue
        seen[line] += 1
        if seen[line] <= 3 or len(line) < 8:
            found.append(line)
    return found


class Lines(Distiller):
    """Every text."""

    kind = "text"

    def matches(self, text: str) -> bool:
        return True

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        source = wrapped(text)
        lines = folded(squeezed(source))
        packed = pack([Unit(line) for line in lines], limit_tokens, focus_of(hints), calibrated(text, count), "lines")
        return Distillate(self.kind, packed.text, f"{packed.total - packed.kept} of {packed.total} lines")

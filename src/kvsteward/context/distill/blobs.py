"""What is no text: hexdumps, base64, bytes, minified code. Kind, size, hash, head, and the readable strings in it.

It does not decode. Invariant: the hash is of the whole given text, so that two blobs can be told apart.
"""

from __future__ import annotations

import hashlib
import re

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.meter import Meter, calibrated
from kvsteward.context.distill.pack import Unit, pack
from kvsteward.context.distill.salience import focus_of

_DUMP = re.compile(r"^(?:0x)?[0-9a-fA-F]{4,16}:?\s+(?:[0-9a-fA-F]{2,8}\s+){2,16}")
_DUMP_TEXT = re.compile(r"[ |]{2,}\|?(.{1,16}?)\|?$")
_READABLE = re.compile(r"[A-Za-z0-9_./:@%+ -]{5,200}")
_BASE64 = re.compile(r"[A-Za-z0-9+/=_-]{60,}")
_SAMPLE_CHARS = 30_000
_MAX_SHOWN = 4_000
_MAX_HEAD_TOKENS = 80.0
_HASH_CHARS = 16


class Blobs(Distiller):
    """Hexdump, base64, binary, minified."""

    kind = "blob"

    def matches(self, text: str) -> bool:
        return kind_of(text[:_SAMPLE_CHARS]) != ""

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        named = kind_of(text[:_SAMPLE_CHARS])
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_CHARS]
        lines = text.count("\n") + 1
        first = f"{named}, {len(text)} chars, {lines} lines, sha256 {digest}"
        meter = calibrated(text, count)
        head = _head(text, min(_MAX_HEAD_TOKENS, (limit_tokens - meter.tokens(first)) * 0.35), meter)
        found = readable(text, named)
        room = limit_tokens - meter.tokens(first) - meter.tokens(head) - 6
        body = ""
        if found and room > 10:
            packed = pack([Unit(s, 0.2) for s in found], room, focus_of(hints), meter, "strings", " · ")
            body = f"\nstrings: {packed.text}" if packed.kept else ""
        return Distillate(self.kind, f"{first}\n{head}{body}", f"all of the {named} but its head and readable strings")


def kind_of(sample: str) -> str:
    """The kind of a blob by a sample of it; "" if it is text."""
    if not sample:
        return ""
    strange = sum(1 for char in sample if (char < " " and char not in "\n\r\t\x1b\x08") or char == "�")
    if strange > 0.1 * len(sample):
        return "binary"
    lines = [line for line in sample.split("\n")[:400] if line.strip()]
    if len(lines) >= 3 and sum(1 for line in lines if _DUMP.match(line[:120])) > 0.8 * len(lines):
        return "hexdump"
    if sum(len(run) for run in _BASE64.findall(sample)) > 0.8 * len(sample):
        return "base64"
    longest = max(map(len, lines), default=0)
    if (
        longest > 2_000
        and sample.count(" ") < 0.06 * len(sample)
        and sum(sample.count(c) for c in "{};()") > 0.04 * len(sample)
    ):
        return "minified code"
    return ""


def _head(text: str, limit: float, meter: Meter) -> str:
    chars = min(len(text), _MAX_SHOWN, max(16, int(limit * 4)))
    while chars > 16 and meter.tokens(text[:chars]) > limit:
        chars = int(chars * 0.7)
    return text[:chars].rstrip() + "…"


def readable(text: str, named: str) -> list[str]:
    """Readable strings of a blob in order, each once: the text column of a dump, runs of plain characters elsewhere."""
    bounded = text[: 20 * _SAMPLE_CHARS]
    if named == "base64":
        return []
    if named == "hexdump":
        columns = [found.group(1) for line in bounded.split("\n") if (found := _DUMP_TEXT.search(line[-40:]))]
        bounded = "".join(columns)
    seen: dict[str, None] = {}
    for run in _READABLE.findall(bounded):
        word = run.strip(" .")
        if len(word) >= 5 and len(set(word)) > 3:
            seen.setdefault(word[:120])
        if len(seen) >= _MAX_SHOWN:
            break
    return list(seen)

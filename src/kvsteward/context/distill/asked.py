"""The parts of a tree that the question asks for: leaves and small rows, matched by the words of path and value.

It does not lay out the rest. Invariant: bounded visits; a word that matches nearly everything counts
for nearly nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvsteward.context.distill.meter import Meter
from kvsteward.context.distill.salience import Focus, rareness

_MAX_PARTS = 8_000
_MAX_DEPTH = 30
_MAX_ROW_FIELDS = 14
_MAX_VALUE_CHARS = 300
_NEAR_BEST = 0.5
_MAX_RANKED = 60
_MAX_CHOSEN = 20
_MAX_PART_SHARE = 0.5
_COVERED = 0.2


@dataclass(frozen=True, slots=True)
class Part:
    """One leaf or one row of a table, as `path: value`."""

    path: str
    value: str

    def line(self) -> str:
        """The part in one line."""
        return f"{self.path}: {self.value}"

    def narrowed(self, focus: Focus) -> str:
        """The line with only those fields of a row that are looked for, and its first."""
        fields = self.value.split(", ")
        kept = [field for at, field in enumerate(fields) if not at or focus.hits(field)]
        return f"{self.path}: {', '.join(kept)}"


def asked_parts(value: Any, focus: Focus, limit_tokens: float, meter: Meter) -> list[str]:
    """Lines of the parts that match the question best, in document order, within the limit; none if none stands out."""
    if not (focus.asked or focus.exact):
        return []
    parts = [part for part, _ in zip(_parts(value), range(_MAX_PARTS), strict=False)]
    hits = [focus.hits(f"{part.path} {part.value}") for part in parts]
    frequency = Counter(word for found in hits for word in found)
    scores = [sum(w * rareness(frequency[word], len(parts)) for word, w in found.items()) for found in hits]
    best = max(scores, default=0.0)
    if best < 0.5:
        return []
    chosen: dict[int, str] = {}
    covered: set[str] = set()
    spent = 0.0
    order = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: (-scores[i], i))[:_MAX_RANKED]
    while order and len(chosen) < _MAX_CHOSEN:
        gains = [_gain(hits[i], covered, frequency, len(parts)) for i in order]
        top = max(gains)
        if top < _NEAR_BEST * best and covered:
            break
        i = order.pop(gains.index(top))
        line = parts[i].line()
        if meter.tokens(line) > min(limit_tokens - spent, _MAX_PART_SHARE * limit_tokens):
            line = parts[i].narrowed(focus)
        price = meter.tokens(line) + 1
        if spent + price <= limit_tokens:
            chosen[i] = line
            spent += price
            covered.update(hits[i])
    return [chosen[i] for i in sorted(chosen)]


def _gain(found: Mapping[str, float], covered: set[str], frequency: Mapping[str, int], total: int) -> float:
    """The weight of the looked-for words that a part holds; those that a chosen part holds already count little."""
    return sum(
        w * rareness(frequency[word], total) * (_COVERED if word in covered else 1.0) for word, w in found.items()
    )


def _parts(value: Any) -> Iterator[Part]:
    stack: list[tuple[str, Any, int]] = [("", value, 0)]
    while stack:
        path, node, depth = stack.pop()
        if isinstance(node, Mapping | list) and depth < _MAX_DEPTH and node:
            if isinstance(node, Mapping) and path and _is_row(node):
                yield Part(path, ", ".join(f"{key}: {_told(child)}" for key, child in node.items()))
                continue
            pairs = node.items() if isinstance(node, Mapping) else enumerate(node[:_MAX_PARTS])
            children = [(_joined(path, key), child, depth + 1) for key, child in pairs]
            stack.extend(reversed(children))
        elif not isinstance(node, Mapping | list):
            yield Part(path, _told(node))


def _joined(path: str, key: object) -> str:
    step = f"[{key}]" if isinstance(key, int) else f".{key}" if path else str(key)
    return f"{path}{step}"


def _is_row(node: Mapping[str, Any]) -> bool:
    if len(node) > _MAX_ROW_FIELDS or any(isinstance(child, Mapping | list) for child in node.values()):
        return False
    return sum(len(str(child)) for child in node.values()) <= _MAX_VALUE_CHARS


def _told(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else "null"
    return " ".join(str(value)[:_MAX_VALUE_CHARS].split())

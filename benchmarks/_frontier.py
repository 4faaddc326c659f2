"""The picture of benchmarks/context.py: facts that only tools told, in view, over the tokens of the view and over the
tokens that an engine has to prefill. One colour for each reducer, one dot for each budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _TOP, _BOTTOM, _PANEL, _LEGEND = 944, 430, 64, 300, 390, 350
_LEFTS = (56, 510)
_COLOURS = ("#2f9e6e", "#e45756", "#4c78a8", "#f2a93b", "#b279a2", "#79706e", "#9d755d", "#00a0b0", "#ff9da6")
_LOWEST_PREFILL, _HIGHEST_PREFILL = 100, 10_000
_STYLE = (
    "text{font:12px ui-sans-serif,system-ui,sans-serif;fill:#1f2328}.t{font-weight:600;font-size:14px}"
    ".g{stroke:#d0d7de}.b{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.g{stroke:#30363d}.b{fill:#0d1117}}"
)
Row = dict[str, Any]


def frontier(rows: Sequence[Row]) -> str:
    """An SVG that is readable on light and dark pages."""
    names = list(dict.fromkeys(row["label"] for row in sorted(rows, key=lambda r: r["reducer"] != "kvsteward")))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    title = "Facts that only a tool result told, still in the model's view (%)"
    tokens = [(f"{percent} %", percent / 100) for percent in range(0, 101, 20)]
    prefill = [(f"{many:,}", float(many)) for many in (100, 300, 1_000, 3_000, 10_000)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img" aria-label="{escape(title)}"><style>{_STYLE}</style>'
        f'<rect class="b" width="{_WIDTH}" height="{_HEIGHT}"/><text class="t" x="24" y="30">{escape(title)}</text>'
        + _panel(rows, _LEFTS[0], "tokens of the view, of passing all through", tokens, _share, "ratio", colours)
        + _panel(rows, _LEFTS[1], "tokens to prefill each turn", prefill, _logarithm, "prefilled_per_turn", colours)
        + "".join(_entry(i, name, colours[name]) for i, name in enumerate(names))
        + "</svg>\n"
    )


def _panel(
    rows: Sequence[Row],
    left: int,
    axis: str,
    ticks: Sequence[tuple[str, float]],
    place: Callable[[float], float],
    key: str,
    colours: dict[str, str],
) -> str:
    drawn = []
    for percent in range(0, 101, 20):
        y = _y(percent)
        drawn.append(f'<line class="g" x1="{left}" x2="{left + _PANEL}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{percent}</text>')
    for text, value in ticks:
        x = left + _PANEL * place(value)
        drawn.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>')
        drawn.append(f'<text x="{x:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{text}</text>')
    drawn.append(f'<text x="{left + _PANEL / 2}" y="{_TOP - 12}" text-anchor="middle">{escape(axis)}</text>')
    for name, colour in reversed(colours.items()):
        points = [
            (left + _PANEL * place(row["all"][key]), _y(row["all"]["tool_only_pct"] or 0))
            for row in rows
            if row["label"] == name
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn.append(f'<polyline points="{path}" style="fill:none;stroke:{colour};stroke-width:2"/>')
        drawn.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>' for x, y in points)
    return "".join(drawn)


def _entry(index: int, name: str, colour: str) -> str:
    x, y = _LEFTS[0] + 290 * (index % 3), _LEGEND + 22 * (index // 3)
    return f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{colour}"/><text x="{x + 12}" y="{y}">{escape(name)}</text>'


def _share(ratio: float) -> float:
    return min(ratio, 1.0)


def _logarithm(tokens: float) -> float:
    low, high = math.log(_LOWEST_PREFILL), math.log(_HIGHEST_PREFILL)
    return min(1.0, max(0.0, (math.log(max(tokens, 1.0)) - low) / (high - low)))


def _y(percent: float) -> float:
    return _TOP + (_BOTTOM - _TOP) * (1 - percent / 100)

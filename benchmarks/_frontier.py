"""The picture of benchmarks/context.py: facts that only tools told, in view, over tokens. One dot for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 420, 64, 24, 48, 52
_STYLE = (
    "text{font:12px ui-sans-serif,system-ui,sans-serif;fill:#1f2328}.t{font-weight:600;font-size:14px}"
    ".g{stroke:#d0d7de}.b{fill:#fff}.us{fill:#2f9e6e;stroke:#2f9e6e}.peer{fill:#8c6bb1;stroke:#8c6bb1}.ul{font-weight:600}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.g{stroke:#30363d}.b{fill:#0d1117}}"
)


def frontier(rows: Sequence[dict[str, Any]]) -> str:
    """An SVG that is readable on light and dark pages."""
    grid = "".join(_horizontal(percent) for percent in range(0, 101, 20))
    grid += "".join(_vertical(percent) for percent in range(0, 101, 20))
    ours = [row for row in rows if row["reducer"] == "kvsteward"]
    points = sorted((_x(row["all"]["ratio"]), _y(row["all"]["tool_only_pct"] or 0)) for row in ours)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    joined = f'<polyline class="us" fill="none" points="{path}" style="fill:none"/>' if len(points) > 1 else ""
    title = "Facts that only a tool result told, still in the model's view (%)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img" aria-label="{escape(title)}"><style>{_STYLE}</style>'
        f'<rect class="b" width="{_WIDTH}" height="{_HEIGHT}"/><text class="t" x="24" y="28">{escape(title)}</text>'
        f"{grid}{joined}{_dots(rows)}"
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">tokens, % of passing everything through</text>'
        "</svg>\n"
    )


def _dots(rows: Sequence[dict[str, Any]]) -> str:
    """The dots and their names; a name moves down until it covers no other."""
    taken: list[tuple[float, float, float]] = []
    drawn = []
    for row in sorted(rows, key=lambda row: (row["reducer"] != "kvsteward", row["all"]["ratio"])):
        x, y = _x(row["all"]["ratio"]), _y(row["all"]["tool_only_pct"] or 0)
        us = row["reducer"] == "kvsteward"
        name = row["label"] + (f", {row['budget'] / 1024:g}K" if row["budget"] else "")
        wide = 6.4 * len(name)
        at = x + 8 if x + 8 + wide < _WIDTH - _RIGHT else x - 8 - wide
        level = y + 4
        while any(abs(level - other) < 13 and at < end and begin < at + wide for begin, end, other in taken):
            level += 13
        taken.append((at, at + wide, level))
        drawn.append(
            f'<circle class="{"us" if us else "peer"}" cx="{x:.1f}" cy="{y:.1f}" r="{5 if us else 4}"/>'
            f'<text class="{"ul" if us else "pl"}" x="{at:.1f}" y="{level:.1f}">{escape(name)}</text>'
        )
    return "".join(drawn)


def _x(ratio: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(ratio, 1.0)


def _y(percent: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - percent / 100)


def _horizontal(percent: int) -> str:
    y = _y(percent)
    rule = f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{rule}<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent}</text>'


def _vertical(percent: int) -> str:
    x = _x(percent / 100)
    rule = f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
    return f'{rule}<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{percent}</text>'

"""The memory of the GPUs as an SVG: one bar each. Knows parts and pixels; readable on light and dark pages.

Invariant: valid XML; a label stands only where it fits, the legend has every number.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from kvsteward.lab.planner.memory import Gpu, Part

MOST_BARS = 16
COLOURS = {
    "weights": "#4c78a8", "activations": "#e45756", "communication": "#b279a2", "graphs": "#f2a93b",
    "KV": "#2f9e6e", "free": "#9aa0a6",
}  # fmt: skip
_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP, _LEGEND = 960, 176, 24, 56, 26, 8, 22
_GLYPH = 7.2  # pixels of a 12 px character, rounded up: wide letters of most fonts
_STYLE = (
    "text{font:12px ui-sans-serif,system-ui,sans-serif;fill:#1f2328}.t{font-weight:600;font-size:14px}"
    ".p{fill:#fff}.d{fill:#111}.s{fill:#59636e}.b{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.p{fill:#fff}.d{fill:#111}.s{fill:#9198a1}.b{fill:#0d1117}}"
)


def draw(title: str, gpus: tuple[Gpu, ...]) -> str:
    """The picture of 16 GPUs at most; more are counted in words. Legend: parts of the first GPU."""
    shown = gpus[:MOST_BARS]
    legend = _legend(shown[0].parts, _TOP + len(shown) * (_BAR + _GAP) + 18)
    body = [_bar(gpu, _TOP + row * (_BAR + _GAP)) for row, gpu in enumerate(shown)]
    more = f", {len(gpus) - len(shown)} more alike" if len(gpus) > len(shown) else ""
    height = _TOP + len(shown) * (_BAR + _GAP) + 26 + _LEGEND * -(-len(shown[0].parts) // 3)
    head = _text(24, 32, _shortened(title + more, _WIDTH - 48, 8.6), "t")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}"><style>{_STYLE}</style>'
        f'<rect class="b" width="{_WIDTH}" height="{height}"/>{head}{"".join(body)}{legend}</svg>\n'
    )


def _bar(gpu: Gpu, top: int) -> str:
    total = sum(part.size_bytes for part in gpu.parts) or 1
    room, left = _WIDTH - _LEFT - _RIGHT, float(_LEFT)
    drawn = [_text(24, top + 17, f"GPU {gpu.index}: {gpu.role}", "s")]
    for part in gpu.parts:
        width = room * part.size_bytes / total
        drawn.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{COLOURS[part.name]}">')
        drawn.append(f"<title>{escape(f'{part.name}: {part.text}')}</title></rect>")
        label = next((text for text in _labels(part) if len(text) * _GLYPH + 8 <= width), "")
        if label:
            drawn.append(_text(left + width / 2, top + 17, label, _ink(part), middle=True))
        left += width
    return "".join(drawn)


def _labels(part: Part) -> tuple[str, ...]:
    return f"{part.name} {part.text}", f"{part.name} {part.size_bytes / 2**30:.1f}", part.name


def _ink(part: Part) -> str:
    return "d" if part.name in {"graphs", "free"} else "p"


def _legend(parts: tuple[Part, ...], top: int) -> str:
    drawn = []
    for index, part in enumerate(parts):
        x, y = 24 + 304 * (index % 3), top + _LEGEND * (index // 3)
        drawn.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{COLOURS[part.name]}"/>')
        drawn.append(_text(x + 20, y, f"{part.name}: {part.text}", ""))
    return "".join(drawn)


def _text(x: float, y: float, text: str, kind: str, *, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:.1f}" y="{y}" class="{kind}"{anchor}>{escape(text)}</text>'


def _shortened(text: str, width: int, glyph: float) -> str:
    most = int(width / glyph)
    return text if len(text) <= most else text[: most - 1] + "…"

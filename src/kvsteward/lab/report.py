"""Charts as single HTML files: plotly's script comes from the installed package, so that a page works without a net.

Knows figures, not where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Series:
    """Resident tokens by turn. `turns` and `tokens` have the same length."""

    name: str
    turns: Sequence[int]
    tokens: Sequence[int]


def residency_page(title: str, series: Sequence[Series], budget_tokens: int) -> str:
    """Resident tokens of each turn against the budget, a line for each series."""
    from plotly.graph_objects import Figure, Scatter  # half a second of imports that only a chart needs

    figure = Figure()
    for line in series:
        figure.add_trace(Scatter(x=list(line.turns), y=list(line.tokens), name=line.name, mode="lines+markers"))
    figure.add_hline(y=budget_tokens, line_dash="dash", annotation_text=f"budget: {budget_tokens:,} tokens")
    figure.update_layout(
        title=title,
        xaxis_title="turn",
        yaxis_title="resident tokens",
        yaxis_rangemode="tozero",
        template="plotly_white",
    )
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page

"""What the KV cache costs: pure arithmetic over model, format, engine and hardware.

Knows no I/O, no clock and no third-party package. Invariant: a figure is computed from what the files say, or the value
that was filled in is listed as assumed, or a ConfigError names what is missing.
"""

from __future__ import annotations

from kvsteward.ledger.capacity import BlockBudget, Capacity, Figure, budget_for, capacity_tokens, tokens_in
from kvsteward.ledger.formats import Format, grouped
from kvsteward.ledger.gguf import parse_header
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.spec import Assumption, ModelSpec, Weights

__all__ = [
    "Assumption",
    "BlockBudget",
    "Capacity",
    "Figure",
    "Format",
    "Kind",
    "Layer",
    "ModelSpec",
    "Weights",
    "budget_for",
    "capacity_tokens",
    "grouped",
    "parse_header",
    "tokens_in",
]

"""What the KV cache costs: pure arithmetic over model, format, engine and hardware.

Knows no I/O, no clock and no third-party package. Invariant: a figure is computed from what the files say, or the value
that was filled in is listed as assumed, or a ConfigError names what is missing.
"""

from __future__ import annotations

from kvsteward.ledger.account import Account, account
from kvsteward.ledger.capacity import BlockBudget, Capacity, budget_for, capacity_tokens, tokens_in
from kvsteward.ledger.device import Device, devices
from kvsteward.ledger.device import find as find_device
from kvsteward.ledger.figures import Figure, table
from kvsteward.ledger.formats import Format, grouped
from kvsteward.ledger.gguf import Header, parse_header
from kvsteward.ledger.gguf_spec import read_header
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.spec import Assumption, ModelSpec, Weights
from kvsteward.ledger.vision import image_tokens

__all__ = [
    "Account",
    "Assumption",
    "BlockBudget",
    "Capacity",
    "Device",
    "Figure",
    "Format",
    "Header",
    "Kind",
    "Layer",
    "ModelSpec",
    "Weights",
    "account",
    "budget_for",
    "capacity_tokens",
    "devices",
    "find_device",
    "grouped",
    "image_tokens",
    "parse_header",
    "read_header",
    "table",
    "tokens_in",
]

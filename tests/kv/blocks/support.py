"""Blocks to store, and a real Valkey to store them in."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence

from kvsteward.kv.blocks import BlockStore, Fingerprint, Ticket, key
from valkey_server import PATIENCE_S, Server, free_port

__all__ = [
    "BLOCK_BYTES",
    "OURS",
    "PATIENCE_S",
    "Server",
    "block",
    "free_port",
    "keys",
    "loaded",
    "wait",
]

BLOCK_BYTES = 3000
OURS = Fingerprint(
    model="smol",
    revision="1",
    dtype="bfloat16",
    layout="LBHNC",
    block_tokens=16,
    block_bytes=BLOCK_BYTES,
    tenant_salt="a",
)


def block(seed: object, size_bytes: int = BLOCK_BYTES) -> bytes:
    return random.Random(str(seed)).randbytes(size_bytes)


def keys(count: int, fingerprint: Fingerprint = OURS, name: str = "") -> list[bytes]:
    return [key(fingerprint, hashlib.sha256(f"{name}{n}".encode()).digest()) for n in range(count)]


def wait(ticket: Ticket) -> int:
    until = time.monotonic() + PATIENCE_S
    while (found := ticket.poll()) is None:
        assert time.monotonic() < until, "the ticket was never settled"
        time.sleep(0.0005)
    return found


def loaded(store: BlockStore, wanted: Sequence[bytes]) -> list[bytes]:
    """The first of the blocks, by way of the lower tiers."""
    ticket = store.stage(wanted, PATIENCE_S)
    count = wait(ticket)
    blocks = [bytes(view) for view in ticket.blocks()]
    assert len(blocks) == count
    ticket.release()
    store.check()
    return blocks

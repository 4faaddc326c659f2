"""Fixtures of the block store: a real Valkey, stores whose books are checked at the end, each real tier."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from support import BLOCK_BYTES, OURS, Server

from kvsteward.kv.blocks import BlockStore, HostPool
from kvsteward.kv.blocks.disk import DiskTier
from kvsteward.kv.blocks.tier import Tier
from kvsteward.kv.blocks.valkey import ValkeyTier


@pytest.fixture
def server(valkey_server: Server) -> Server:
    """The session's server, empty."""
    return valkey_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """One to kill."""
    server = Server(tmp_path)
    yield server
    server.kill()


Make = Callable[..., BlockStore]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """`make(tiers, slots=8, **options)`: stores that are closed, and whose books are checked, at the end."""
    stores: list[BlockStore] = []

    def store(tiers: Sequence[Tier] = (), slots: int = 8, **options: Any) -> BlockStore:
        pool_options = {name: options.pop(name) for name in ("order", "wall") if name in options}
        wall = pool_options.pop("wall", time.time)
        pool = HostPool(BLOCK_BYTES, slots * 4096, clock=wall, **pool_options)
        options.setdefault("queue_blocks", slots)
        made = BlockStore(pool, tiers, wall=wall, **options)
        stores.append(made)
        return made

    yield store
    for made in stores:
        made.close(drain_s=0.0)
        made.check()


@pytest.fixture(params=["disk", "valkey"])
def lower(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """Each real tier below the host pool."""
    if request.param == "disk":
        tier: Tier = DiskTier(tmp_path / "blocks", 64 << 20)
    else:
        tier = ValkeyTier(request.getfixturevalue("server").url, namespace=OURS.digest().hex())
    yield tier
    tier.close()

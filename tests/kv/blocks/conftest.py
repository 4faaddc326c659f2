"""Fixtures of the block store: a real Valkey, stores whose books are checked at the end, each real tier."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from kv_proxy import own_certificate, proxied, tls_server
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


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A server's certificate and key, for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes certificates")
    return own_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["disk", "valkey", "valkey over TLS"])
def lower(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """Each real tier below the host pool."""
    with contextlib.ExitStack() as stack:
        if request.param == "disk":
            tier: Tier = DiskTier(tmp_path / "blocks", 64 << 20)
        else:
            server, url = request.getfixturevalue("server"), request.getfixturevalue("server").url
            if request.param != "valkey":
                pair = request.getfixturevalue("certificate")
                url = stack.enter_context(proxied(server.port, tls_server(*pair))).url + f"?ssl_ca_certs={pair[0]}"
            tier = ValkeyTier(url, namespace=OURS.digest().hex())
        yield tier
        tier.close()

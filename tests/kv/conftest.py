"""The two engines that the tests in real vLLM share (marked `vllm`; needs `make setup-vllm`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from vllm_world import SLOT_BYTES, Engine, Valkey, World, engine, environment, python_path


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A has a pool of 96 blocks, host memory for 100 and Valkey; B the same. Their books are checked in every step."""
    bench, program = environment()
    folder = tmp_path_factory.mktemp("tiers")
    path, server = python_path(folder), Valkey(folder, program)
    options = {"host_bytes": 100 * SLOT_BYTES, "stage_within_s": 20, "valkey_url": server.proxy.url}
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)

        def start(name: str) -> Engine:
            return stack.enter_context(engine(None, folder, name, options, bench=bench, path=path))

        with ThreadPoolExecutor(2) as threads:
            engines = list(threads.map(start, "ab"))
        yield World(*engines, server, path, bench)
    for one in engines:
        assert "kvsteward: tiers: 100 blocks of 737280 bytes in host memory, valkey" in one.log.read_text()

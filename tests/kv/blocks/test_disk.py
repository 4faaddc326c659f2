"""The disk tier: restarts, room, a file system that fails."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import BLOCK_BYTES, PATIENCE_S, block, keys, loaded

from kvsteward.errors import ConfigError
from kvsteward.kv.blocks import Reason
from kvsteward.kv.blocks.disk import DiskTier
from kvsteward.kv.blocks.record import HEADER_BYTES, encode_header
from kvsteward.kv.blocks.tier import Write

KEYS = keys(8)
RECORD_BYTES = HEADER_BYTES + BLOCK_BYTES


def record(n: int) -> bytes:
    content = block(KEYS[n])
    return encode_header(KEYS[n], content, codec=0, raw_bytes=len(content)) + content


def write(tier: DiskTier, n: int, session: str = "") -> Reason | None:
    return tier.write([Write(KEYS[n], (record(n)[:100], record(n)[100:]), session)])[0]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


def test_blocks_survive_a_restart_and_what_was_unfinished_is_dropped(make, tmp_path):
    tier = DiskTier(tmp_path, 1 << 20)
    for n in range(3):
        assert write(tier, n) is None
    tier.close()
    (files(tmp_path)[0].parent / "7.part").write_bytes(b"half a block")
    (files(tmp_path)[0].parent / "nonsense.block").write_bytes(b"not ours")
    again = DiskTier(tmp_path, 1 << 20)
    assert again.figures().blocks == 3
    assert again.figures().used_bytes == 3 * RECORD_BYTES
    assert loaded(make([again]), KEYS[:4]) == [block(key) for key in KEYS[:3]]
    assert not list(tmp_path.rglob("*.part"))
    again.close()


def test_room_is_made_by_dropping_what_was_not_used_for_longest(tmp_path):
    tier = DiskTier(tmp_path, 3 * RECORD_BYTES)
    for n in range(3):
        write(tier, n)
    tier.read(KEYS[:1], [memoryview(bytearray(RECORD_BYTES))])
    write(tier, 3)
    assert tier.holds(KEYS[:4]) == [True, False, True, True]
    assert tier.figures().evicted == 1
    assert sum(path.stat().st_size for path in files(tmp_path)) == 3 * RECORD_BYTES
    tier.close()
    smaller = DiskTier(tmp_path, 2 * RECORD_BYTES)
    assert smaller.figures().blocks == 2
    assert len(files(tmp_path)) == 2
    assert smaller.write([Write(KEYS[5], (bytes(3 * RECORD_BYTES),))]) == [Reason.FULL]
    smaller.close()


def test_the_order_of_use_survives_a_restart(tmp_path):
    tier = DiskTier(tmp_path, 3 * RECORD_BYTES)
    for n in range(3):
        write(tier, n)
        path = tmp_path / KEYS[n][-1:].hex() / f"{KEYS[n].hex()}.block"
        os.utime(path, (n, n))
    tier.read(KEYS[:1], [memoryview(bytearray(RECORD_BYTES))])
    tier.close()
    again = DiskTier(tmp_path, 3 * RECORD_BYTES)
    write(again, 3)
    assert again.holds(KEYS[:4]) == [True, False, True, True]
    again.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_write_that_fails_is_counted_and_leaves_nothing(make, tmp_path, monkeypatch, code):
    tier = DiskTier(tmp_path, 1 << 20)
    store = make([tier])
    real = os.write

    def failing(file, data):
        if len(data) == RECORD_BYTES:
            real(file, data[:1000])
            raise OSError(code, os.strerror(code))
        return real(file, data)

    monkeypatch.setattr("kvsteward.kv.blocks.disk.os.write", failing)
    assert store.put(KEYS[0], memoryview(block(KEYS[0])))
    assert store.flush(PATIENCE_S)
    reason = "full" if code in (errno.ENOSPC, errno.EDQUOT) else "error"
    assert tier.figures().refused == {reason: 1}
    assert (tier.figures().blocks, tier.figures().used_bytes) == (0, 0)
    assert files(tmp_path) == []
    assert store.lookup(KEYS[:1]) == 1
    monkeypatch.undo()
    assert write(tier, 0) is None
    assert tier.figures().used_bytes == RECORD_BYTES
    tier.close()


def test_a_real_limit_on_file_size_is_a_refusal(tmp_path):
    """In a process of its own: RLIMIT_FSIZE cannot be raised again."""
    program = f"""
import resource, signal
from pathlib import Path
from kvsteward.kv.blocks.disk import DiskTier
from kvsteward.kv.blocks.tier import Write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
tier = DiskTier(Path({str(tmp_path)!r}), 1 << 20)
print(tier.write([Write(b"k" * 52, (bytes(1000),)), Write(b"l" * 52, (bytes(3000),)), Write(b"m" * 52, (bytes(2000),))]))
print(tier.figures().used_bytes, tier.holds([b"k" * 52, b"l" * 52, b"m" * 52]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.splitlines() == ["[None, <Reason.FULL: 'full'>, None]", "3000 [True, False, True]"]


def test_files_that_vanish_or_cannot_be_read_are_misses(make, tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 1 << 20)
    for n in range(2):
        write(tier, n)
    next(tmp_path.rglob(f"{KEYS[0].hex()}.block")).unlink()
    store = make([tier])
    assert loaded(store, KEYS[:1]) == []
    assert tier.holds(KEYS[:2]) == [False, True]

    def broken(file, buffers):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("kvsteward.kv.blocks.disk.os.readv", broken)
    assert loaded(store, KEYS[1:2]) == []
    assert tier.figures().misses == {"absent": 1, "error": 1}
    monkeypatch.undo()
    assert loaded(store, KEYS[1:2]) == [block(KEYS[1])]
    tier.close()


@pytest.mark.parametrize("call", ["write", "unlink"])
def test_a_disk_that_hangs_holds_nobody_up_but_its_own_threads(make, tmp_path, monkeypatch, call):
    tier = DiskTier(tmp_path, 2 * RECORD_BYTES)
    store = make([tier])
    for n in range(2):
        store.put(KEYS[n], memoryview(block(KEYS[n])), "s")
    assert store.flush(PATIENCE_S)
    gate, hangs = threading.Event(), threading.Event()

    def hang(*arguments, **options):
        hangs.set()
        assert gate.wait(60)
        raise OSError(errno.EIO, "it hung")

    target = "kvsteward.kv.blocks.disk.os.write" if call == "write" else "kvsteward.kv.blocks.disk.Path.unlink"
    monkeypatch.setattr(target, hang)
    out = memoryview(bytearray(BLOCK_BYTES))

    def step() -> None:
        store.put(KEYS[2], memoryview(block(KEYS[2])), "s")
        assert hangs.wait(PATIENCE_S)
        store.figures()
        store.check()
        store.stage(KEYS[:4], 0.0).release()
        assert store.get_into(KEYS[0], out)
        store.forget_session("s")

    caller = threading.Thread(target=step, daemon=True)
    caller.start()
    caller.join(PATIENCE_S)
    hung = caller.is_alive()
    gate.set()
    assert not hung
    monkeypatch.undo()
    tier.close()


def test_a_folder_has_one_owner_and_is_not_for_others_to_read(tmp_path):
    folder = tmp_path / "deep" / "blocks"
    tier = DiskTier(folder, 1 << 20)
    write(tier, 0)
    with pytest.raises(ConfigError, match="in use by another process"):
        DiskTier(folder, 1 << 20)
    assert all(path.stat().st_mode & 0o077 == 0 for path in [folder, *folder.rglob("*")])
    tier.close()
    DiskTier(folder, 1 << 20).close()


def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot keep blocks"):
        DiskTier(tmp_path / "file", 1 << 20)
    with pytest.raises(ConfigError, match="keeps nothing"):
        DiskTier(tmp_path / "new", 0)


def test_kill_in_the_middle_of_a_write_leaves_whole_blocks_only(tmp_path):
    """Writes for ever in a process that is killed; what the next one finds is whole."""
    program = f"""
import itertools
from pathlib import Path
from kvsteward.kv.blocks.disk import DiskTier
from kvsteward.kv.blocks.record import encode_header
from kvsteward.kv.blocks.tier import Write
tier = DiskTier(Path({str(tmp_path)!r}), 64 << 20)
body = bytes(300_000)
for n in itertools.count():
    key = b"d" * 16 + n.to_bytes(36, "big")
    tier.write([Write(key, (encode_header(key, body, codec=0, raw_bytes=len(body)), body))])
    if n == 5:
        print("going", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"going\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
    tier = DiskTier(tmp_path, 64 << 20)
    assert tier.figures().blocks >= 6
    assert {path.stat().st_size for path in files(tmp_path)} == {300_000 + HEADER_BYTES}
    tier.close()

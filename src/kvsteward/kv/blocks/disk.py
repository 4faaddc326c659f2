"""Blocks as files: one record in each, written beside its place and renamed, so a reader sees all of it or nothing.

    FOLDER/lock                      held by the one process that uses the folder
    FOLDER/ab/ab12....block          a key in hex, in a folder of its block hash's last byte

The files outlive the process; the next one finds them again, oldest first. When there is no room the ones that were
not used for longest go. A file system that fails (full, read-only, broken) costs blocks, never an error.

Knows nothing of what is in a record. Invariant: the files of the index take at most `capacity_bytes`; a file under a
block's name is a whole record as far as rename is atomic, and the record's checksum tells for the rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsteward.errors import ConfigError
from kvsteward.kv.blocks.record import Miss, Reason
from kvsteward.kv.blocks.tier import Meter, Tier, TierFigures, Write

SUFFIX = ".block"
PART = ".part"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(slots=True)
class _File:
    size_bytes: int
    session: str


class DiskTier(Tier):
    """`folder` is made where it is missing, readable for its owner only: what is in KV can be read back from it.

    `capacity_bytes` bounds the files' sizes. The sessions of files that an earlier process wrote are unknown, so
    their end does not drop them. Raises ConfigError where the folder cannot be used or another process uses it.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        name: str = "disk",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if capacity_bytes < 1:
            raise ConfigError(f"a disk tier of {capacity_bytes} bytes keeps nothing")
        self.name = name
        self._folder, self._capacity_bytes, self._clock = folder, capacity_bytes, clock
        self._lock = threading.Lock()
        self._files: OrderedDict[bytes, _File] = OrderedDict()
        self._sessions: dict[str, set[bytes]] = {}
        self._used_bytes = 0
        self._meter = Meter()
        self._parts = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{folder} cannot keep blocks: {error.strerror}") from error
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._held)
            raise ConfigError(
                f"{folder} is in use by another process", hint="Give each process (each rank) a folder of its own."
            ) from error
        self._find()

    def _find(self) -> None:
        """Takes up what an earlier process left, and drops what it did not finish."""
        found: list[tuple[float, bytes, int]] = []
        for path in self._folder.glob(f"*/*{PART}"):
            with contextlib.suppress(OSError):
                path.unlink()
        for path in self._folder.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(OSError, ValueError):
                stat = path.stat()
                found.append((stat.st_mtime, bytes.fromhex(path.name.removesuffix(SUFFIX)), stat.st_size))
        for _, key, size_bytes in sorted(found):
            self._files[key] = _File(size_bytes, "")
            self._used_bytes += size_bytes
        with self._lock:
            dropped = self._make_room(0)
        self._unlink(dropped)

    def _path(self, key: bytes) -> Path:
        return self._folder / key[-1:].hex() / f"{key.hex()}{SUFFIX}"

    # reading

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._files for key in keys]

    def read(self, keys: Sequence[bytes], rooms: Sequence[memoryview]) -> list[memoryview | Miss]:
        start = self._clock()
        answers = [self._read(key, room) for key, room in zip(keys, rooms, strict=True)]
        with self._lock:
            self._meter.read_s += self._clock() - start
            for answer in answers:
                if isinstance(answer, memoryview):
                    self._meter.read_blocks += 1
                    self._meter.read_bytes += answer.nbytes
        return answers

    def _read(self, key: bytes, room: memoryview) -> memoryview | Miss:
        with self._lock:
            if key not in self._files:
                return Miss(Reason.ABSENT)
            self._files.move_to_end(key)
        try:
            with _opened(self._path(key), os.O_RDONLY) as file:
                size_bytes = os.fstat(file).st_size
                if size_bytes > room.nbytes:
                    self.forget([key])
                    return Miss(Reason.SIZE, f"{size_bytes} bytes")
                got = 0
                while got < size_bytes:
                    more = os.readv(file, [room[got:size_bytes]])
                    if not more:
                        break
                    got += more
                os.utime(file)
        except FileNotFoundError:
            self.forget([key])
            return Miss(Reason.ABSENT, "the file is gone")
        except OSError as error:
            return Miss(Reason.ERROR, str(error.strerror))
        return room[:got]

    # writing

    def write(self, writes: Sequence[Write]) -> list[Reason | None]:
        start = self._clock()
        answers = [self._write(write) for write in writes]
        with self._lock:
            self._meter.written_s += self._clock() - start
            for write, reason in zip(writes, answers, strict=True):
                if reason is None:
                    self._meter.written_blocks += 1
                    self._meter.written_bytes += write.nbytes
                else:
                    self._meter.refused[reason] += 1
        return answers

    def _write(self, write: Write) -> Reason | None:
        size_bytes = write.nbytes
        with self._lock:
            dropped = self._drop([write.key])
            fits = size_bytes <= self._capacity_bytes
            if fits:
                dropped += self._make_room(size_bytes)
                self._used_bytes += size_bytes
            self._parts += 1
            number = self._parts
        self._unlink(dropped)
        if not fits:
            return Reason.FULL
        path = self._path(write.key)
        part = path.with_name(f"{number}{PART}")
        try:
            with _made(part) as file:
                for piece in write.parts:
                    view = memoryview(piece).cast("B")
                    while view:
                        view = view[os.write(file, view) :]
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            with self._lock:
                self._used_bytes -= size_bytes
            return Reason.FULL if error.errno in _FULL else Reason.ERROR
        with self._lock:
            self._files[write.key] = _File(size_bytes, write.session)
            if write.session:
                self._sessions.setdefault(write.session, set()).add(write.key)
        return None

    def _make_room(self, size_bytes: int) -> list[bytes]:
        dropped: list[bytes] = []
        while self._files and self._used_bytes + size_bytes > self._capacity_bytes:
            dropped += self._drop([next(iter(self._files))])
        self._meter.evicted += len(dropped)
        return dropped

    def _drop(self, keys: Sequence[bytes]) -> list[bytes]:
        """Takes keys out of the index; their files are to be unlinked, without the lock, since that may take long."""
        dropped = []
        for key in keys:
            file = self._files.pop(key, None)
            if file is None:
                continue
            dropped.append(key)
            self._used_bytes -= file.size_bytes
            its = self._sessions.get(file.session)
            if its is not None:
                its.discard(key)
                if not its:
                    del self._sessions[file.session]
        return dropped

    def _unlink(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    def forget(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            dropped = self._drop(keys)
        self._unlink(dropped)
        return len(dropped)

    def forget_session(self, session: str, spare: Callable[[Sequence[bytes]], set[bytes]]) -> int:
        with self._lock:
            keys = list(self._sessions.get(session, ()))
        return self.forget(sorted(set(keys) - spare(keys)))

    # the account

    def missed(self, reason: Reason) -> None:
        with self._lock:
            self._meter.misses[reason] += 1

    def figures(self) -> TierFigures:
        with self._lock:
            return self._meter.figures(
                self.name,
                blocks=len(self._files),
                used_bytes=self._used_bytes,
                capacity_bytes=self._capacity_bytes,
            )

    def close(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _made(path: Path) -> Iterator[int]:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)

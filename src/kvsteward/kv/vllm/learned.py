"""What was learned of return times outlives the engine: a file that one process writes and the next one begins with.

Data-parallel ranks share a path: each writes a file of its own beside it (`file_of`), and begins with what all of them
knew (`policy.pooled`). A file that is much older than the newest is of a rank that is no more, and is left out.

JSON lines: a header with the bins that the rows are for, then a row for each class and trait (`policy.returns`). Lines,
because a thread writes them beside the engine, and must let go of the interpreter often. A file that is cut, foreign
or for other bins is not used, which a warning says: then learning begins anew, as without a file.

No vLLM import. Invariant: readers never see half a file; nothing here waits in an engine's step.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsteward.policy.pooled import pooled
from kvsteward.policy.returns import BINS, BINS_PER_OCTAVE, FIRST_BIN_S, Returns

log = logging.getLogger("vllm.kvsteward")

EVERY_S = 300.0
"""A killed engine forgets what it learned since the last file."""
MOST_BYTES = 64 << 20
MOST_FILES = 64
STALE_S = 7 * 86_400.0
"""So much older than the newest file, one is of a rank that is no more."""
HEADER = {"kvsteward": "returns", "version": 1, "bins": [BINS, FIRST_BIN_S, BINS_PER_OCTAVE]}


class Learned:
    """`path` None: nothing is read or written. `rank`: of the data-parallel engine, 0 where there is one alone."""

    def __init__(self, path: Path | None, now_s: float, rank: int = 0) -> None:
        self._shared, self._saved_s = path, now_s
        self._path = file_of(path, rank) if path is not None else None
        self._writing: threading.Thread | None = None

    def returns(self, max_sessions: int) -> Returns:
        """With what the files say that can be used, if there are any."""
        fresh = Returns(max_sessions=max_sessions)
        if self._shared is None:
            return fresh
        found: list[Sequence[Mapping[str, Any]]] = []
        for path in _files(self._shared):
            one = Returns()
            try:
                one.take(_read(path))
            except (OSError, ValueError) as error:  # a JSONDecodeError is a ValueError
                log.warning("kvsteward: %s is not used: %s", path, error)
            else:
                found.append(one.rows())
        if found:
            fresh.take(pooled(found))
            log.info("kvsteward: begins with what %d files of %s say", len(found), self._shared)
        return fresh

    def save(self, returns: Returns, now_s: float) -> None:
        """Writes beside the engine, at most every `EVERY_S` seconds."""
        if self._path is None or now_s - self._saved_s < EVERY_S or (self._writing and self._writing.is_alive()):
            return
        self._saved_s = now_s
        # A daemon: an engine that has to go does not wait for it, and half a file is never seen.
        self._writing = threading.Thread(target=_write, args=(self._path, returns.rows()), daemon=True)
        self._writing.start()

    def close(self, returns: Returns | None) -> None:
        """Writes now, once the thread is done. `returns` None: there is nothing to be trusted."""
        if self._writing:
            self._writing.join()
        if self._path is not None and returns is not None:
            _write(self._path, returns.rows())


def file_of(path: Path, rank: int) -> Path:
    """Where a rank writes: the first one at `path` itself, as an engine alone."""
    return path.with_name(f"{path.name}.rank{rank}") if rank else path


def _files(path: Path) -> list[Path]:
    """Those of all ranks that are not too old."""
    try:
        names = [name for name in os.listdir(path.parent) if _is_rank_of(path.name, name)]  # noqa: PTH208
        ages = {path.with_name(name): path.with_name(name).stat().st_mtime for name in names}
    except FileNotFoundError:  # no folder yet
        return []
    except OSError as error:
        log.warning("kvsteward: what was learned cannot be looked for beside %s: %s", path, error)
        return []
    newest = sorted(ages, key=lambda one: (-ages[one], one.name))[:MOST_FILES]
    return sorted(one for one in newest if ages[one] >= ages[newest[0]] - STALE_S)


def _is_rank_of(name: str, found: str) -> bool:
    rank = found.removeprefix(f"{name}.rank")
    return found == name or (rank != found and rank.isdigit())


def _read(path: Path) -> list[Mapping[str, Any]]:
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"it has {size} bytes, {MOST_BYTES} are the most")
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()] or [None]
    if header != HEADER:
        raise ValueError(f"it does not begin with {json.dumps(HEADER)}")
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a row is an object")
    return rows


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")  # other engines may have been given the same path
    try:
        with fresh.open("w") as out:
            for row in (HEADER, *rows):
                out.write(json.dumps(row) + "\n")
        fresh.replace(path)
    except OSError as error:
        log.warning("kvsteward: what was learned could not be written to %s: %s", path, error)
        fresh.unlink(missing_ok=True)

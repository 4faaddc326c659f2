"""What was learned of return times outlives the engine: a file that one process writes and the next one begins with.

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

from kvsteward.policy.returns import BINS, BINS_PER_OCTAVE, FIRST_BIN_S, Returns

log = logging.getLogger("vllm.kvsteward")

EVERY_S = 300.0
"""A killed engine forgets what it learned since the last file."""
MOST_BYTES = 64 << 20
HEADER = {"kvsteward": "returns", "version": 1, "bins": [BINS, FIRST_BIN_S, BINS_PER_OCTAVE]}


class Learned:
    """`path` None: nothing is read or written."""

    def __init__(self, path: Path | None, now_s: float) -> None:
        self._path, self._saved_s = path, now_s
        self._writing: threading.Thread | None = None

    def returns(self, max_sessions: int) -> Returns:
        """With what the file says, if there is one that can be used."""
        fresh = Returns(max_sessions=max_sessions)
        if self._path is None or not self._path.exists():
            return fresh
        try:
            rows = _read(self._path)
            fresh.take(rows)
        except (OSError, ValueError) as error:  # a JSONDecodeError is a ValueError
            log.warning("kvsteward: %s is not used, learning begins anew: %s", self._path, error)
            return Returns(max_sessions=max_sessions)
        log.info("kvsteward: begins with %d learned rows of %s", len(rows), self._path)
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
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")  # data-parallel engines may share a path
    try:
        with fresh.open("w") as out:
            for row in (HEADER, *rows):
                out.write(json.dumps(row) + "\n")
        fresh.replace(path)
    except OSError as error:
        log.warning("kvsteward: what was learned could not be written to %s: %s", path, error)
        fresh.unlink(missing_ok=True)

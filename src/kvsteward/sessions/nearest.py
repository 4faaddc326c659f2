"""Vectors as bytes, and which of many is nearest: the only arithmetic on vectors, by numpy.

A vector is kept with length 1 in half precision: its error, a two-thousandth, is far below what tells two texts apart,
and the file is half as long. Nothing cleverer than comparing with each vector is needed: a session has some thousands.
(sqlite-vec would do it inside SQLite, but not every build of Python lets SQLite load extensions.)

Knows no storage. Invariant: whatever lies in a row, a search returns at most `limit` finite cosines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from kvsteward.sessions.vectors import Near

_HALF = np.dtype("<f2")
HALF_BYTES = _HALF.itemsize
_ROWS = 1_024


def packed(vector: Sequence[float]) -> bytes:
    """A vector of any length but 0 as 2 bytes for each dimension. Raises ValueError for one that is 0 or not finite."""
    return _unit(vector).astype(_HALF).tobytes()


def nearest(rows: Iterable[tuple[str, bytes]], vector: Sequence[float], limit: int) -> list[Near]:
    """The best of `rows` (entry, packed vector), each entry once. Of equals the first row wins."""
    asked = _unit(vector)
    size = len(asked) * _HALF.itemsize
    best: dict[str, float] = {}
    rows = iter(rows)
    while block := list(islice(rows, _ROWS)):
        block = [row for row in block if len(row[1]) == size]
        held = np.frombuffer(b"".join(data for _, data in block), _HALF).reshape(len(block), len(asked))
        cosines = np.nan_to_num(held.astype(np.float32) @ asked, nan=-1.0, posinf=-1.0, neginf=-1.0)
        for (hash_, _), cosine in zip(block, cosines.tolist(), strict=True):
            if cosine > best.get(hash_, -2.0):
                best[hash_] = cosine
    order = sorted(best, key=lambda hash_: -best[hash_])
    return [Near(hash_, best[hash_]) for hash_ in order[: max(limit, 0)]]


def _unit(vector: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    wide = np.asarray(vector, np.float64)
    length = float(np.linalg.norm(wide))
    if not np.isfinite(length) or length == 0.0:
        raise ValueError("a vector must be finite and not 0")
    unit: np.ndarray[tuple[int], np.dtype[np.float32]] = (wide / length).astype(np.float32)
    return unit

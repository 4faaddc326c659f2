"""One copy of a block in memory that lets other threads run meanwhile.

An assignment to a slice of a memoryview holds the interpreter's lock: at 2 MiB a thread that sends another block stands
still for 0.2 ms, and may wait 5 ms until it gets the lock back. A call through `ctypes` gives it up.

Invariant: the same bytes arrive as by an assignment, of any size, from memory of any kind.
"""

from __future__ import annotations

import ctypes

SMALL_BYTES = 64 << 10
"""Up to here the call costs more than it frees."""


def copy(to: memoryview, source: memoryview) -> None:
    """`source` to `to`, both of bytes and of one size; else raises ValueError."""
    size_bytes = to.nbytes
    if size_bytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes for {size_bytes}")
    if size_bytes <= SMALL_BYTES or not (to.c_contiguous and source.c_contiguous):
        to[:] = source
    elif not source.readonly:
        ctypes.memmove(_address(to), _address(source), size_bytes)
    elif isinstance(source.obj, bytes) and len(source.obj) == size_bytes:
        ctypes.memmove(_address(to), source.obj, size_bytes)
    else:  # where read-only memory lies is not told
        to[:] = source


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

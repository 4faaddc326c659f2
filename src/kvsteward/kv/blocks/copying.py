"""Copies of a block in memory that let other threads run meanwhile.

An assignment to a slice of a memoryview holds the interpreter's lock: at 2 MiB a thread that sends another block stands
still for 0.2 ms, and may wait 5 ms until it gets the lock back. A call through `ctypes` gives it up.

Invariant: the same bytes arrive as by an assignment, of any size, from memory of any kind.
"""

from __future__ import annotations

import ctypes

from kvsteward.kv.blocks.record import Crc

SMALL_BYTES = 64 << 10
"""Up to here the call costs more than it frees."""
PIECE_BYTES = 256 << 10
"""Fits into the cache of a core, so that a checksum of what was just copied does not wait for memory."""


def copy(to: memoryview, source: memoryview) -> None:
    """`source` to `to`, both of bytes and of one size; else raises ValueError."""
    _check(to, source)
    addresses = _addresses(to, source)
    if addresses is None:
        to[:] = source
    else:
        ctypes.memmove(*addresses, to.nbytes)


def copy_and_sum(to: memoryview, source: memoryview, crc: Crc) -> int:
    """`copy`, and the checksum of the bytes, piece by piece, while each is in the cache."""
    _check(to, source)
    addresses, value, size_bytes = _addresses(to, source), 0, to.nbytes
    for start in range(0, size_bytes, PIECE_BYTES):
        end = min(start + PIECE_BYTES, size_bytes)
        if addresses is None:
            to[start:end] = source[start:end]
        else:
            ctypes.memmove(addresses[0] + start, addresses[1] + start, end - start)
        value = crc(to[start:end], value)
    return value


def _check(to: memoryview, source: memoryview) -> None:
    if to.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes for {to.nbytes}")


def _addresses(to: memoryview, source: memoryview) -> tuple[int, int] | None:
    """None where one of them has holes, the call is not worth it, or it is not told where read-only memory lies."""
    if to.nbytes <= SMALL_BYTES or not (to.c_contiguous and source.c_contiguous):
        return None
    if not source.readonly:
        return _address(to), ctypes.addressof(ctypes.c_char.from_buffer(source))
    if isinstance(source.obj, bytes) and len(source.obj) == source.nbytes:
        found = ctypes.cast(ctypes.c_char_p(source.obj), ctypes.c_void_p).value
        return None if found is None else (_address(to), found)
    return None


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

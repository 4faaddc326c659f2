"""One copy, from memory of each kind and of sizes on both sides of the bound."""

from __future__ import annotations

import mmap
import threading
import zlib

import pytest

from kvsteward.kv.blocks.copying import PIECE_BYTES, SMALL_BYTES, copy, copy_and_sum

SIZES = (0, 1, SMALL_BYTES, SMALL_BYTES + 1, PIECE_BYTES + 1, 1 << 20)


def memory(kind: str, data: bytes) -> memoryview:
    if kind == "bytes":
        return memoryview(data)
    if kind == "part of bytes":
        return memoryview(b"x" + data + b"y")[1:-1]
    if kind == "read-only bytearray":
        return memoryview(bytearray(data)).toreadonly()
    if kind == "every other byte":
        doubled = bytearray(2 * len(data))
        doubled[::2] = data
        return memoryview(doubled)[::2]
    if kind == "mapped":
        area = mmap.mmap(-1, len(data) + 4096)
        area[100 : 100 + len(data)] = data
        return memoryview(area)[100 : 100 + len(data)]
    return memoryview(bytearray(data))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "kind", ["bytes", "part of bytes", "read-only bytearray", "every other byte", "mapped", "bytearray"]
)
def test_every_byte_arrives_and_none_beside_it(kind, size):
    data = bytes(n * 31 % 251 for n in range(size))
    around = bytearray(b"\xaa" * (size + 2))
    copy(memoryview(around)[1 : size + 1], memory(kind, data))
    assert around == b"\xaa" + data + b"\xaa"
    around[1:-1] = bytes(size)
    assert copy_and_sum(memoryview(around)[1 : size + 1], memory(kind, data), zlib.crc32) == zlib.crc32(data)
    assert around == b"\xaa" + data + b"\xaa"


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_another_size_is_refused_before_a_byte_is_copied(size):
    to = bytearray(size)
    for made in (copy, lambda a, b: copy_and_sum(a, b, zlib.crc32)):
        with pytest.raises(ValueError, match="bytes for"):
            made(memoryview(to), memoryview(b"\1" * (size + 1)))
    assert not any(to)


def test_memory_that_may_not_be_written_is_refused():
    with pytest.raises(TypeError):
        copy(memoryview(bytes(1 << 20)), memoryview(bytes(1 << 20)))


def test_copies_of_several_threads_do_not_mix():
    sources = [bytes([n]) * (1 << 20) for n in range(4)]
    rooms = [bytearray(1 << 20) for _ in sources]

    def work(n: int) -> None:
        for _ in range(20):
            copy(memoryview(rooms[n]), memoryview(sources[n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rooms == sources

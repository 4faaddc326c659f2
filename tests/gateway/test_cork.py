"""The cork: bytes leave in order, together, and soon."""

from __future__ import annotations

import asyncio

from kvsteward.gateway.cork import Cork
from kvsteward.gateway.ids import Ids


class Wire:
    """A transport that remembers each write."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> str:
        return name


def corked() -> tuple[Cork, Wire]:
    wire = Wire()
    return Cork(wire, asyncio.get_running_loop()), wire


async def test_writes_of_one_loop_turn_leave_together_in_the_next():
    cork, wire = corked()
    cork.write(b"head ")
    cork.write(b"body")
    assert wire.sent == []
    await asyncio.sleep(0)
    assert wire.sent == [b"head body"]
    cork.write(b"later")
    await asyncio.sleep(0)
    assert wire.sent == [b"head body", b"later"]


async def test_a_flush_sends_at_once_and_only_once():
    cork, wire = corked()
    cork.write(b"a")
    cork.flush()
    assert wire.sent == [b"a"]
    await asyncio.sleep(0)
    assert wire.sent == [b"a"]


async def test_much_is_not_held():
    cork, wire = corked()
    for _ in range(3):
        cork.write(b"x" * 40_000)
    assert [len(data) for data in wire.sent] == [80_000]


async def test_closing_sends_what_is_held_and_a_lost_connection_drops_it():
    cork, wire = corked()
    cork.write(b"last")
    cork.close()
    assert (wire.sent, wire.closed, cork.is_closing()) == ([b"last"], True, True)
    cork.write(b"too late")
    await asyncio.sleep(0)
    assert wire.sent == [b"last"]


async def test_all_else_is_the_transports_own():
    cork, _ = corked()
    assert cork.get_extra_info("peername") == "peername"


def test_ids_are_32_hex_digits_and_never_come_twice():
    ids = Ids()
    made = [ids.new() for _ in range(1_000)]  # several blocks
    assert len(set(made)) == 1_000
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in made)

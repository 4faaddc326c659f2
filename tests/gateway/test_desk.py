"""The desk alone: its thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvsteward.errors import StoreError
from kvsteward.gateway.desk import Desk
from kvsteward.gateway.settings import Settings
from kvsteward.sessions import MemoryStore


class Watched(MemoryStore):
    """Says when it was closed."""

    def __init__(self, problem: Exception | None = None) -> None:
        super().__init__()
        self.closed, self._problem = threading.Event(), problem

    def close(self) -> None:
        self.closed.set()
        if self._problem:
            raise self._problem


async def test_the_loop_runs_on_while_the_desk_closes_behind_a_slow_call():
    store, let_go = Watched(), threading.Event()
    desk = Desk(store, Settings(), time.time)
    closing = asyncio.create_task(desk.close())
    await asyncio.sleep(0)  # the store's close is first on the thread
    late = asyncio.create_task(desk.call(let_go.wait, 10.0))
    assert await asyncio.to_thread(store.closed.wait, 10.0)
    for _ in range(20):  # had the loop to wait for the thread, nobody could let it go
        await asyncio.sleep(0.001)
    assert not closing.done()
    let_go.set()
    await closing
    assert await late is True


async def test_the_thread_ends_where_the_store_cannot_be_closed():
    desk = Desk(Watched(StoreError("the disk is full")), Settings(), time.time)
    thread = await desk.call(threading.current_thread)
    with pytest.raises(StoreError, match="disk is full"):
        await desk.close()
    assert not thread.is_alive()

"""The gateway under demonstration: `kvsteward serve` in a child process.

Knows the command line and the line that it prints, no code of the gateway's. Invariant: the child ends with the block
that started it.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvsteward.errors import EngineError, EngineTimeoutError

_START_LIMIT_S = 180.0
_STOP_LIMIT_S = 15.0
_POLL_S = 0.1
_LINE = re.compile(r"listens on (http://\S+)")


@dataclass(frozen=True, slots=True)
class Served:
    """A running gateway."""

    url: str
    budget_tokens: int


@asynccontextmanager
async def served(engine: str, budget_tokens: int, folder: Path) -> AsyncIterator[Served]:
    """Starts a gateway with one session's budget. `folder` takes its log. Raises EngineError with the end of what it
    printed, if it does not start."""
    words = ["--engine", engine, "--port", "0", "--store", str(folder / "sessions.db"), "--budget", str(budget_tokens)]
    if engine == "embedded":
        words += ["--ctx", str(budget_tokens), "--slots", "1"]
    log_path = folder / "serve.log"
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvsteward", "serve", *words), stdout=asyncio.subprocess.PIPE, stderr=log
        )
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                url = await _address(process, log_path)
                budget = await _healthy(url, process, log_path)
            yield Served(url, budget)
        except TimeoutError as error:
            raise EngineTimeoutError(f"the gateway did not start in {_START_LIMIT_S:.0f} s") from error
        finally:
            await _stop(process)


async def _address(process: asyncio.subprocess.Process, log_path: Path) -> str:
    assert process.stdout is not None  # a pipe
    while line := await process.stdout.readline():
        match = _LINE.search(line.decode(errors="replace"))
        if match:
            return match.group(1)
    raise _failed(log_path)


async def _healthy(url: str, process: asyncio.subprocess.Process, log_path: Path) -> int:
    """Waits until the engine answers; the budget that the gateway then keeps."""
    async with aiohttp.ClientSession() as http:
        while process.returncode is None:
            try:
                async with http.get(f"{url}/health", timeout=aiohttp.ClientTimeout(5)) as reply:
                    if reply.status == 200:
                        return int((await reply.json())["budget_tokens"])
            except (aiohttp.ClientError, TimeoutError):
                pass  # it does not listen yet
            await asyncio.sleep(_POLL_S)
    raise _failed(log_path)


def _failed(log_path: Path) -> EngineError:
    tail = log_path.read_text(errors="replace").splitlines()[-8:]
    return EngineError("the gateway for the demonstration did not start\n" + "\n".join(tail))


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_LIMIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()

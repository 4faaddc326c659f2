"""What may go wrong around real vLLMs with tiers (marked `vllm`; needs `make setup-vllm`).

C has the smallest pool that vLLM allows, host memory for 60 blocks, a disk that is full and the Valkey of A and B; its
requests wait for blocks for 2 s at most. Whatever happens below, its turns are those of an engine without a store, and
no step waits. Then sessions go from engine to engine behind a gateway, and at the end C is killed.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kv_proxy import Trap
from typer.testing import CliRunner
from vllm_world import BLOCK_TOKENS, PYTHON, SLOT_BYTES, Engine, World, engine, whole

from kvsteward.cli import app

POOL = 48
WITHIN_S = 2.0
DISK_BYTES = 4 << 20
WORDS = 330
"""660 tokens, 21 blocks: two sessions fill the pool."""
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def with_full_disk(folder: Path) -> tuple[Path, Path]:
    """A Python that sees a file system of its own, for five blocks, at the second path."""
    if subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system in a namespace")
    disk, python = folder / "disk", folder / "python"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size={DISK_BYTES} tmpfs "{disk}" && exec "{PYTHON}" "$@"'
    python.write_text(f"#!/bin/sh\nexec unshare --user --map-root-user --mount sh -c '{mount}' sh \"$@\"\n")
    python.chmod(0o755)
    return python, disk


@pytest.fixture(scope="module")
def c(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("faults")
    python, disk = with_full_disk(folder)
    options = {"host_bytes": 60 * SLOT_BYTES, "disk_path": str(disk), "disk_gib": 1, "stage_within_s": WITHIN_S}
    options |= {"valkey_url": world.valkey.proxy.url}
    with engine(
        world, folder, "c", options, blocks=POOL, context_tokens=(POOL - 1) * BLOCK_TOKENS, python=python
    ) as one:
        yield one


def push_out(c: Engine, name: str) -> None:
    """Until nothing of others is left in pool and host memory."""
    for number in range(3):
        c.goes_on(f"{name}{number}", WORDS * 2 // 3)


def check_waits(c: Engine) -> Any:
    """No step waited for a tier. Returns the figures."""
    figures = c.figures()
    waits = figures["longest_waits_s"]
    assert waits["step"] < WITHIN_S
    assert waits["copy"] < WITHIN_S
    c.listed()
    found = {re.search(r'longest_wait_seconds\{.*kind="(\w+)"', name): wait_s for name, wait_s in c.metrics().items()}
    shown = {match[1]: wait_s for match, wait_s in found.items() if match}
    assert shown.keys() == waits.keys()
    assert all(shown[kind] >= wait_s for kind, wait_s in waits.items())
    assert figures["tiers"]["given_up"] is False
    assert figures["tiers"]["moves"]["lost"] == 0
    return figures


def tier(figures: Any, name: str) -> Any:
    return next(one for one in figures["tiers"]["store"]["tiers"] if one["name"] == name)


@pytest.mark.soak
def test_the_smallest_pool_with_every_session_protected_and_a_full_disk(world, c):
    """Three at a time want more than there is; all sessions' blocks are protected, and give way."""
    sessions = ["p", "q", "u", "v"]
    for words in (WORDS, WORDS + 40):
        with ThreadPoolExecutor(3) as threads:
            said = list(threads.map(lambda session, n=words: c.goes_on(session, n, {"ttl_s": 600}), sessions))
    world.valkey.settle()
    for session, was in zip(sessions, said, strict=True):
        alone = world.b.alone(session, WORDS + 40)
        again = c.goes_on(session, WORDS + 40, {"ttl_s": 600})
        assert {was.text, again.text} == {alone.text}
        assert again.cached_tokens > 0
    figures = check_waits(c)
    c.check_free(figures)
    disk = tier(figures, "disk")
    assert disk["refused"]["full"] > 0
    assert disk["used_bytes"] <= DISK_BYTES
    assert figures["tiers"]["store"]["staged"]["valkey"] > 0


@pytest.mark.soak
def test_a_valkey_that_is_200_ms_away_costs_time_and_nothing_else(world, c):
    """Loading may be worth it or not; what is stored arrives."""
    alone = world.b.alone("l", WORDS)
    stored = tier(c.figures(), "valkey")["written_blocks"]
    world.valkey.proxy.late_s = 0.2
    c.goes_on("l", WORDS)
    push_out(c, "m")
    world.valkey.settle()
    back = c.goes_on("l", WORDS)
    world.valkey.proxy.late_s = 0.0
    assert back.text == alone.text
    assert tier(check_waits(c), "valkey")["written_blocks"] > stored


@pytest.mark.soak
def test_a_valkey_that_hangs_is_left_alone(world, c):
    c.goes_on("h", WORDS)
    push_out(c, "i")
    world.valkey.settle()
    world.valkey.proxy.late_s = 20.0
    said = [c.goes_on("h", WORDS), c.goes_on("j", WORDS)]
    world.valkey.proxy.late_s = 0.0
    assert [one.text for one in said] == [world.b.alone(session, WORDS).text for session in "hj"]
    check_waits(c)


@pytest.mark.soak
@pytest.mark.parametrize("while_", ["loading", "storing"])
def test_valkey_is_killed_in_the_middle(world, c, while_):
    """Exactly after the first of several blocks has passed; after it is back, blocks are stored again."""
    with world.valkey.client() as client:
        client.flushall()
    world.valkey.until_stored(c)
    session, proxy = {"loading": "y", "storing": "s"}[while_], world.valkey.proxy
    trap = Trap(SLOT_BYTES * 5 // 4, world.valkey.kill)
    if while_ == "loading":
        c.goes_on(session, WORDS)
        push_out(c, "o")
        world.valkey.settle()
        proxy.answers = trap
    else:
        proxy.asks = trap
    try:
        said = c.goes_on(session, WORDS)
        assert trap.sprung.wait(20)
        after = c.goes_on(session, WORDS + 10)
    finally:
        proxy.asks = proxy.answers = None
        world.valkey.start()
    assert said.text == world.b.alone(session, WORDS).text
    assert after.cached_tokens >= whole(said.prompt_tokens) - BLOCK_TOKENS, "its own pool has it"
    world.valkey.until_stored(c)
    check_waits(c)


# behind a gateway


def kvsteward(*words: str) -> str:
    """What the command prints. Raises what it raises."""
    return str(CliRunner().invoke(app, words, catch_exceptions=False).stdout)


class Conversation:
    """A session at a gateway, whose history the client keeps."""

    def __init__(self, gateway: Any, session: str) -> None:
        self.gateway, self.session = gateway, session
        self.history: list[dict[str, str]] = []
        self.cached_tokens = self.prompt_tokens = 0

    def say(self, words: int) -> str:
        said = " ".join(f"{self.session}{len(self.history)}{i % 10}" for i in range(words))
        self.history.append({"role": "user", "content": said})
        answer = self.gateway.chat(self.history, session=self.session, max_tokens=8, temperature=0, ignore_eos=True)
        usage = answer["usage"]
        self.prompt_tokens = usage["prompt_tokens"]
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        content = str(answer["choices"][0]["message"]["content"])
        self.history.append({"role": "assistant", "content": content})
        return content

    def engine(self) -> str:
        return str(self.gateway.get(f"/v1/sessions/{self.session}")["engine"])

    def logged(self) -> list[str]:
        """The texts of the log."""
        return [entry["message"]["content"] for entry in self.gateway.get(f"/v1/sessions/{self.session}/log")["data"]]


def brought(one: Engine) -> tuple[int, int]:
    """Tokens that were loaded into the pool, and blocks that came from Valkey before."""
    tiers = one.figures()["tiers"]
    return tiers["moves"]["loaded_tokens"], tiers["store"]["staged"].get("valkey", 0)


def test_a_session_is_moved_and_drained_to_the_other_replica(world, serve):
    """Each time the next turn's KV comes from Valkey, and the answer is the one of the engine that it left."""
    gateway = serve("--engine", f"vllm={world.a.url}", "--engine", f"vllm={world.b.url}")
    at, talk = ("--gateway", gateway.url), Conversation(gateway, "g")
    talk.say(400)
    here, there = (world.a, world.b) if talk.engine() == world.a.url else (world.b, world.a)
    for way in ("move", "drain"):
        world.valkey.settle()
        tokens, blocks = brought(there)
        if way == "move":
            assert kvsteward("sessions", "move", "g", "--to", there.url, *at) == f"g goes on at {there.url}\n"
        else:
            assert "is draining" in kvsteward("engines", "drain", here.url, *at)
        stored_tokens = talk.prompt_tokens
        answer = talk.say(40)
        assert talk.engine() == there.url
        assert talk.cached_tokens >= whole(stored_tokens)
        assert brought(there) > (tokens + stored_tokens // 2, blocks)
        shown = gateway.get("/v1/sessions/g/view")["messages"]
        stayed = here.chat("g", shown[:-1])
        assert (stayed.text, stayed.prompt_tokens) == (answer, talk.prompt_tokens)
        here, there = there, here
        there.turn("x", 1400)  # nothing of it is left there
    assert talk.logged() == [message["content"] for message in talk.history]


@pytest.mark.soak
def test_a_replica_is_killed_and_its_sessions_go_on_elsewhere(world, c, serve):
    """In the middle of a turn; all that was said is in the log, and the other one begins with the stored blocks."""
    b = world.b
    gateway = serve("--engine", f"vllm={c.url}", "--engine", f"vllm={b.url}")
    talk = Conversation(gateway, "k")
    kvsteward("engines", "drain", b.url, "--gateway", gateway.url)
    talk.say(300)
    talk.say(30)
    stored_tokens = talk.prompt_tokens
    assert talk.engine() == c.url
    kvsteward("engines", "undrain", b.url, "--gateway", gateway.url)
    world.valkey.settle()
    before = brought(b)
    body = {"messages": [*talk.history, {"role": "user", "content": "and"}], "stream": True, "max_tokens": 300}
    request = urllib.request.Request(f"{gateway.url}/v1/chat/completions", method="POST")
    request.add_header("Content-Type", "application/json")
    request.add_header("X-Session-ID", "k")
    with urllib.request.urlopen(request, json.dumps(body | {"ignore_eos": True}).encode(), timeout=60) as response:
        assert response.readline().startswith(b"data: {")
        killer = threading.Timer(0.5, c.kill)
        killer.start()
        rest = response.read()
        killer.join()
    assert b'"error"' in rest
    assert talk.logged()[:4] == [message["content"] for message in talk.history]
    talk.say(20)
    assert talk.engine() == b.url
    assert talk.cached_tokens >= whole(stored_tokens)
    tokens, blocks = brought(b)
    assert tokens > before[0]
    assert blocks > before[1]
    assert talk.logged()[:4] + talk.logged()[-2:] == [message["content"] for message in talk.history]

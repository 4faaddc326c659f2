"""`kvsteward engines` and `kvsteward sessions move` on a running gateway with two engines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from kvsteward.cli import app
from kvsteward.engines.scripted import ScriptedEngine, ScriptedOptions
from kvsteward.engines.scripted_server import running_scripted
from kvsteward.errors import ConfigError, KVStewardError


@pytest.fixture
def two_engines() -> Iterator[list[str]]:
    """The URLs of two engines, each of which answers with its name."""
    urls: list[str] = []
    up, over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        engines = [ScriptedEngine(ScriptedOptions(), answers=[name]) for name in ("one", "two")]
        async with running_scripted(engines[0]) as first, running_scripted(engines[1]) as second:
            urls.extend((first, second))
            up.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert up.wait(20)
    yield urls
    loop.call_soon_threadsafe(over.set)
    thread.join(20)
    loop.close()


def kvsteward(*words: str) -> str:
    """What the command prints. Raises what it raises."""
    return str(CliRunner().invoke(app, words, catch_exceptions=False).stdout)


def test_a_session_is_moved_and_an_engine_drained(serve, two_engines):
    one, two = two_engines
    gateway = serve("--engine", one, "--engine", f"vllm={two}/v1")
    at = ("--gateway", gateway.url)

    def said() -> str:
        answer = gateway.chat([{"role": "user", "content": "hi"}], session="s")
        return str(answer["choices"][0]["message"]["content"])

    names = {"one": one, "two": two}
    first = said()
    other = "two" if first == "one" else "one"
    assert kvsteward("sessions", "move", "s", "--to", names[other], *at) == f"s goes on at {names[other]}\n"
    assert said() == other
    drained = kvsteward("engines", "drain", names[other], *at)
    assert drained == f"{names[other]} is draining, 0 turns are on the way\n"
    assert said() == first
    listed = json.loads(kvsteward("engines", "list", "--json", *at))
    assert {row["engine"]: (row["state"], row["sessions"]) for row in listed} == {
        names[first]: ("up", 1),
        names[other]: ("draining", 0),
    }
    assert "draining" in kvsteward("engines", "list", *at)
    with pytest.raises(KVStewardError, match="is being drained") as refused:
        kvsteward("sessions", "move", "s", "--to", names[other], *at)
    assert "undrain" in refused.value.hint
    assert "is up" in kvsteward("engines", "undrain", names[other], *at)
    with pytest.raises(KVStewardError, match="no engine 'http://nowhere:9'") as unknown:
        kvsteward("sessions", "move", "s", "--to", "http://nowhere:9", *at)
    assert unknown.value.hint == f"The engines are {one}, {two}."


def test_wrong_engines_and_hints_are_refused():
    with pytest.raises(ConfigError, match="given twice"):
        kvsteward("serve", "--engine", "http://a:1", "--engine", "vllm=http://a:1/v1", "--store", "memory:")
    with pytest.raises(ConfigError, match="--hints must be one of auto, on, off"):
        kvsteward("serve", "--engine", "http://a:1", "--hints", "maybe", "--store", "memory:")


def test_without_a_gateway_the_command_says_so():
    with pytest.raises(KVStewardError, match=r"no gateway answers at http://127\.0\.0\.1:9") as error:
        kvsteward("engines", "list", "--gateway", "http://127.0.0.1:9")
    assert "--gateway" in error.value.hint

"""The demonstration itself: one script, played twice against one gateway with one budget, and judged.

Knows the gateway by its HTTP address. Invariant: what is reported is what the engine reported or what was read from
the gateway's own account; a turn that did not complete is counted as an interruption.
"""

from __future__ import annotations

import re
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from kvsteward.errors import ConfigError
from kvsteward.lab.demo import facts as own_facts
from kvsteward.lab.demo.base import Message, Script
from kvsteward.lab.demo.client import Client
from kvsteward.lab.demo.outcome import Facts, Outcome, Pass, TurnCost
from kvsteward.lab.demo.recorded import recorded_session
from kvsteward.lab.demo.scripted import scripted_session
from kvsteward.lab.demo.server import served

Progress = Callable[[str, int], None]
"""Told the mode and the number of turns that are done."""
_HASH = re.compile(r"(?<![0-9a-f])[0-9a-f]{8,64}(?![0-9a-f])")
_MAX_HASHES = 400


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `kvsteward demo` was told."""

    turns: int = 120
    budget_tokens: int = 4_096
    data: Path | None = None
    engine: str = "embedded"
    answer_tokens: int = 24
    passthrough: bool = True


@dataclass(frozen=True, slots=True)
class _Judge:
    """A definition of facts: ours, or the one that lies beside the recordings."""

    facts: Callable[..., Mapping[str, str]]
    has: Callable[[str, str], bool]
    view: Callable[..., str]


async def run_demo(options: DemoOptions, progress: Progress) -> Outcome:
    """Plays a session in both modes. Raises ConfigError for unusable options, EngineError if the gateway or its engine
    does not start."""
    if options.turns < 1:
        raise ConfigError(f"a session has at least one turn, not {options.turns}", param="turns")
    with tempfile.TemporaryDirectory(prefix="kvsteward-demo-") as name:
        folder = Path(name)
        script = _script(options, folder)
        async with (
            served(options.engine, options.budget_tokens, folder) as gateway,
            aiohttp.ClientSession() as http,
        ):
            run_id = uuid.uuid4().hex[:8]
            through = Pass()
            if options.passthrough:
                client = Client(http, gateway.url, f"demo-{run_id}-through", "passthrough")
                through = await _passed_through(client, script, options, progress)
            client = Client(http, gateway.url, f"demo-{run_id}", "managed")
            managed, facts = await _managed(client, script, _judge(options), options, progress)
            account = await client.view() if managed.completed else {}
            session = await client.session() if managed.completed else {}
    return Outcome(
        source=script.source,
        turns=len(script.turns),
        budget_tokens=gateway.budget_tokens,
        passthrough=through,
        managed=managed,
        compactions=sum(d["kind"] == "compact" for d in account.get("decisions", ())),
        log_tokens=int(account.get("log_tokens", 0)),
        again_tokens=int(session.get("tokens_prefilled_again", 0)),
        summaries=_summaries(account.get("decisions", ())),
        facts=facts,
    )


def _summaries(decisions: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """What became of the engine's summary, compaction by compaction."""
    judged = (d["payload"].get("judged") for d in decisions if d["kind"] == "compact")
    return dict(Counter(str(verdict["outcome"]) for verdict in judged if verdict))


def _script(options: DemoOptions, folder: Path) -> Script:
    if options.data is not None:
        return recorded_session(options.data, options.turns)
    workshop = folder / "workshop"
    workshop.mkdir()
    return scripted_session(workshop, options.turns)


def _judge(options: DemoOptions) -> _Judge:
    """The definition beside the recordings, where there is one."""
    own = _Judge(own_facts.facts, own_facts.has, own_facts.view)
    if options.data is None:
        return own
    path = options.data.resolve() / ".." / ".." / "tools" / "context_facts.py"
    spec = spec_from_file_location("kvsteward_demo_facts", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return own
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return _Judge(module.facts, module.has, module.view)


async def _passed_through(client: Client, script: Script, options: DemoOptions, progress: Progress) -> Pass:
    """Plays the script until the engine refuses."""
    done, started = Pass(), monotonic()
    history: list[Message] = []
    for number, turn in enumerate(script.turns, 1):
        history += turn.arrivals
        answer = await client.turn(history, script.tools, options.answer_tokens)
        progress("passthrough", number)
        if answer.error is not None:
            done.errors.append(answer.error)
            break
        done.completed.append(TurnCost(number, answer.usage, answer.ttft_s))
        history.append(turn.reply or _spoken(answer.text))
    done.wall_s = monotonic() - started
    return done


async def _managed(
    client: Client, script: Script, judge: _Judge, options: DemoOptions, progress: Progress
) -> tuple[Pass, Facts]:
    """Plays the whole script, whatever happens, and judges each view."""
    done, found, started = Pass(), Facts(), monotonic()
    history: list[Message] = []
    names = script.tool_names
    for number, turn in enumerate(script.turns, 1):
        history += turn.arrivals
        answer = await client.turn(history, script.tools, options.answer_tokens)
        progress("managed", number)
        if answer.error is not None:
            done.errors.append(f"turn {number}: {answer.error}")
        else:
            done.completed.append(TurnCost(number, answer.usage, answer.ttft_s))
            if turn.reply is not None:
                used = judge.facts([*history, turn.reply], len(history), names)
                await _probe(client, used, judge, found)
        history.append(turn.reply or _spoken(answer.text))
    done.wall_s = monotonic() - started
    return done, found


def _spoken(text: str) -> Message:
    return {"role": "assistant", "content": text or "(no words)"}


async def _probe(client: Client, used: Mapping[str, str], judge: _Judge, found: Facts) -> None:
    """Where each value is at this turn: in the view that the model was given, behind it, or nowhere."""
    if not used:
        return
    messages = (await client.view())["messages"]
    shown = judge.view(_asked(messages))
    for value, kind in used.items():
        if judge.has(shown, value):
            found.count(kind, "in_view")
        elif await _recallable(client, value, shown, judge):
            found.count(kind, "recallable")
        else:
            found.count(kind, "lost")


def _asked(messages: list[Message]) -> list[Message]:
    """The view without the answer that the engine has just given: it was not there when the turn was sent."""
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


async def _recallable(client: Client, value: str, shown: str, judge: _Judge) -> bool:
    if _holds(await client.log_has(value), value, judge):
        return True
    for digest in list(dict.fromkeys(_HASH.findall(shown)))[:_MAX_HASHES]:
        message = await client.item(digest)
        if message is not None and _holds([message], value, judge):
            return True
    return False


def _holds(messages: Iterable[Mapping[str, Any]], value: str, judge: _Judge) -> bool:
    return any(judge.has(judge.view([message]), value) for message in messages)

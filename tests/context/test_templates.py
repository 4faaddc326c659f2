"""Every view is one that chat templates accept: calls with their results, roles that alternate where they did before.

The strict rules are those of Mistral's, Gemma's and Llama's templates; the real engines render the same views.
"""

from __future__ import annotations

import json
import random
import urllib.request
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsteward.errors import ContextOverflowError

SYSTEM = {"role": "system", "content": "You are a clerk.\nToday's date: 2026-11-29"}
WORDS = ("order", "#W1234567", "must", "never", "row", "/srv/data/x.csv", "42", "yes", "I will", "done", "{", "|", "é")


def turns(rng: random.Random, count: int) -> list[list[dict[str, Any]]]:
    """An agent's conversation: each turn is what the client sends and what is answered, calls included."""
    made = []
    for number in range(count):
        asked = {"role": "user", "content": text(rng, 60)}
        if rng.random() < 0.1:
            asked["kvsteward"] = {"class": rng.choice(("plan", "fact", "trace"))}
        steps = [asked]
        for step in range(rng.randrange(3)):
            ids = [f"c{number}x{step}x{n}" for n in range(rng.choice((1, 1, 3)))]
            arguments = json.dumps({"q": text(rng, 4)})
            calls = [
                {"id": i, "type": "function", "function": {"name": "look_up", "arguments": arguments}} for i in ids
            ]
            steps.append({"role": "assistant", "content": "", "tool_calls": calls})
            steps += [{"role": "tool", "tool_call_id": i, "content": text(rng, rng.choice((5, 200)))} for i in ids]
        made.append([*steps, {"role": "assistant", "content": text(rng, 30)}])
    return made


def text(rng: random.Random, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, most + 1)))


def views(session: Any, rng: random.Random, budget: int, count: int) -> Any:
    """The view of each turn, compactions included."""
    chat = session(budget)
    chat.say(SYSTEM)
    for steps in turns(rng, count):
        waiting: list[dict[str, Any]] = []
        for message in steps:
            if message["role"] != "assistant":
                waiting.append(message)
                continue
            try:
                chat.say(*waiting)
            except ContextOverflowError:
                return  # the random session has marked more as plan than its budget holds
            yield list(chat.view.render())
            chat.answer(message)
            waiting = []


def objections(messages: list[dict[str, Any]]) -> list[str]:
    """What a strict template would object to."""
    found = []
    expected, waiting = "user", set[str]()
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "system":
            found += ["a system message behind others"] if index else []
        elif role == "tool":
            found += [] if message["tool_call_id"] in waiting else ["a result without its call"]
            waiting.discard(message["tool_call_id"])
        else:
            found += ["a call without its result"] if waiting else []
            after_tool = index and messages[index - 1]["role"] == "tool"
            if role != expected and not (after_tool and role == "assistant"):
                found.append(f"message {index} is of the {role}, after {messages[index - 1]['role']}")
            waiting = {call["id"] for call in message.get("tool_calls") or ()}
            expected = "assistant" if role == "user" or waiting else "user"
        found += [f"an unknown field in message {index}"] if set(message) - FIELDS else []
    return found


FIELDS = {"role", "content", "tool_calls", "tool_call_id"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), budget=st.sampled_from([700, 1500, 4000]))
def test_a_strict_template_accepts_every_view(session, seed, budget):
    for view in views(session, random.Random(seed), budget, 14):
        assert objections(view) == []


def test_the_rules_object_to_what_they_should():
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}
    user, result = {"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c1", "content": "y"}
    assert objections([SYSTEM, user, call, result]) == []
    assert objections([user, user])
    assert objections([user, call, user])
    assert objections([user, result])
    assert objections([user, SYSTEM])
    assert objections([{**user, "kvsteward": {"class": "plan"}}])


def test_the_engines_own_template_accepts_every_view(session, engine):
    """llama-server and vLLM render the views with the model's template, as for an answer."""
    rendered = 0
    for seed in range(3):
        for number, view in enumerate(views(session, random.Random(seed), 1500, 12)):
            if number % 3:
                continue  # each third is enough: a view differs from the last by its end
            path = "/apply-template" if engine.kind == "llama-server" else "/tokenize"
            answer = asked(engine.url + path, {"model": "smol", "messages": view, "tools": TOOLS})
            assert answer.get("prompt") or answer.get("count"), answer
            rendered += 1
    assert rendered >= 15


TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}},
    }
]


def asked(url: str, body: Any) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", "Authorization": "Bearer e2e"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())
    except urllib.request.HTTPError as error:
        with error:
            pytest.fail(f"the template refuses a view: {error.read()[:500]!r}")

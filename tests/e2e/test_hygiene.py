"""A clock in the system prompt, on a real engine: with hygiene the engine's own cache goes on hitting."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]

AGENT = "You are a clerk of a library. You know where each book stands and you answer in few words. " * 12


def talk(gateway: Any, session: str, turns: int = 4) -> list[float]:
    """The share of each prompt that the engine found in its cache."""
    history: list[Any] = []
    shares = []
    for turn in range(turns):
        system = {"role": "system", "content": f"Current time: 2026-11-29 18:0{turn}\n{AGENT}"}
        history.append({"role": "user", "content": f"Where is book number {turn}?"})
        answer = gateway.chat([system, *history], session, max_tokens=8, temperature=0)
        history.append(answer["choices"][0]["message"])
        usage = answer["usage"]
        shares.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    return shares


def test_the_engines_cache_holds_although_the_clock_runs(serve, engine, tmp_path):
    off = tmp_path / "off.yaml"
    off.write_text("hygiene: {enabled: false}\n")
    with_hygiene = talk(serve("--engine", engine.option), f"clock-{engine.kind}")
    without = talk(serve("--engine", engine.option, "--policy", str(off)), f"plain-{engine.kind}")
    block = 128 / 300  # vLLM's on the CPU, of a prompt of at least 300 tokens
    assert min(with_hygiene[1:]) > 1 - block
    assert max(without[1:]) < 0.2
    assert min(with_hygiene[1:]) > max(without[1:]) + 0.3

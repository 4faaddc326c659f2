"""Selective context through the gateway: who is asked, what it costs, and who is refused."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from kvsteward.context.marks import Policy
from kvsteward.engines.scripted import ScriptedEngine, ScriptedOptions
from kvsteward.errors import ConfigError, EngineError
from kvsteward.gateway.settings import Settings, Tenant, check_selective

ON = Settings(policy=Policy(selective=0.5))
DULL = "The water flows down to the sea as it always does, and people walk along it in the sun."
TELLING = "Pump seven of the old hall had failed because a heron nested in its inlet."
REPORT = " ".join([*[DULL] * 30, TELLING, *[DULL] * 30])
CALL = {"id": "c1", "type": "function", "function": {"name": "report", "arguments": "{}"}}
HISTORY = [
    {"role": "user", "content": "What failed?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": REPORT},
]


class Telling(ScriptedEngine):
    """An engine that is surprised by one sentence."""

    def __init__(self, fault=None, slow_s=0.0):
        super().__init__(ScriptedOptions())
        self.info = self._describe()
        self.prompts, self.fault, self.slow_s = [], fault, slow_s

    def _describe(self):
        return replace(super()._describe(), prompt_logprobs=True)

    async def prompt_logprobs(self, prompt, *, model, request_id):
        self.prompts.append(prompt)
        await asyncio.sleep(self.slow_s)
        if self.fault:
            raise self.fault
        spot = prompt.find(TELLING)
        inside = range(spot, spot + len(TELLING)) if spot >= 0 else range(0)
        words = re.finditer(r"\s*\S+|\s+", prompt)
        return [(m.group(), -7.0 if m.end() - 1 in inside else -1.0) for m in words]


async def shown(gateway):
    return (await gateway.get("/v1/sessions/s/view"))["messages"][2]["content"]


async def test_the_sentence_that_tells_most_is_shown_and_counted(start):
    engine = Telling()
    gateway = await start(engine=engine, settings=ON)
    assert (await gateway.chat(*HISTORY, session="s"))["status"] == 200
    text = await shown(gateway)
    assert TELLING in text
    assert "sentences that tell most; whole text:" in text
    assert all(prompt.startswith("What failed?") for prompt in engine.prompts)
    metrics = gateway.steward.telemetry
    assert metrics.selective_saved._value.get() > 800
    assert sum(bucket.get() for bucket in metrics.selective_time._buckets) == len(engine.prompts) >= 1
    before = len(engine.prompts)
    await gateway.chat(
        *HISTORY, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "And?"}, session="s"
    )
    assert len(engine.prompts) == before, "only on entry"
    gateway.steward.desk.forget("s")
    assert await shown(gateway) == text, "the log tells the same view again"


@pytest.mark.parametrize("fault", [EngineError("no"), None], ids=["refuses", "slow"])
async def test_an_engine_that_cannot_say_now_leaves_it_to_the_distillers(start, fault):
    engine = Telling(fault, slow_s=0.0 if fault else 5.0)
    gateway = await start(engine=engine, settings=Settings(policy=ON.policy, selective_timeout_s=0.05))
    async with asyncio.timeout(4):
        assert (await gateway.chat(*HISTORY, session="s"))["status"] == 200
    text = await shown(gateway)
    assert "prose" in text
    assert "whole text:" in text
    assert gateway.steward.fleet.first.gate.pool.running == 0


async def test_off_nobody_is_asked(start):
    engine = Telling()
    gateway = await start(engine=engine)
    await gateway.chat(*HISTORY, session="s")
    assert engine.prompts == []


@pytest.mark.parametrize(
    "settings", [ON, Settings(keys={"k": Tenant("a", policy=Policy(selective=0.3))})], ids=["deployment", "tenant"]
)
def test_an_engine_without_log_probabilities_is_refused_at_the_start(settings):
    with pytest.raises(ConfigError, match="log-probabilities") as refused:
        check_selective(settings, [Telling().info, ScriptedEngine().info])
    assert "vLLM" in refused.value.hint
    check_selective(settings, [Telling().info])
    check_selective(Settings(), [ScriptedEngine().info])

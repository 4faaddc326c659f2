"""What a real vLLM tells of a prompt's tokens."""

from __future__ import annotations

import pytest

from kvsteward.context.selective import Selected, select
from kvsteward.context.tokens import Estimator
from kvsteward.engines.http import HttpOptions
from kvsteward.engines.vllm import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DULL = "The sun rises in the east and sets in the west. "
TELLING = "Pump seven of the old hall had failed because a heron nested in its inlet. "
TEXT = DULL * 6 + TELLING + "Äpfel, 梨 and 🌊 are words too. " + DULL * 6


@pytest.fixture
async def engine(vllm_server):
    engine = VllmEngine(HttpOptions(url=vllm_server.url, probe_timeout_s=60))
    await engine.start()
    yield engine
    await engine.close()


async def test_log_probabilities_of_a_prompt(engine):
    assert engine.info.prompt_logprobs
    prompt = f"What failed?\n\n{TEXT}"
    pieces = await engine.prompt_logprobs(prompt, model="smol", request_id="score-1")
    assert pieces is not None
    assert pieces[0][1] is None
    assert all(logprob is not None and logprob <= 0.0 for _, logprob in pieces[1:])
    plain = "".join(piece for piece, _ in pieces).replace("\ufffd", "")
    assert plain.startswith("What failed?")
    assert "a heron nested" in plain
    again = await engine.prompt_logprobs(prompt, model="smol", request_id="score-2")
    assert [p for p, _ in again] == [p for p, _ in pieces]
    assert await engine.prompt_logprobs(prompt * 200, model="smol", request_id="score-3") is None, "over its context"


async def test_the_sentence_that_is_no_repetition_is_chosen(engine):
    questions = select(
        TEXT, question="What failed?", mentions=frozenset(), ratio=0.4, room_tokens=400, estimator=Estimator()
    )
    answer, found = None, None
    while True:
        try:
            question = questions.send(answer)
        except StopIteration as stop:
            found = stop.value
            break
        answer = await engine.prompt_logprobs(question.before + question.text, model="smol", request_id="score-4")
    assert isinstance(found, Selected)
    assert TELLING.strip() in found.text
    assert found.kept < found.sentences

"""The scripted engine: its budget is real, its queue is fair, its faults are the ones that were asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.engines.conftest import PLAIN, TOOLS, WITH_TOOL_RESULT, chat, events, read, usage

from kvsteward.engines.scripted import Answer, Fault, ScriptedEngine, ScriptedOptions, ToolCall
from kvsteward.engines.scripted_kv import BlockPool, Table
from kvsteward.engines.scripted_wire import tokens_of_prompt
from kvsteward.errors import ConfigError, EngineError, EngineUnavailableError


class ManualClock:
    """Time that a test moves: each sleep waits until `advance` has passed it."""

    def __init__(self) -> None:
        self.time = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        event = asyncio.Event()
        self._sleepers.append((self.time + seconds, event))
        await event.wait()

    async def advance(self, seconds: float) -> None:
        """Wakes who is due, in order of time, and lets them run."""
        end = self.time + seconds
        await settle()
        while due := sorted((s for s in self._sleepers if s[0] <= end), key=lambda s: s[0]):
            self._sleepers.remove(due[0])
            self.time = due[0][0]
            due[0][1].set()
            await settle()
        self.time = end


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def text_of(data: bytes) -> str:
    deltas = [event["choices"][0]["delta"] for event in events(data) if event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def filler(tokens: int, mark: str = "x") -> list[dict[str, Any]]:
    """A prompt of exactly `tokens` tokens: two marks and the rest text (4 characters a token)."""
    return [{"role": "user", "content": mark * 4 * (tokens - 2)}]


async def test_answers_come_in_turn_and_by_function() -> None:
    engine = ScriptedEngine(answers=["one", "two"])
    assert [text_of((await read(engine, chat(PLAIN)))[1]) for _ in range(3)] == ["one", "two", "one"]
    echo = ScriptedEngine(answers=lambda body: body["messages"][-1]["content"][::-1])
    assert text_of((await read(echo, chat([{"role": "user", "content": "abc"}])))[1]) == "cba"


async def test_streamed_and_whole_answers_say_the_same() -> None:
    answer = Answer("Let me look. 你好", (ToolCall("f", '{"a": [1, 2]}'), ToolCall("g")))
    engine = ScriptedEngine(answers=[answer])
    streamed = events((await read(engine, chat(PLAIN)))[1])
    whole = orjson.loads((await read(engine, chat(PLAIN, stream=False)))[1])
    message = whole["choices"][0]["message"]
    calls: dict[int, dict[str, str]] = {}
    for event in streamed:
        for part in event["choices"][0]["delta"].get("tool_calls", []) if event["choices"] else []:
            call = calls.setdefault(part["index"], {"name": "", "arguments": "", "id": ""})
            call["name"] += part["function"].get("name", "")
            call["arguments"] += part["function"]["arguments"]
            call["id"] += part.get("id", "")
    assert [(c["name"], c["arguments"]) for c in calls.values()] == [("f", '{"a": [1, 2]}'), ("g", "{}")]
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"a": [1, 2]}', "{}"]
    assert [c["id"] for c in message["tool_calls"]] == [c["id"] for c in calls.values()]
    assert message["content"] == "Let me look. 你好"
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["usage"]["completion_tokens"] == streamed[-1]["usage"]["completion_tokens"]


async def test_usage_and_logprobs_only_when_asked_for() -> None:
    engine = ScriptedEngine(answers=["four"])
    request = chat(PLAIN, logprobs=True)
    plain = orjson.loads(request.body) | {"stream_options": None, "logprobs": False}
    bare = type(request)(request.path, orjson.dumps(plain), "r2")
    assert not [e for e in events((await read(engine, bare))[1]) if "usage" in e or "logprobs" in e["choices"][0]]
    with_logprobs = events((await read(engine, request))[1])
    assert with_logprobs[1]["choices"][0]["logprobs"]["content"][0]["token"] == "four"


async def test_max_tokens_cuts_with_length() -> None:
    engine = ScriptedEngine(answers=["a" * 400])
    data = (await read(engine, chat(PLAIN, max_tokens=7)))[1]
    assert usage(data)["completion_tokens"] == 7
    assert len(text_of(data)) == 28
    assert b'"finish_reason":"length"' in data


async def test_the_context_limit_cuts_the_answer() -> None:
    engine = ScriptedEngine(ScriptedOptions(context_limit_tokens=100), answers=["a" * 4000])
    assert usage((await read(engine, chat(filler(90))))[1])["total_tokens"] == 100


@pytest.mark.parametrize(
    ("imitates", "words"),
    [
        ("llama-server", '"type":"exceed_context_size_error","n_prompt_tokens":120,"n_ctx":100'),
        ("vllm", "maximum context length is 100 tokens. However, your prompt contains 120"),
        ("sglang", '{"object":"error"'),
        ("openai", '"code":"context_length_exceeded"'),
    ],
)
async def test_overflow_in_the_words_of_the_imitated_engine(imitates: Any, words: str) -> None:
    engine = ScriptedEngine(ScriptedOptions(imitates=imitates, context_limit_tokens=100))
    status, data = await read(engine, chat(filler(120)))
    assert status == 400
    assert words in data.decode()


async def test_the_next_turn_finds_prompt_and_answer_in_the_cache() -> None:
    engine = ScriptedEngine(ScriptedOptions(block_tokens=1), answers=["a" * 40])
    history = filler(50)
    first = usage((await read(engine, chat(history)))[1])
    history = [*history, {"role": "assistant", "content": "a" * 40}, {"role": "user", "content": "more"}]
    second = usage((await read(engine, chat(history)))[1])
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == first["total_tokens"] == 60
    load = await engine.load()
    assert (load.prefix_queried_tokens_total, load.prefix_hit_tokens_total) == (50 + second["prompt_tokens"], 60)


async def test_release_session_drops_its_cache_and_only_when_idle() -> None:
    engine = ScriptedEngine()
    await read(engine, chat(filler(100), "r1", "s1"))
    assert engine.pool.cached_blocks == 6
    async with engine.open(chat(filler(100), "r2", "s1")):
        assert await engine.release_session("s1") is False
    await settle()
    assert await engine.release_session("s1") is True
    assert engine.pool.cached_blocks == 0
    assert await engine.release_session("s1") is False


async def test_only_max_running_run_and_the_rest_wait_in_order() -> None:
    clock = ManualClock()
    engine = ScriptedEngine(ScriptedOptions(max_running=2, decode_tokens_per_s=1), answers=["a" * 12], clock=clock)
    done: list[str] = []

    async def one(name: str) -> None:
        await read(engine, chat(PLAIN, name))
        done.append(name)

    tasks = [asyncio.create_task(one(name)) for name in "abcd"]
    await settle()
    load = await engine.load()
    assert (load.running, load.waiting) == (2, 2)
    await clock.advance(3)
    assert sorted(done) == ["a", "b"]
    await clock.advance(3)
    assert sorted(done[2:]) == ["c", "d"]
    await asyncio.gather(*tasks)


async def test_over_budget_the_last_one_in_is_preempted_and_still_finishes() -> None:
    options = ScriptedOptions(kv_capacity_tokens=160, context_limit_tokens=160, block_tokens=16)
    engine = ScriptedEngine(options, answers=["a" * 400])
    answers = await asyncio.gather(*(read(engine, chat(filler(50, mark), mark, mark)) for mark in "xyz"))
    assert [usage(data)["completion_tokens"] for _, data in answers] == [100, 100, 100]
    assert engine.preemptions_total > 0
    await settle()
    assert engine.pool.used_blocks == 0
    engine.pool.check_integrity()


async def test_load_shows_the_pool_while_a_request_runs() -> None:
    engine = ScriptedEngine(ScriptedOptions(kv_capacity_tokens=1600, context_limit_tokens=1600), answers=["a" * 4000])
    engine.inject(Fault(hang_after_chunks=1))
    async with engine.open(chat(filler(160))) as reply:
        await anext(reply.chunks())
        assert (await engine.load()).kv_usage_ratio == pytest.approx(11 / 100)  # 160 tokens and the one being decoded
        assert await engine.confirm_released("r1", within_s=0.02) is False
    assert await engine.confirm_released("r1", within_s=1) is True
    assert (await engine.load()).kv_usage_ratio == 0


async def test_prefill_time_is_paid_for_new_tokens_only() -> None:
    clock = ManualClock()
    engine = ScriptedEngine(ScriptedOptions(prefill_tokens_per_s=10), clock=clock)
    for seconds in (10.0, 0.4):  # 100 tokens, then 100 - 96 in whole cached blocks
        task = asyncio.create_task(read(engine, chat(filler(100))))
        await clock.advance(seconds - 0.01)
        assert not task.done()
        await clock.advance(0.02)
        assert task.done()


async def test_faults() -> None:
    engine = ScriptedEngine(answers=["a" * 100])
    engine.inject(Fault(refuse=True), Fault(status=503), Fault(die_after_chunks=3), Fault(malform_after_chunks=2))
    with pytest.raises(EngineUnavailableError):
        await read(engine, chat(PLAIN))
    assert (await read(engine, chat(PLAIN)))[0] == 503
    seen = []
    with pytest.raises(EngineError, match="died"):
        async with engine.open(chat(PLAIN)) as reply:
            async for part in reply.chunks():
                seen.append(part)
    assert len(seen) == 3
    with pytest.raises(orjson.JSONDecodeError):
        events((await read(engine, chat(PLAIN)))[1])
    assert (await read(engine, chat(PLAIN)))[0] == 200
    assert engine.pool.used_blocks == 0


async def test_a_zombie_works_on_after_its_client_left() -> None:
    clock = ManualClock()
    engine = ScriptedEngine(ScriptedOptions(decode_tokens_per_s=10), answers=["a" * 400], clock=clock)
    engine.inject(Fault(zombie=True))
    async with engine.open(chat(PLAIN)):
        pass
    await clock.advance(5)
    load = await engine.load()
    assert load.running == 1 and load.kv_usage_ratio
    await clock.advance(6)
    assert (await engine.load()).running == 0


@pytest.mark.parametrize(("imitates", "lives"), [("llama-server", 1), ("vllm", 0)])
async def test_only_as_llama_server_an_unstreamed_request_outlives_its_client(imitates: Any, lives: int) -> None:
    options = ScriptedOptions(imitates=imitates, decode_tokens_per_s=10)
    engine = ScriptedEngine(options, answers=["a" * 400], clock=ManualClock())
    assert engine.info.streams_only is (imitates == "llama-server")
    task = asyncio.create_task(read(engine, chat(PLAIN, stream=False)))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await settle()
    assert (await engine.load()).running == lives
    await engine.close()


async def test_a_full_queue_is_a_503() -> None:
    engine = ScriptedEngine(ScriptedOptions(max_running=1, max_waiting=1, decode_tokens_per_s=1), clock=ManualClock())
    async with engine.open(chat(PLAIN, "a")), engine.open(chat(PLAIN, "b")):
        assert (await read(engine, chat(PLAIN, "c")))[0] == 503


async def test_leaving_before_the_first_step_gives_everything_back() -> None:
    engine = ScriptedEngine()
    async with engine.open(chat(PLAIN)):
        pass
    await settle()
    assert (await engine.load()).running == 0
    assert engine.pool.used_blocks == 0


def test_a_context_larger_than_the_pool_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        ScriptedEngine(ScriptedOptions(kv_capacity_tokens=100, context_limit_tokens=200))


@given(st.lists(st.text(max_size=30), min_size=1, max_size=6), st.integers(1, 8))
def test_tokens_of_a_history_begin_the_tokens_of_a_longer_one(texts: list[str], chars: int) -> None:
    roles = ["user", "assistant"]
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    whole = tokens_of_prompt({"messages": messages}, chars)
    for end in range(1, len(messages)):
        part = tokens_of_prompt({"messages": messages[:end]}, chars)
        shared = len(part) if messages[end]["role"] == "assistant" else len(part) - 1
        assert part[:shared] == whole[:shared]


def test_tools_and_images_count() -> None:
    bare = len(tokens_of_prompt({"messages": WITH_TOOL_RESULT}, 4))
    assert len(tokens_of_prompt({"messages": WITH_TOOL_RESULT, "tools": TOOLS}, 4)) > bare
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert len(tokens_of_prompt({"messages": image}, 4)) == 64 + 2


class PoolMachine(RuleBasedStateMachine):
    """Any order of steps keeps each block in one state, and never more in use than there are."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, 2)
        self.live: list[tuple[Table, list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def allocate(self, tokens: list[int]) -> None:
        known = self.pool.match(tokens)
        table = self.pool.allocate(tokens)
        if table is not None:
            assert table.cached_tokens == known < len(tokens)
            assert len(table.blocks) == -(-len(tokens) // 2)
            self.live.append((table, tokens))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 7), token=st.integers(0, 2))
    def grow(self, pick: int, token: int) -> None:
        table, tokens = self.live[pick % len(self.live)]
        if self.pool.grow(table, [*tokens, token]):
            tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 7))
    def release(self, pick: int) -> None:
        table, _ = self.live.pop(pick % len(self.live))
        self.pool.release(table)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 7))
    def forget(self, pick: int) -> None:
        used = self.pool.used_blocks
        self.pool.forget(self.live[pick % len(self.live)][0].hashes)
        assert self.pool.used_blocks == used

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity()
        assert self.pool.used_blocks == len({block for table, _ in self.live for block in table.blocks})


test_pool = PoolMachine.TestCase

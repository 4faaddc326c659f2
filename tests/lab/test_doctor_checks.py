"""Every check: found where it must be, clear where all is well, unknown where the figure is missing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from pages import LENGTHS, Vllm, llama, look, sglang

from kvsteward.lab.doctor.checks import CHECKS
from kvsteward.lab.doctor.finding import Clear, Finding, Unknown
from kvsteward.lab.doctor.knobs import FLAGS
from kvsteward.lab.doctor.names import GATEWAY
from kvsteward.lab.doctor.observation import Gpu, Observation, Slot, TorchMemory
from kvsteward.lab.doctor.report import diagnose
from kvsteward.lab.prompts import compare_prompts
from kvsteward.ledger import ModelSpec

DATA = Path(__file__).parent / "data"
LLAMA_70B = ModelSpec.from_hf_config({
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28672, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
})  # fmt: skip
GIB = 1 << 30
SERVED = Vllm(
    running=4, usage=0.4, queried=40_000, hits=30_000, prompt_tokens=40_000, generated=4_000,
    ended={"stop": 40, "length": 0, "abort": 0}, prompts=[1000.0] * 40, answers=[100.0] * 40, first_s=[0.2] * 40,
)  # fmt: skip
LATER = replace(
    SERVED, queried=60_000, hits=46_000, prompt_tokens=60_000, generated=6_000,
    ended={"stop": 60, "length": 0, "abort": 0}, prompts=[1000.0] * 60, answers=[100.0] * 60, first_s=[0.2] * 60,
)  # fmt: skip
CARD = {"id": "m", "max_model_len": 8192}


def healthy(**changes: object) -> Observation:
    """A server at work with nothing wrong: 20 requests in the window, 80 % of their prompts cached."""
    return look("vllm", SERVED, replace(LATER, **changes), LATER, said=CARD)  # type: ignore[arg-type]


def chats(*systems: str) -> list[dict[str, object]]:
    """One session: each request has a system message and the history so far."""
    history: list[dict[str, str]] = []
    bodies: list[dict[str, object]] = []
    for turn, system in enumerate(systems):
        history = [*history, {"role": "user", "content": f"question {turn}: what comes after {turn * 7}? " * 8}]
        bodies.append({"messages": [{"role": "system", "content": system}, *history]})
    return bodies


def slots(*busy: bool, prompt: int = 100) -> tuple[Slot, ...]:
    return tuple(Slot(i, i, b, 4096, prompt, 0, 20, False) for i, b in enumerate(busy))


def card(index: int, used: float, *processes: float) -> Gpu:
    held = tuple((1000 + i, int(p * GIB)) for i, p in enumerate(processes))
    return Gpu(index, "H100 SXM", 80 * GIB, int(used * GIB), 0.5, held)


PRESSED = replace(LATER, usage=0.97, waiting=3)
MANY = {"stop": 60, "length": 0, "abort": 8}
STUCK = replace(LATER, running=2, generated=6_000)
LONG = {"prompts": [100.0] * 18 + [20_000.0] * 2, "first_s": [0.2] * 17 + [20.0] * 3, "queried": 60_000}
SHORT = replace(SERVED, prompts=[], first_s=[])
OFFLOADED = replace(LATER, offload=(50_000, 50.0), computed=(20_000, 4.0))
RESIDENT = "kvsteward:resident_tokens 15800\nkvsteward:kv_capacity_tokens 16000\n"

FOUND: dict[str, list[Callable[[], Observation]]] = {
    "preemption": [
        lambda: look("vllm", SERVED, replace(PRESSED, preempted=9)),
        lambda: look("sglang", sglang(num_retracted_requests_total=1), sglang(num_retracted_requests_total=4)),
        lambda: look("vllm", replace(PRESSED, preempted=2)),  # one page: since the engine's start
    ],
    "abandoned": [
        lambda: look("vllm", SERVED, replace(LATER, ended=MANY)),
        # As vLLM 0.32 does: it counts no abort; 20 had a first token, 10 ended, none runs.
        lambda: look("vllm", SERVED, replace(LATER, running=0, ended={"stop": 50, "abort": 0})),
        lambda: look("llama-server", *[llama(requests_processing=2)] * 3, clients=[0, 0, 0], slots=slots(True, True)),
        lambda: look("vllm", STUCK, STUCK, replace(STUCK, generated=9_000), window_s=20),
        lambda: look("sglang", *[sglang(num_running_reqs=3)] * 4, clients=[1, 1, 0, 1]),
    ],
    "prefix-off": [
        lambda: look("vllm", SERVED, replace(LATER, info={"enable_prefix_caching": "False"})),
        lambda: look("vllm", replace(SERVED, queried=0, info={"enable_prefix_caching": ""}),
                     replace(LATER, queried=0, info={"enable_prefix_caching": ""})),
        lambda: look("sglang", sglang(), sglang(), said={"disable_radix_cache": True}),
        lambda: look("llama-server", llama(), llama(), flags="-c 4096 --no-cache-prompt"),
    ],
    "prefix-broken": [
        lambda: look("vllm", SERVED, replace(LATER, hits=30_100)),
        lambda: look("vllm", SERVED, LATER, prompts=compare_prompts(chats("It is 12:01:07.", "It is 12:02:33.", "It is 12:05:00."))),
        lambda: look("llama-server", llama(), llama(prompt_tokens_total=9000), slots=tuple(Slot(i, i, False, 4096, 900) for i in range(8))),
    ],
    "prefix-thrash": [
        lambda: look("sglang", sglang(prompt_tokens_total=0, cached_tokens_total=0, evicted_tokens_total=0),
                     sglang(prompt_tokens_total=50_000, cached_tokens_total=9_000, evicted_tokens_total=40_000, token_usage=0.3)),
        lambda: look("vllm", SERVED, replace(LATER, hits=33_000), setup={"kv_capacity_tokens": 16_000}),
    ],
    "hybrid-no-reuse": [
        lambda: look("vllm", SERVED, replace(LATER, info={"mamba_block_size": "256"})),
        lambda: look("sglang", sglang(mamba_usage=0.2, prompt_tokens_total=0, cached_tokens_total=0),
                     sglang(mamba_usage=0.2, prompt_tokens_total=9_000, cached_tokens_total=0)),
    ],
    "queue-low-use": [
        lambda: look("vllm", *[replace(SERVED, running=2, waiting=6, usage=0.05)] * 4),
        lambda: look("sglang", *[sglang(num_running_reqs=9, num_queue_reqs=4, token_usage=0.6)] * 4),
        lambda: look("llama-server", *[llama(requests_processing=2, requests_deferred=5)] * 4, slots=slots(True, True)),
    ],
    "state-pages": [
        lambda: look("sglang", *[sglang(mamba_usage=0.99, token_usage=0.35, num_queue_reqs=8, num_running_reqs=40)] * 3),
    ],
    "saturated": [lambda: look("vllm", *[PRESSED] * 4), lambda: look("sglang", *[sglang(token_usage=0.99, num_queue_reqs=3)] * 4)],
    "kv-format": [
        lambda: look("vllm", SERVED, PRESSED, spec=LLAMA_70B),
        lambda: look("sglang", *[sglang(token_usage=0.95)] * 2, said={"kv_cache_dtype": "auto"}),
        lambda: look("llama-server", *[llama(kv_cache_usage_ratio=0.95)] * 2, flags="-c 8192"),
    ],
    "idle-prefixes": [
        lambda: look("sglang", *[sglang(token_usage=0.1, kv_used_tokens=10_000, kv_evictable_tokens=88_000, max_total_num_tokens=100_000)] * 2),
        lambda: look("vllm", *[Vllm(usage=0.05).text() + RESIDENT] * 2, names=GATEWAY,
                     setup={"kv_capacity_tokens": 16_000, "gateway": True}),
    ],
    "long-prompt": [
        lambda: look("vllm", SHORT, replace(LATER, **LONG)),
        lambda: look("vllm", SHORT, replace(LATER, **{**LONG, "first_s": [0.2] * 20, "gaps_s": [0.01] * 95 + [5.0] * 5})),
    ],
    "chunked-prefill": [
        lambda: look("vllm", SERVED, LATER, flags="--no-enable-chunked-prefill"),
        lambda: look("sglang", sglang(), sglang(), said={"chunked_prefill_size": -1}),
    ],
    "context-limit": [
        lambda: look("vllm", SERVED, LATER, said={"id": "m", "max_model_len": 131_072}),
        lambda: look("llama-server", llama(), llama(n_tokens_max=300, prompt_tokens_total=2000, tokens_predicted_total=200),
                     said={"total_slots": 4, "default_generation_settings": {"n_ctx": 32_768}}),
        lambda: look("sglang", sglang(), _sglang_lengths(500), said={"context_length": 131_072}),
    ],
    "fragmentation": [
        lambda: look("vllm", SERVED, replace(LATER, usage=0.9, prompts=[60.0] * 60, answers=[10.0] * 60, info={"block_size": "128"})),
    ],
    "replicated-heads": [
        lambda: look("vllm", SERVED, LATER, flags="-tp 16", spec=LLAMA_70B),
        lambda: look("sglang", sglang(), sglang(), said={"tp_size": 16}, spec=LLAMA_70B),
    ],
    "rank-imbalance": [lambda: look("vllm", SERVED, LATER, flags="-tp 2", gpus=(card(0, 70), card(1, 50)))],
    "card-eaten": [
        lambda: look("vllm", SERVED, LATER, gpus=(card(0, 78, 60, 15),)),
        lambda: look("sglang", sglang(), sglang(weight_memory_usage_gb=70, kv_cache_memory_usage_gb=4)),
    ],
    "allocator": [lambda: look("vllm", SERVED, LATER, torch=TorchMemory(40 * GIB, 25 * GIB))],
    "offload-slow": [
        lambda: look("vllm", replace(SERVED, offload=(0, 0)), OFFLOADED),
        lambda: look("sglang", sglang(load_back_tokens_total=0, load_back_duration_seconds_sum=0, prompt_tokens_total=0, cached_tokens_total=0),
                     _sglang_first(load_back_tokens_total=4_000, load_back_duration_seconds_sum=40, prompt_tokens_total=20_000, cached_tokens_total=5_000)),
    ],
}  # fmt: skip


def _sglang_lengths(length: float) -> str:
    from pages import histogram

    lines = histogram("sglang:prompt_tokens_histogram", [length] * 20)
    lines += histogram("sglang:generation_tokens_histogram", [50.0] * 20)
    return sglang() + "\n".join(lines) + "\n"


def _sglang_first(**figures: float) -> str:
    from pages import SECONDS, histogram

    return sglang(**figures) + "\n".join(histogram("sglang:time_to_first_token_seconds", [0.5] * 10, SECONDS)) + "\n"


CLEAR: dict[str, list[Callable[[], Observation]]] = {
    "preemption": [healthy, lambda: look("vllm", replace(SERVED, preempted=5), replace(LATER, preempted=5))],
    "abandoned": [
        healthy,
        lambda: look("vllm", SERVED, replace(LATER, ended={"stop": 60, "abort": 2})),
        # Twenty had a first token, ten ended, ten still run.
        lambda: look("vllm", SERVED, replace(LATER, running=10, ended={"stop": 50, "abort": 0})),
        # Running for long after short answers, but no longer than answers may be.
        lambda: look("vllm", *[STUCK] * 2, replace(STUCK, generated=7_000), window_s=20, clients=[2, 2, 2]),
        # A long answer that somebody waits for.
        lambda: look("llama-server", *[llama(requests_processing=1)] * 3, clients=[1, 1, 1], slots=slots(True)),
        # A request that had just begun when its client was not yet counted.
        lambda: look("llama-server", *[llama(requests_processing=1)] * 3, clients=[1, 0, 1], slots=slots(True)),
    ],
    "prefix-off": [healthy, lambda: look("sglang", sglang(), sglang(), said={"disable_radix_cache": False})],
    "prefix-broken": [
        healthy,
        lambda: look("vllm", SERVED, replace(LATER, hits=30_000, prompts=[10.0] * 3000, queried=70_000)),
        lambda: look("vllm", SERVED, LATER, prompts=compare_prompts(chats("Be brief.", "Be brief.", "Be brief."))),
    ],
    "prefix-thrash": [
        healthy,
        lambda: look("sglang", sglang(prompt_tokens_total=0, cached_tokens_total=0, evicted_tokens_total=0),
                     sglang(prompt_tokens_total=50_000, cached_tokens_total=9_000, evicted_tokens_total=0)),
    ],
    "hybrid-no-reuse": [healthy, lambda: look("llama-server", llama(), llama(), spec=LLAMA_70B)],
    "queue-low-use": [
        healthy,
        lambda: look("vllm", SERVED, replace(LATER, waiting=5, usage=0.1), LATER, LATER),  # a moment, not a state
        lambda: look("vllm", *[PRESSED] * 4),
    ],
    "state-pages": [lambda: look("sglang", *[sglang(mamba_usage=0.5, num_queue_reqs=2)] * 2)],
    "saturated": [healthy, lambda: look("vllm", *[replace(PRESSED, waiting=0)] * 4)],
    "kv-format": [
        healthy,
        lambda: look("vllm", SERVED, replace(PRESSED, info={"cache_dtype": "fp8_e4m3"})),
        lambda: look("llama-server", *[llama(kv_cache_usage_ratio=0.95)] * 2, flags="-ctk q8_0 -ctv q8_0"),
    ],
    "idle-prefixes": [
        lambda: look("sglang", *[sglang(token_usage=0.1, kv_used_tokens=10_000, kv_evictable_tokens=8_000, max_total_num_tokens=100_000)] * 2),
    ],
    "long-prompt": [healthy],
    "chunked-prefill": [
        lambda: look("vllm", SERVED, LATER, flags="--max-num-seqs 8"),
        lambda: look("sglang", sglang(), sglang(), said={"chunked_prefill_size": 8192}),
        lambda: look("llama-server", llama(), llama()),
    ],
    "context-limit": [
        healthy,
        lambda: look("llama-server", llama(), llama(n_tokens_max=3000, prompt_tokens_total=20_000),
                     said={"total_slots": 4, "default_generation_settings": {"n_ctx": 4096}}),
    ],
    "fragmentation": [healthy, lambda: look("vllm", SERVED, PRESSED)],
    "replicated-heads": [
        lambda: look("vllm", SERVED, LATER, flags="-tp 8", spec=LLAMA_70B),
        lambda: look("vllm", SERVED, LATER, flags="-tp 16 -dcp 2", spec=LLAMA_70B),
        lambda: look("llama-server", llama(), llama()),
    ],
    "rank-imbalance": [lambda: look("vllm", SERVED, LATER, flags="-tp 2", gpus=(card(0, 70), card(1, 68)))],
    "card-eaten": [
        lambda: look("vllm", SERVED, LATER, gpus=(card(0, 72, 70, 1),)),
        lambda: look("sglang", sglang(), sglang(weight_memory_usage_gb=30, kv_cache_memory_usage_gb=40)),
    ],
    "allocator": [lambda: look("vllm", SERVED, LATER, torch=TorchMemory(40 * GIB, 39 * GIB))],
    "offload-slow": [
        lambda: look("vllm", replace(SERVED, offload=(0, 0)), replace(OFFLOADED, offload=(50_000, 1.0))),
        lambda: look("vllm", replace(SERVED, offload=(0, 0)), replace(LATER, offload=(0, 0))),
    ],
}  # fmt: skip

NAN = replace(LATER, usage="NaN", running="NaN", waiting="NaN", queried=None, preempted=None)
BLIND: dict[str, list[Callable[[], Observation]]] = {
    "preemption": [lambda: look("llama-server", llama(), llama()), lambda: look("vllm", SERVED, NAN)],
    "abandoned": [lambda: look("vllm", STUCK, STUCK, STUCK), lambda: look("vllm", NAN, NAN)],
    "prefix-off": [lambda: look("llama-server", llama(), llama()), lambda: look("sglang", sglang(), sglang())],
    "prefix-broken": [lambda: look("vllm", SERVED, NAN), lambda: look("vllm", SERVED, SERVED)],
    "prefix-thrash": [lambda: look("vllm", SERVED, SERVED), lambda: look("vllm", LATER, SERVED)],
    "hybrid-no-reuse": [lambda: look("llama-server", llama(), llama())],
    "queue-low-use": [lambda: look("vllm", NAN, NAN, NAN)],
    "state-pages": [healthy],
    "saturated": [lambda: look("llama-server", *[llama()] * 4), lambda: look("vllm", NAN, NAN)],
    "kv-format": [lambda: look("llama-server", llama(), llama()), lambda: look("llama-server", *[llama(kv_cache_usage_ratio=0.95)] * 2)],
    "idle-prefixes": [healthy],
    "long-prompt": [lambda: look("vllm", SERVED, SERVED), lambda: look("llama-server", llama(), llama())],
    "chunked-prefill": [healthy],
    "context-limit": [
        lambda: look("vllm", SERVED, LATER),
        lambda: look("vllm", Vllm(), Vllm(), said=CARD),
        lambda: look("llama-server", llama(), llama(), said={"default_generation_settings": {"n_ctx": 4096}}),
    ],
    "fragmentation": [lambda: look("llama-server", llama(), llama()), lambda: look("vllm", NAN, NAN)],
    "replicated-heads": [healthy, lambda: look("vllm", SERVED, LATER, flags="-tp 16")],
    "rank-imbalance": [healthy, lambda: look("vllm", SERVED, LATER, gpus=(card(0, 70), card(1, 50)))],
    "card-eaten": [healthy],
    "allocator": [healthy],
    "offload-slow": [healthy, lambda: look("vllm", replace(SERVED, offload=(0, 0)), replace(LATER, offload=(100, 1)))],
}  # fmt: skip

SETTINGS = {"prefix-off", "chunked-prefill", "hybrid-no-reuse"}
"""Proved by a setting alone."""
BY_NAME = {check.name: check for check in CHECKS}


def cases(table: dict[str, list[Callable[[], Observation]]]) -> list[object]:
    return [pytest.param(name, make, id=f"{name}-{i}") for name, made in table.items() for i, make in enumerate(made)]


@pytest.mark.parametrize(("name", "make"), cases(FOUND))
def test_found(name: str, make: Callable[[], Observation]) -> None:
    outcome = BY_NAME[name].run(make()).outcome
    assert isinstance(outcome, Finding), outcome
    assert outcome.evidence and outcome.do and outcome.cost and outcome.gain
    assert name in SETTINGS or any(re.search(r"\d", line) for line in outcome.evidence), "evidence is numbers"


@pytest.mark.parametrize(("name", "make"), cases(CLEAR))
def test_clear(name: str, make: Callable[[], Observation]) -> None:
    outcome = BY_NAME[name].run(make()).outcome
    assert isinstance(outcome, Clear), outcome


@pytest.mark.parametrize(("name", "make"), cases(BLIND))
def test_unknown(name: str, make: Callable[[], Observation]) -> None:
    outcome = BY_NAME[name].run(make()).outcome
    assert isinstance(outcome, Unknown), outcome
    assert len(outcome.why) > 10


@pytest.mark.parametrize("table", [FOUND, CLEAR, BLIND], ids=["found", "clear", "unknown"])
def test_no_check_is_left_out(table: dict[str, object]) -> None:
    assert set(table) == set(BY_NAME)


def known_flags(dialect: str) -> set[str]:
    """Names that the engine's own parser knows; the files name their sources."""
    lines = (DATA / f"flags_{dialect}.txt").read_text().splitlines()
    return {line for line in lines if line.startswith("--")}


def test_every_flag_in_the_table_exists_in_its_engine() -> None:
    for knob, flags in FLAGS.items():
        for dialect, flag in flags.items():
            assert flag in known_flags(dialect), (knob, dialect, flag)


@pytest.mark.parametrize(("name", "make"), cases(FOUND))
def test_every_flag_that_is_advised_exists_in_that_engine(name: str, make: Callable[[], Observation]) -> None:
    observation = make()
    outcome = BY_NAME[name].run(observation).outcome
    assert isinstance(outcome, Finding)
    advised = {word for line in outcome.do for word in re.findall(r"--[a-z][a-z0-9-]+", line)} - {"--requests"}
    assert advised <= known_flags(observation.setup.dialect)


def test_nothing_is_found_in_a_healthy_server() -> None:
    report = diagnose(healthy())
    assert report.as_json()["findings"] == []
    assert report.verdict.word == "healthy"


@settings(max_examples=60, deadline=None)
@given(
    dialect=st.sampled_from(["vllm", "sglang", "llama-server"]),
    total=st.integers(0, 10**7),
    ratio=st.floats(0, 1),
    requests=st.integers(0, 60),
    length=st.floats(1, 4000),
    readings=st.integers(1, 6),
    window_s=st.floats(1, 600),
)
def test_a_quiet_engine_has_no_finding(
    dialect: str, total: int, ratio: float, requests: int, length: float, readings: int, window_s: float
) -> None:
    """Whatever it did before: nothing runs, nothing waits, nothing changes."""
    hits = int(total * ratio)
    if dialect == "vllm":
        page: str | Vllm = Vllm(
            queried=total, hits=hits, prompt_tokens=total, generated=total // 9, preempted=0,
            ended={"stop": requests, "abort": 0}, prompts=[length] * requests, answers=[length / 4] * requests,
        )  # fmt: skip
    elif dialect == "sglang":
        page = sglang(prompt_tokens_total=total, cached_tokens_total=hits, evicted_tokens_total=hits)
    else:
        page = llama(prompt_tokens_total=total - hits, prompt_tokens_cached_total=hits, n_tokens_max=int(length))
    observation = look(dialect, *[page] * max(2, readings), window_s=window_s)
    assert diagnose(observation).as_json()["findings"] == []


@settings(max_examples=60, deadline=None)
@given(
    hit=st.floats(0.5, 1),
    usage=st.floats(0, 0.75),
    waiting=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=3, max_size=3),
    more=st.integers(6, 40),
    length=st.sampled_from(LENGTHS[6:9]),
)
def test_a_server_at_work_with_reuse_and_room_has_no_finding(
    hit: float, usage: float, waiting: list[int], more: int, length: float
) -> None:
    tokens = more * length
    after = replace(
        LATER, usage=usage, queried=SERVED.queried + tokens, hits=SERVED.hits + hit * tokens,
        prompts=[*SERVED.prompts, *[length] * more], answers=[100.0] * (40 + more), first_s=[0.2] * (40 + more),
        ended={"stop": 40 + more, "abort": 0},
    )  # fmt: skip
    waits = waiting if usage >= 0.5 or sum(waiting) <= 1 else [0, 1, 0]
    pages = [replace(after, waiting=w) if i else SERVED for i, w in enumerate([0, *waits])]
    assert diagnose(look("vllm", *pages, said=CARD)).as_json()["findings"] == []


def test_a_restart_inside_the_window_is_said_and_no_rate_is_judged() -> None:
    report = diagnose(look("vllm", replace(PRESSED, preempted=50), replace(SERVED, preempted=0, queried=100, hits=0)))
    assert any("restarted" in note for note in report.notes)
    unknown = report.as_json()["unknown"]
    assert {"preemption", "prefix-broken", "prefix-thrash"} <= set(unknown)
    assert "restarted" in unknown["preemption"]


def test_a_broken_figure_is_named() -> None:
    report = diagnose(look("vllm", SERVED, replace(LATER, usage="NaN")))
    assert any("kv_cache_usage_perc" in note for note in report.notes)
    assert report.as_json()["findings"] == []

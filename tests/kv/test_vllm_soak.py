"""What takes minutes on real vLLMs (marked `soak`; needs `make setup-vllm`): 500 sessions, and two ranks on one engine.

The model has one layer, two KV heads and random weights: SmolLM2's three heads cannot be halved. The layer is wide, so
that loading is worth it. Of two ranks a block is
one record of both parts. Each rank is bound to a core of its own, so this needs two.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from vllm_world import MODEL, PYTHON, Engine, Valkey, check_random_sessions, engine, environment, python_path, whole

BLOCK_BYTES = 32 * 2 * 2 * 64 * 2
"""32 tokens x 2 heads x keys and values of 64 numbers x 2 bytes, of both ranks."""
SLOT_BYTES = BLOCK_BYTES + 4096
POOL = 48
WORDS = 330
MADE = """
import json, shutil, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
source, out = map(Path, sys.argv[1:])
torch.manual_seed(7)
vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 1, "max_position_embeddings": 8192}
config = LlamaConfig(vocab_size=vocabulary, initializer_range=0.2, tie_word_embeddings=True, **heads, **sizes)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
    shutil.copy(source / name, out / name)
"""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@dataclass
class Ranks:
    """Two engines with one Valkey, each with host memory for 60 blocks: of one rank and of two."""

    one: Engine
    two: Engine
    valkey: Valkey


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    bench, program = environment()
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    folder = tmp_path_factory.mktemp("ranks")
    model = folder / "model"
    subprocess.run([str(PYTHON), "-c", MADE, str(MODEL), str(model)], check=True, capture_output=True)
    server, path = Valkey(folder, program), python_path(folder)
    options = {"host_bytes": 60 * SLOT_BYTES, "valkey_url": server.proxy.url, "stage_within_s": 20}
    settings = {"bench": bench, "path": path, "model": model, "blocks": POOL, "context_tokens": (POOL - 1) * 32}
    both = {"more": ["--tensor-parallel-size", "2"], "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        one = stack.enter_context(engine(None, folder, "one", options, **settings))
        two = stack.enter_context(engine(None, folder, "two", options, **settings, **both))
        yield Ranks(one, two, server)
        for text in (one.log.read_text(), two.log.read_text()):
            assert f"60 blocks of {BLOCK_BYTES} bytes in host memory, valkey" in text


def test_500_random_sessions_leave_the_pool_as_it_was(ranks):
    check_random_sessions(ranks.one, 500)


def test_100_random_sessions_on_two_ranks_leave_the_pool_as_it_was(ranks):
    check_random_sessions(ranks.two, 100)


def push_out(one: Engine, name: str) -> None:
    for number in range(3):
        one.turn(f"{name}{number}", WORDS)


def test_both_ranks_parts_come_back_bit_for_bit(ranks):
    two = ranks.two
    two.turn("a", WORDS)
    in_pool = two.turn("a", WORDS)
    assert in_pool.cached_tokens == whole(in_pool.prompt_tokens)
    two.turn("b", WORDS)
    two.turn("c", WORDS)
    from_host = two.turn("a", WORDS)
    push_out(two, "d")
    ranks.valkey.settle()
    from_valkey = two.turn("a", WORDS)
    assert from_host == from_valkey == in_pool
    tiers = two.figures()["tiers"]
    assert tiers["moves"]["loads"] >= 2
    assert tiers["moves"]["loaded_tokens"] > in_pool.cached_tokens, "more than one of the two loads has"
    assert tiers["store"]["staged"]["valkey"] > 0
    assert (tiers["moves"]["lost"], tiers["turns"]) == (0, 0)


def test_a_record_without_the_second_rank_s_part_is_a_miss_for_both(ranks):
    two = ranks.two
    was = two.turn("e", WORDS)
    push_out(two, "f")
    ranks.valkey.settle()
    before = two.figures()["tiers"]
    with ranks.valkey.client() as client:
        for name in client.scan_iter("kv:1:[0-9a-f]*:0:*"):
            record = client.get(name)
            assert len(record) > BLOCK_BYTES
            client.set(name, record[: len(record) - BLOCK_BYTES // 2])
    again = two.turn("e", WORDS)
    assert again.cached_tokens == 0
    assert again == was
    after = two.figures()["tiers"]
    assert after["moves"]["loaded_tokens"] == before["moves"]["loaded_tokens"]
    (valkey,) = after["store"]["tiers"]
    assert valkey["misses"]["truncated"] > 0


def test_an_engine_of_one_rank_gets_nothing_of_it(ranks):
    said = ranks.two.turn("g", WORDS)
    ranks.valkey.settle()
    assert ranks.one.turn("g", WORDS).cached_tokens == 0
    assert ranks.one.turn("g", WORDS).cached_tokens == whole(said.prompt_tokens)

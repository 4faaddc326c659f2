"""The connector in a real vLLM on the CPU (marked `vllm`; needs `make setup-vllm`)."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL = ROOT / ".venv-vllm" / "smollm2"
BLOCKS = 96
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]


def load(name: str) -> Any:
    """A module of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Engine:
    url: str
    log: Path
    figures_path: Path
    bench: Any

    def turn(self, session: str, words: int, **hint: Any) -> int:
        """Tokens that the turn found in the cache. The text depends on the session and is the longer one's prefix."""
        text = " ".join(f"{session}{i % 10}" for i in range(words))
        extra = {"kv_transfer_params": {"kvsteward": {"version": 1, **hint}}} if hint else {}
        usage = self.bench.chat(self.url, session, [{"role": "user", "content": text}], **extra)["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def figures(self) -> Any:
        """As of a step more than 5 s after the last ones."""
        time.sleep(5.2)
        self.turn("tick", 1, note=True)
        return json.loads(self.figures_path.read_text())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if not PYTHON.exists():
        pytest.skip("no vLLM environment; 'make setup-vllm' makes one")
    load("retention_sim")
    bench = load("retention_engine")
    folder = tmp_path_factory.mktemp("vllm")
    options = {"check": True, "figures_path": str(folder / "figures.json"), "reorder_s": 0.0}
    log = folder / "log.txt"
    with bench.server(str(PYTHON), str(MODEL), BLOCKS, options, log, context_tokens=2048) as url:
        yield Engine(url, log, folder / "figures.json", bench)
    text = log.read_text(errors="replace")
    assert "kvsteward: stopped" not in text
    assert "kvsteward: keeps 95 blocks of 32 tokens" in text


def test_hints_decide_what_is_kept(engine):
    """Each history is about 1,000 tokens; the pool holds three. The oldest is kept by its TTL, the finished one goes."""
    engine.turn("a", 450, ttl_s=300)
    engine.turn("b", 450)
    engine.turn("c", 450, final=True)
    engine.turn("d", 450)
    assert engine.turn("a", 460, ttl_s=300) > 800
    assert engine.turn("b", 460) > 800


def test_figures_name_what_sessions_hold_and_add_up(engine):
    engine.turn("a", 460)
    figures = engine.figures()
    assert figures["free_blocks"] <= BLOCKS - 1
    assert figures["sessions"]["a"]["blocks"] > 20
    assert figures["sessions"]["a"]["tokens"] == 32 * figures["sessions"]["a"]["blocks"]
    assert sum(s["blocks"] for s in figures["sessions"].values()) <= figures["free_blocks"]


def test_a_wrong_hint_is_counted_and_the_turn_runs(engine):
    before = engine.figures()["refused_hints"]
    engine.turn("e", 5, ttl="soon")
    assert engine.figures()["refused_hints"] == before + 1


def test_a_prompt_as_large_as_the_pool_allows_is_served_though_all_is_kept(engine):
    for session in "xyz":
        engine.turn(session, 400, ttl_s=300)
    engine.turn("large", 900)

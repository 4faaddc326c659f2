"""The connector in a real vLLM on the CPU (marked `vllm`; needs `make setup-vllm`)."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_world import MODEL, PYTHON, ROOT, environment, fetch, installed

BLOCKS = 96
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]


@dataclass
class Engine:
    url: str
    log: Path
    figures_path: Path
    bench: Any

    def turn(self, session: str, words: int, /, **hint: Any) -> int:
        """Tokens that the turn found in the cache. The text depends on the session and is the longer one's prefix."""
        text = " ".join(f"{session}{i % 10}" for i in range(words))
        extra = {"kv_transfer_params": {"kvsteward": {"version": 1, **hint}}} if hint else {}
        usage = self.bench.chat(self.url, session, [{"role": "user", "content": text}], **extra)["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def held(self) -> dict[str, int]:
        """Blocks by session, as the endpoint has them after a step from now on."""
        fetch(f"{self.url}/kvsteward/sessions/tick/note", {})
        return {one["session"]: one["blocks"] for one in fetch(f"{self.url}/kvsteward/sessions")["data"]}

    def figures(self) -> Any:
        """As of a step more than 5 s after the last ones."""
        time.sleep(5.2)
        self.turn("tick", 1, note=True)
        return json.loads(self.figures_path.read_text())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    bench, _ = environment()
    folder = tmp_path_factory.mktemp("vllm")
    options = {"check": True, "figures_path": str(folder / "figures.json"), "reorder_s": 0.0}
    log = folder / "log.txt"
    path = os.pathsep.join((str(ROOT / "src"), str(installed(folder))))
    env = {"VLLM_PLUGINS": "kvsteward"}
    with bench.server(str(PYTHON), str(MODEL), BLOCKS, options, log, context_tokens=2048, path=path, **env) as url:
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
    engine.held()
    before = fetch(f"{engine.url}/kvsteward/sessions")["hints"]["refused"]
    engine.turn("e", 5, ttl="soon")
    engine.held()
    assert fetch(f"{engine.url}/kvsteward/sessions")["hints"]["refused"] == before + 1


def test_a_prompt_as_large_as_the_pool_allows_is_served_though_all_is_kept(engine):
    for session in "xyz":
        engine.turn(session, 400, ttl_s=300)
    engine.turn("large", 900)


def test_the_endpoint_names_what_sessions_hold(engine):
    engine.turn("held", 300)
    engine.held()  # figures are sent once a second, or after a word
    listed = fetch(f"{engine.url}/kvsteward/sessions")
    (held,) = [one for one in listed["data"] if one["session"] == "held"]
    assert held["blocks"] > 15
    assert held["tokens"] == 32 * held["blocks"]
    assert 0 <= held["idle_s"] < 60
    assert listed["age_s"] <= 1.5
    assert listed["totals"]["blocks"] == sum(one["blocks"] for one in listed["data"])
    assert listed["totals"]["blocks"] <= listed["totals"]["free_blocks"] <= BLOCKS - 1


def test_a_released_session_s_blocks_go_first_and_at_once(engine):
    """Both came last and the pool is full: what a third one takes is the released one's, though it is the newest."""
    engine.turn("kept", 200)
    engine.turn("gone", 200)
    before = engine.held()
    released = fetch(f"{engine.url}/kvsteward/sessions/gone/release", {"cache_salt": "of its requests"})
    assert released == {"session": "gone", "object": "session.noted", "heard": True}
    assert engine.held() == {name: blocks for name, blocks in before.items() if name != "gone"}
    engine.turn("new", 150)
    after = engine.held()
    assert after.pop("new") <= before.pop("gone")
    assert after == before, "nobody else lost a block"


def test_a_note_is_heard_and_a_wrong_one_refused(engine):
    noted = fetch(f"{engine.url}/kvsteward/sessions/a%2Fb/note", {"stop": "tool_calls", "tools": ["run_tests"]})
    assert noted == {"session": "a/b", "object": "session.noted", "heard": True}
    for wrong in ({"final": True}, {"session": "other"}, {"tools": "run"}, {"nope": 1}, []):
        assert fetch(f"{engine.url}/kvsteward/sessions/a/note", wrong)["status"] == 400


def test_a_client_cannot_name_another_session_in_a_note(engine):
    engine.turn("victim", 100)
    assert engine.held()["victim"] > 3
    refused = fetch(f"{engine.url}/kvsteward/sessions")["hints"]["refused"]
    engine.turn("attacker", 1, note=True, final=True, session="victim")
    assert engine.held()["victim"] > 3
    assert fetch(f"{engine.url}/kvsteward/sessions")["hints"]["refused"] == refused + 1


def test_metrics_add_up_to_what_sessions_hold(engine):
    engine.turn("measured", 60)
    engine.held()
    listed = fetch(f"{engine.url}/kvsteward/sessions")
    page = [line for line in fetch(f"{engine.url}/metrics").splitlines() if line.startswith("kvsteward_")]
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page}
    named = {name: n for name, n in values.items() if name.startswith("kvsteward_session_blocks{")}
    (others,) = [n for name, n in values.items() if name.startswith("kvsteward_other_session_blocks{")]
    (sessions,) = [n for name, n in values.items() if name.startswith("kvsteward_sessions{")]
    assert 0 < len(named) <= 20
    assert any('session="measured"' in name for name in named)
    assert sum(named.values()) + others == listed["totals"]["blocks"]
    assert sessions == listed["totals"]["sessions"]
    hints = {kind: n for name, n in values.items() for kind in listed["hints"] if "_total{" in name and kind in name}
    assert hints == listed["hints"]


def test_a_gateway_s_sessions_are_seen_and_deleted_ones_released(engine, serve):
    """The plug-in is found, hints arrive, what a session holds is shown, and a deleted session holds nothing."""
    gateway = serve("--engine", engine.url)
    before = fetch(f"{engine.url}/kvsteward/sessions")["hints"]
    text = " ".join(f"through{i % 10}" for i in range(120))
    answer = gateway.chat([{"role": "user", "content": text}], session="through", max_tokens=4, temperature=0)
    assert answer["usage"]["prompt_tokens"] > 200
    assert engine.held()["through"] > 5
    (row,) = gateway.get("/v1/engines")["data"]
    assert (row["engine"], row["takes_hints"]) == (engine.url, True)
    request = urllib.request.Request(f"{gateway.url}/v1/sessions/through", method="DELETE")
    urllib.request.urlopen(request, timeout=30).close()
    assert "through" not in engine.held()
    hints = fetch(f"{engine.url}/kvsteward/sessions")["hints"]
    assert hints == {**before, "kept": before["kept"] + 1, "released": before["released"] + 1}

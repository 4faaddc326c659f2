"""Both sources of turns: valid conversations, long results where they are promised, facts that are used again."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from kvsteward.errors import ConfigError
from kvsteward.lab.demo.base import LONG_BYTES, Script, call, result
from kvsteward.lab.demo.facts import facts
from kvsteward.lab.demo.recorded import MAX_TURNS_EACH, recorded_session
from kvsteward.lab.demo.scripted import scripted_session
from kvsteward.lab.demo.workshop import Workshop
from kvsteward.wire.chat import check_tool_pairs

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "agent"
SPOKEN = {"role": "assistant", "content": "ok"}


def history_of(script: Script) -> list[dict]:
    return [m for turn in script.turns for m in (*turn.arrivals, turn.reply or SPOKEN)]


def long_turns(script: Script) -> list[int]:
    return [
        number
        for number, turn in enumerate(script.turns, 1)
        if any(m["role"] == "tool" and len(m["content"].encode()) >= LONG_BYTES for m in turn.arrivals)
    ]


def facts_of(script: Script) -> list[tuple[int, set[str]]]:
    found, history = [], []
    for number, turn in enumerate(script.turns, 1):
        history += turn.arrivals
        reply = turn.reply or SPOKEN
        used = facts([*history, reply], len(history), script.tool_names)
        if used:
            found.append((number, set(used)))
        history.append(reply)
    return found


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return scripted_session(tmp_path_factory.mktemp("shop"), 120)


def test_the_scripted_session_is_a_valid_conversation_of_120_turns(scripted: Script) -> None:
    assert len(scripted.turns) == 120
    check_tool_pairs(history_of(scripted))
    for turn in scripted.turns:
        assert turn.arrivals[-1]["role"] in {"user", "tool"}


def test_long_results_arrive_at_turn_5_and_every_20_turns_after(scripted: Script) -> None:
    assert long_turns(scripted) == [5, 25, 45, 65, 85, 105]


def test_early_values_are_used_again_much_later(scripted: Script) -> None:
    used = dict(facts_of(scripted))
    assert sum(map(len, used.values())) >= 60
    order_ids = [row["id"] for row in orjson.loads(scripted.turns[1].arrivals[0]["content"])["rows"]]
    assert order_ids[1] in used[16]
    assert order_ids[3] in used[36]
    second_list = [row["id"] for row in orjson.loads(scripted.turns[21].arrivals[0]["content"])["rows"]]
    assert second_list[1] in used[56]


def test_the_users_words_do_not_give_the_values_away(scripted: Script) -> None:
    asked = "\n".join(m["content"] for t in scripted.turns for m in t.arrivals if m["role"] == "user")
    for number, values in facts_of(scripted):
        if number % 20 == 16:
            assert not any(v in asked for v in values if v.startswith("ORD-"))


def test_tests_really_fail_with_a_traceback(scripted: Script) -> None:
    printed = scripted.turns[8].arrivals[0]["content"]
    assert "Traceback (most recent call last)" in printed
    assert "AssertionError: 0.0 != 0.05" in printed
    assert "exit status 1" in printed


def test_two_sessions_are_the_same(scripted: Script, tmp_path: Path) -> None:
    again = scripted_session(tmp_path, 120)
    assert [t.reply for t in again.turns] == [t.reply for t in scripted.turns]
    asked = [[m["content"] for m in t.arrivals if m["role"] == "user"] for t in again.turns]
    assert asked == [[m["content"] for m in t.arrivals if m["role"] == "user"] for t in scripted.turns]


def test_a_tool_answers_with_its_error(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, 1)
    assert workshop.call("sql", {"query": "SELECT"}).startswith("error: OperationalError")
    assert "outside the project" in workshop.call("read_file", {"path": "../../etc/hosts"})
    assert workshop.call("package_info", {"names": ["no-such-package-here"]}).startswith("error: PackageNotFoundError")


def conversation(turns: int, long: bool = False) -> dict:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for number in range(turns):
        text = "x" * LONG_BYTES if long and not number else "small"
        messages += [call(f"c{number}", "look", "{}"), result(f"c{number}", text)]
    return {"messages": messages}


def test_recordings_are_joined_with_unique_ids_and_long_results(tmp_path: Path) -> None:
    lines = [orjson.dumps(conversation(MAX_TURNS_EACH + 5)), orjson.dumps(conversation(4, long=True))] * 3
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    script = recorded_session(tmp_path, 45)
    history = history_of(script)
    check_tool_pairs(history)
    ids = [c["id"] for m in history for c in m.get("tool_calls") or ()]
    assert len(ids) == len(set(ids))
    assert {5, 25, 45} <= set(long_turns(script))
    assert [m["role"] for m in history].count("system") == 1


def test_too_few_recordings_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no conversations"):
        recorded_session(tmp_path, 5)
    (tmp_path / "a.jsonl").write_bytes(orjson.dumps(conversation(4, long=True)))
    with pytest.raises(ConfigError, match="turns, not 50"):
        recorded_session(tmp_path, 50)


@pytest.mark.shared_data
def test_the_recorded_session_has_what_is_promised() -> None:
    if not SHARED.is_dir():
        pytest.skip("the recorded conversations are not beside the repository (../shared/data/agent)")
    script = recorded_session(SHARED, 120)
    check_tool_pairs(history_of(script))
    assert len(script.turns) == 120
    assert {5, 25, 45, 65, 85, 105} <= set(long_turns(script))
    assert sum(len(values) for _, values in facts_of(script)) >= 20

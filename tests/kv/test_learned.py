"""What was learned outlives the engine, and a file that cannot be used harms nothing."""

from __future__ import annotations

import json
import logging
import os

import pytest

from kvsteward.kv.vllm import learned
from kvsteward.kv.vllm.learned import EVERY_S, Learned, file_of
from kvsteward.policy.returns import Returns


def taught() -> Returns:
    returns = Returns()
    for n in range(40):
        returns.started("s", 10.0 * n)
        returns.paused("s", 10.0 * n + 1, "tool_calls", ["run_tests"])
    return returns


def test_the_next_process_begins_with_it(tmp_path):
    path, returns = tmp_path / "learned.jsonl", taught()
    Learned(path, 0.0).close(returns)
    assert Learned(path, 0.0).returns(64).rows() == returns.rows()
    assert [p.name for p in tmp_path.iterdir()] == ["learned.jsonl"]


def test_it_is_written_beside_the_engine_every_few_minutes(tmp_path):
    path, returns = tmp_path / "learned.jsonl", taught()
    keeper = Learned(path, 1000.0)
    keeper.save(returns, 1000.0 + EVERY_S - 1)
    keeper.close(None)
    assert not path.exists()
    keeper.save(returns, 1000.0 + EVERY_S)
    keeper.close(None)
    assert Learned(path, 0.0).returns(64).rows() == returns.rows()


def test_without_a_path_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keeper = Learned(None, 0.0)
    keeper.save(keeper.returns(64), EVERY_S)
    keeper.close(taught())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"bins": [40', '"bins": [41'),
        lambda text: text + "[]\n",
        lambda text: text + '{"class": []}\n',
        lambda text: "\x00" + text,
    ],
)
def test_a_file_that_is_cut_or_foreign_is_not_used(tmp_path, caplog, harm):
    path = tmp_path / "learned.jsonl"
    Learned(path, 0.0).close(taught())
    path.write_text(harm(path.read_text()))
    caplog.set_level(logging.WARNING, "vllm.kvsteward")
    assert Learned(path, 0.0).returns(64).rows() == Returns().rows()
    assert "is not used" in caplog.text


def test_a_file_that_is_too_large_or_no_text_is_not_used(tmp_path, monkeypatch):
    path = tmp_path / "learned.jsonl"
    path.write_bytes(b"\xff\xfe")
    assert Learned(path, 0.0).returns(64).rows() == Returns().rows()
    Learned(path, 0.0).close(taught())
    monkeypatch.setattr(learned, "MOST_BYTES", 100)
    assert Learned(path, 0.0).returns(64).rows() == Returns().rows()


def test_a_place_that_cannot_be_written_is_said_and_harms_nothing(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "vllm.kvsteward")
    Learned(tmp_path / "absent" / "learned.jsonl", 0.0).close(taught())
    assert "could not be written" in caplog.text


def test_a_row_for_each_class_and_trait(tmp_path):
    path = tmp_path / "learned.jsonl"
    Learned(path, 0.0).close(taught())
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert ["tool_calls", "run_tests", "3"] in [row.get("class") for row in rows]
    assert sum(rows[0]["returns"]) == 78  # 39 pauses, and 39 times from turn to turn


def taught_of(tool: str, pauses: int = 40, gap_s: float = 9.0) -> Returns:
    returns = Returns()
    for n in range(pauses):
        returns.started("s", (gap_s + 1) * n)
        returns.paused("s", (gap_s + 1) * n + 1, "tool_calls", [tool])
    return returns


def tools_of(returns: Returns) -> set[str]:
    return {row["class"][1] for row in returns.rows() if len(row.get("class", ())) == 3 and row["class"][1]}


def test_ranks_that_share_a_path_lose_nothing_to_each_other(tmp_path):
    path, tools = tmp_path / "learned.jsonl", ("run_tests", "search", "browse")
    for rank, tool in enumerate(tools):
        Learned(path, 0.0, rank).close(taught_of(tool))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "learned.jsonl",
        "learned.jsonl.rank1",
        "learned.jsonl.rank2",
    ]
    begun = [Learned(path, 0.0, rank).returns(64) for rank in range(4)]
    assert tools_of(begun[0]) == set(tools)
    assert all(one.rows() == begun[0].rows() for one in begun)


def test_ranks_that_learn_nothing_new_know_no_more_after_each_start(tmp_path):
    path = tmp_path / "learned.jsonl"
    for rank in range(3):
        Learned(path, 0.0, rank).close(taught())
    for _ in range(3):
        begun = [Learned(path, 0.0, rank).returns(64) for rank in range(3)]
        for rank, returns in enumerate(begun):
            Learned(path, 0.0, rank).close(returns)
    for row, was in zip(begun[0].rows(), taught().rows(), strict=True):
        for name in row.keys() & {"returns", "idle_s", "tilt", "squares"}:
            assert row[name] == pytest.approx(was[name])


def test_a_rank_whose_file_is_damaged_is_left_out_alone(tmp_path, caplog):
    path = tmp_path / "learned.jsonl"
    Learned(path, 0.0, 0).close(taught_of("search"))
    file_of(path, 1).write_text("not a line of ours")
    caplog.set_level(logging.WARNING, "vllm.kvsteward")
    assert tools_of(Learned(path, 0.0).returns(64)) == {"search"}
    assert "learned.jsonl.rank1 is not used" in caplog.text


def test_a_rank_that_is_no_more_is_left_out_after_a_week(tmp_path):
    path = tmp_path / "learned.jsonl"
    for rank, tool in enumerate(("run_tests", "search", "browse")):
        Learned(path, 0.0, rank).close(taught_of(tool))
    now_s = path.stat().st_mtime
    for rank, days in ((1, 6.9), (2, 7.1)):
        os.utime(file_of(path, rank), (now_s, now_s - days * 86_400))
    assert tools_of(Learned(path, 0.0).returns(64)) == {"run_tests", "search"}


def test_files_of_others_are_not_read(tmp_path):
    path = tmp_path / "learned.jsonl"
    for name in (
        "learned.jsonl.rank1.7.new",
        "learned.jsonl.rankx",
        "learned.jsonl.bak",
        "other.jsonl",
        "learned.jsonl.rank",
    ):
        Learned(tmp_path / name, 0.0).close(taught())
    assert Learned(path, 0.0).returns(64).rows() == Returns().rows()

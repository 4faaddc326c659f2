"""The cards of one engine are not equally free: the fullest rank decides how large every pool is."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation

_APART = 0.1


def judge(o: Observation) -> Finding | Clear:
    gpus = o.readings[-1].gpus
    if not gpus:
        raise CannotJudge("no GPU was seen from here")
    size = o.flag(Knob.TENSOR_PARALLEL)
    ranks = int(size) if size is not None and size.isdigit() else o.setup.tensor_parallel
    ranks = o.known(ranks, "the tensor-parallel size")
    if ranks < 2 or len(gpus) != ranks:
        return Clear("one rank") if ranks < 2 else _unclear(len(gpus), ranks)
    shares = {gpu.index: gpu.used_bytes / gpu.total_bytes for gpu in gpus}
    fullest, emptiest = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    if shares[fullest] - shares[emptiest] < _APART:
        return Clear("the cards are equally full")
    return Finding(
        Severity.WARNING,
        Lever.SPLIT,
        "the ranks are not equal: the fullest card decides the pool of all",
        (f"GPU {fullest} is {shares[fullest]:.0%} full, GPU {emptiest} {shares[emptiest]:.0%}",),
        (f"free GPU {fullest} of other processes (display, another replica), or leave it out",),
        "the same memory is lost on each of the other cards",
        "the pool grows to what the next poorest card allows",
    )


def _unclear(cards: int, ranks: int) -> Clear:
    raise CannotJudge(f"{cards} cards are seen for {ranks} ranks: which are the engine's is not clear")


CHECK = Check(
    "rank-imbalance",
    "used memory of the cards of one engine",
    "10 points apart (no source states one)",
    "vllm#13061; eugr/spark-vllm-docker#396",
    judge,
)

"""The pool is full and requests wait: more memory is needed, by smaller KV, by splitting or by buying."""

from __future__ import annotations

from kvsteward.lab.doctor.checks.kv_format import kv_bits
from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation, median, share

_FULL = 0.9
_MOSTLY = 0.5


def judge(o: Observation) -> Finding | Clear:
    usage, waiting = o.seen("kv_usage_ratio"), o.seen("waiting")
    if o.since_start and max(waiting) > 0:
        raise CannotJudge("one page only: a queue may be a moment")
    if median(usage) < _FULL or share(waiting, 1) < _MOSTLY:
        return Clear(f"KV usage {median(usage):.0%}, {median(waiting):.0f} waiting")
    busy = [gpu.busy_ratio for reading in o.readings for gpu in reading.gpus if gpu.busy_ratio is not None]
    evidence = [f"KV usage {median(usage):.0%} and {median(waiting):.0f} waiting in the middle reading"]
    if busy:
        evidence.append(f"GPU busy {sum(busy) / len(busy):.0%} of the time")
    try:
        small = kv_bits(o) <= 8
    except CannotJudge:
        small = False
    more = o.changes((Knob.DATA_PARALLEL, 2), (Knob.TENSOR_PARALLEL, "2 (if weights leave the pool little)"))
    return Finding(
        Severity.WARNING,
        Lever.SCALE if small else Lever.QUANTISE,
        "the KV pool is full and requests wait for it",
        tuple(evidence),
        more if small else ("the KV format first, see kv-format", *more),
        "every new request waits until another ends",
        "twice the replicas hold twice the sessions" if small else "an 8-bit cache holds twice the tokens",
    )


CHECK = Check(
    "saturated",
    "KV usage and queue are high together",
    "the middle reading has usage >= 90 %, and half of the readings have a queue",
    "docs.vllm.ai/en/stable/configuration/optimization; docs.sglang.io hyperparameter tuning",
    judge,
)

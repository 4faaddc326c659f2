"""Requests wait although the pool has room: a limit other than memory holds them back."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation, share

_MOSTLY = 0.6
_LOW_USE = {"sglang": 0.9}
_LOW_USE_ELSEWHERE = 0.5


def judge(o: Observation) -> Finding | Clear:
    waiting, running = o.seen("waiting"), o.seen("running")
    queued = share(waiting, 1)
    if o.since_start and queued:
        raise CannotJudge("one page only: a queue may be a moment")
    if queued < _MOSTLY:
        return Clear("nobody waits for long")
    slots = o.setup.dialect == "llama-server"
    evidence = [
        f"up to {max(waiting):.0f} waiting, in {queued:.0%} of the readings",
        f"{max(running):.0f} running at most",
    ]
    if not slots:
        usage = max(o.seen("kv_usage_ratio"))
        if usage >= _LOW_USE.get(o.setup.dialect, _LOW_USE_ELSEWHERE):
            return Clear(f"they wait for memory: KV usage {usage:.0%}")
        evidence.append(f"KV usage {usage:.0%} at most")
    else:
        used = _slot_use(o)
        if used is not None and used >= _LOW_USE_ELSEWHERE:
            return Clear(f"the slots are full: {used:.0%} of their context is in use")
        if used is not None:
            evidence.append(f"all slots taken, {used:.0%} of their context in use")
    busy = [gpu.busy_ratio for reading in o.readings for gpu in reading.gpus if gpu.busy_ratio is not None]
    if busy:
        evidence.append(f"GPU busy {sum(busy) / len(busy):.0%} of the time")
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        "requests wait although the KV pool has room: a limit on their number holds them back, not memory",
        tuple(evidence),
        _remedies(o, int(max(running)), int(max(waiting))),
        "time in the queue while memory lies idle",
        "they run at once; the pool fills",
    )


def _slot_use(o: Observation) -> float | None:
    slots = o.readings[-1].slots
    whole = sum(slot.context_tokens for slot in slots or ())
    return sum(s.prompt_tokens + s.decoded_tokens for s in slots or ()) / whole if whole else None


def _remedies(o: Observation, running: int, waiting: int) -> tuple[str, ...]:
    lines = o.changes((Knob.MAX_RUNNING, running + waiting))
    if o.setup.dialect == "sglang":
        return (*o.changes((Knob.CONSERVATIVENESS, 0.3)), *lines)
    if o.setup.dialect == "llama-server":
        return (*lines, *o.changes((Knob.UNIFIED, None)))
    return lines


CHECK = Check(
    "queue-low-use",
    "requests wait in most readings while KV usage stays low",
    "60 % of the readings; usage under 90 % (SGLang) or 50 % (elsewhere: no source states one)",
    "docs.sglang.io hyperparameter tuning; NVIDIA retail-shopping-assistant PR#95",
    judge,
)

"""The pool is too small for what runs: requests are thrown out and computed again.

Any rise of the preemption counter in the window is a finding, since each one is work done twice. It is critical when it
hits one request in ten or more.
"""

from __future__ import annotations

from kvsteward.lab.doctor.finding import Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation, or_none

_OFTEN = 0.1


def judge(o: Observation) -> Finding | Clear:
    preempted = o.count("preemptions_total")
    if preempted <= 0:
        return Clear("no request was preempted in the window")
    usage, running = max(o.seen("kv_usage_ratio")), max(o.seen("running"))
    evidence = [f"{preempted:,.0f} preemptions in {_span(o)}", f"KV usage up to {usage:.0%}, {running:.0f} running"]
    finished = or_none(lambda: o.risen("finished"))
    if finished is not None:
        evidence.append(f"{finished:,.0f} requests ended in the same time")
    if o.setup.kv_capacity_tokens and running >= 1:
        evidence.append(f"the pool holds {o.setup.kv_capacity_tokens:,} tokens")
    often = finished is None or preempted >= _OFTEN * max(1.0, finished)
    return Finding(
        Severity.CRITICAL if often else Severity.WARNING,
        Lever.TUNE,
        "the KV pool is too small for what runs at once: requests are thrown out and computed again",
        tuple(evidence),
        _remedies(o, int(running)),
        "each preempted request is prefilled again, and its client waits for it twice",
        "no recomputation; those that do not fit wait in the queue instead",
    )


def _remedies(o: Observation, running: int) -> tuple[str, ...]:
    fewer = max(1, running // 2)
    lines = o.changes((Knob.MAX_RUNNING, fewer))
    if o.setup.dialect == "sglang":
        lines += o.changes((Knob.CONSERVATIVENESS, 1.3))
    lines += o.changes((Knob.MEMORY_SHARE, "0.95 (if the card has room)"))
    return lines


def _span(o: Observation) -> str:
    return "the time since its start" if o.since_start else f"{o.window_s:.0f} s"


CHECK = Check(
    "preemption",
    "num_preemptions (SGLang: retracted requests) rises while KV usage is near 1",
    "any rise; critical from one in ten requests",
    "docs.vllm.ai/en/stable/configuration/optimization (preemption)",
    judge,
)

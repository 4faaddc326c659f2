"""State slots of recurrent layers run out before tokens do: requests wait, and the token pool is nearly free."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation

_FULL = 0.9
_LOW = 0.5


def judge(o: Observation) -> Finding | Clear:
    if o.setup.dialect == "llama-server":
        return Clear("each slot has its own state")
    states = [v for r in o.readings if (v := r.page.largest(o.metrics.state_usage)) is not None]
    if not states:
        raise CannotJudge(f"{o.setup.dialect} does not report the use of state slots")
    usage, waiting = max(o.seen("kv_usage_ratio")), max(o.seen("waiting"))
    if max(states) < _FULL or usage >= _LOW or waiting < 1:
        return Clear(f"state slots {max(states):.0%}, tokens {usage:.0%}, {waiting:.0f} waiting")
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        "the state slots of the recurrent layers are used up while tokens are free",
        (f"state slots {max(states):.0%}, tokens {usage:.0%}, up to {waiting:.0f} waiting",),
        o.changes((Knob.STATE_RATIO, 1.8), (Knob.MAX_RUNNING, max(1, int(max(o.seen("running")))))),
        "requests wait for a state while the token pool lies idle",
        "more requests at once from the same memory",
    )


CHECK = Check(
    "state-pages",
    "use of state slots near 1 while token usage is low and requests wait",
    "90 % and 50 % (one report: a queue at 35 % token usage)",
    "NVIDIA retail-shopping-assistant PR#95; jpezzulli/sglang-rtxpro6000#5",
    judge,
)

"""Requests that nobody waits for any more: clients that leave, and work that goes on after them.

Three signs, the surest first: more requests at work than client connections in every reading; answers that clients cut
off; running requests that neither end nor are joined by others while they write far more than answers here ever do.
One long answer alone is no sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation, or_none, tokens

_READINGS = 3
_LEAST_ABORTS = 3
_ABORTED_SHARE = 0.2
_HISTORY = 10
_TIMES_LONGER = 2.0
_LEAST_TOKENS = 1024


def judge(o: Observation) -> Finding | Clear:
    found = _without_client(o) or _left(o) or _endless(o)
    if found is not None:
        return found
    running = o.seen("running")
    if max(running) == 0:
        return Clear("nothing runs")
    if min(running) > 0 and not _moved(o) and not _clients_known(o):
        raise CannotJudge(
            "requests ran through the whole window; a longer --window tells a long answer from a lost one"
        )
    return Clear("requests end, or somebody waits for them")


def _without_client(o: Observation) -> Finding | None:
    pairs = [(r.page.load.running or 0, r.clients) for r in o.readings if r.clients is not None]
    orphans = [running - clients for running, clients in pairs if clients is not None]
    if len(orphans) < _READINGS or min(orphans) < 1:
        return None
    running, clients = pairs[-1]
    evidence = [f"{running} requests at work, {clients} client connections, in each of {len(pairs)} readings"]
    unstreamed = [s for s in o.readings[-1].slots or () if s.busy and s.streamed is False]
    if unstreamed:
        evidence.append(f"{len(unstreamed)} of them are not streamed: this server sees a client leave only in a stream")
    return _finding(o, Severity.CRITICAL, "the engine works on requests whose clients have gone", evidence)


def _left(o: Observation) -> Finding | None:
    cut, ended = _cut_off(o), or_none(lambda: o.risen("finished"))
    if cut is None or ended is None or cut < _LEAST_ABORTS or cut < _ABORTED_SHARE * max(ended, cut):
        return None
    evidence = [f"{cut:,.0f} requests were cut off by their clients, {ended:,.0f} ended"]
    return _finding(o, Severity.WARNING, "clients leave before their answer is complete", evidence)


def _cut_off(o: Observation) -> float | None:
    """Requests that their clients left. vLLM 0.32 does not count them: they had a first token, did not end, and do not
    run any more. Those that run at the end are taken off, so that the figure is never too high."""
    label = o.metrics.aborted_label
    counted = or_none(lambda: o.risen("aborted", **(dict([label]) if label else {})))
    begun, ended = or_none(lambda: o.histogram("first_token_s").count), or_none(lambda: o.risen("finished"))
    running = o.readings[-1].page.load.running
    if o.setup.dialect != "vllm" or begun is None or ended is None or running is None:
        return counted
    return max(counted or 0.0, begun - ended - running)


def _endless(o: Observation) -> Finding | None:
    running = o.seen("running")
    if min(running) < 1 or len(set(running)) > 1 or _moved(o):
        return None
    try:
        history, written = o.lifetime("answer_lengths"), o.risen("generation_tokens")
    except CannotJudge:
        return None
    usual = history.bound_of(0.99)
    each = written / running[-1]
    if (
        usual is None
        or math.isinf(usual)
        or history.count < _HISTORY
        or each < max(_LEAST_TOKENS, _TIMES_LONGER * usual)
    ):
        return None
    evidence = [
        f"{running[-1]:.0f} requests ran through all of {o.window_s:.0f} s, none ended and none came",
        f"each wrote {tokens(each)} tokens in that time; 99 % of {history.count:,.0f} earlier answers had "
        f"{tokens(usual)} or fewer",
    ]
    return _finding(
        o, Severity.WARNING, "answers that do not end: a runaway, or a client that no longer reads", evidence
    )


def _moved(o: Observation) -> bool:
    """Something ended or came in the window."""
    signs: tuple[Callable[[], float], ...] = (
        lambda: o.risen("finished"),
        lambda: o.count("prefix_queried_tokens_total"),
    )
    return any((or_none(read) or 0) > 0 for read in signs)


def _clients_known(o: Observation) -> bool:
    return any(reading.clients is not None for reading in o.readings)


def _finding(o: Observation, severity: Severity, what: str, evidence: list[str]) -> Finding:
    remedies = ["close the connection to the engine when a client leaves (kvsteward serve does), and stream"]
    remedies += o.changes((Knob.ANSWER_LIMIT, 4096))
    remedies.append("set max_tokens in every request; raise the client's timeout above the queue and prefill time")
    return Finding(
        severity,
        Lever.TUNE,
        what,
        tuple(evidence),
        tuple(remedies),
        "each holds its KV blocks and a place in the batch until its limit of tokens",
        "their KV and their places are free for those who wait",
    )


CHECK = Check(
    "abandoned",
    "running > client connections; or cut-off answers; or running without an end beyond 2 x the usual answer",
    "every reading; 3 cut off and 20 %; 1,024 tokens and 2 x the 99th percentile (no source states one)",
    "sglang#36333, sglang#36876; vllm PR#32442; llama-server: a request that is not streamed outlives its client",
    judge,
)

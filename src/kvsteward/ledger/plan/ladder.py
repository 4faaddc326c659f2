"""The order in which to make room: shorten the context, tune the scheduler, quantise KV, split, and only then buy.

Knows nothing of command lines. Invariant: every step starts from the one before and says in sessions what it gained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvsteward.errors import ConfigError
from kvsteward.ledger.plan.pool import Deployment
from kvsteward.ledger.plan.workload import Workload

TUNED_UTILIZATION = 0.95
SMALL_BATCH_TOKENS = 2_048
TENSOR_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Step:
    """One rung: what changed, sessions before and after, and whether that is enough for the workload."""

    name: str
    change: str
    sessions_before: int
    sessions_after: int
    enough: bool
    why: str

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "change": self.change,
            "sessions_before": self.sessions_before,
            "sessions_after": self.sessions_after,
            "gain_ratio": round(self.sessions_after / self.sessions_before, 3) if self.sessions_before else None,
            "enough": self.enough,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Rung:
    """A step and the deployment that it leads to."""

    step: Step
    deployment: Deployment


def climb(start: Deployment, workload: Workload, context_tokens: int) -> Iterator[Rung]:
    """The rungs from `start`, an engine with its defaults at the model's own limit, to more machines."""
    limit = start.max_model_len
    length = workload.typical_tokens
    current, before = start, start.sessions(limit).low
    for name, move in _MOVES:
        changed, change, why = move(current, workload, context_tokens)
        after = changed.sessions(length).low
        if name != "shorten the context" and after < before:
            changed, after, change = current, before, "no change helps here"
        yield Rung(Step(name, change, before, after, after >= workload.sessions, why), changed)
        current, before = changed, after
    yield _machines(current, workload, before)


Move = tuple[Deployment, str, str]


def _shorten(now: Deployment, workload: Workload, context_tokens: int) -> Move:
    change = f"max_model_len {now.max_model_len:,} -> {context_tokens:,}; {workload.typical_tokens:,} tokens a session"
    why = "a pool sized for the model's limit holds few; sessions are as long as the workload's, not the model's"
    return now.with_(max_model_len=context_tokens), change, why


def _tune(now: Deployment, workload: Workload, _context: int) -> Move:
    running = min(workload.sessions, 256)
    batch = SMALL_BATCH_TOKENS if any(layer.span_tokens for layer in now.spec.layers) else now.max_num_batched_tokens
    changed = now.with_(utilization=TUNED_UTILIZATION, max_num_seqs=running, max_num_batched_tokens=batch)
    change = (
        f"utilization {now.utilization:.2f} -> {TUNED_UTILIZATION}, max_num_seqs {running}, batched tokens {batch:,}"
    )
    why = "the device is the engine's alone; fewer logits to sample free activation memory; windows pay for the batch"
    return changed, change, why


def _quantise(now: Deployment, _workload: Workload, _context: int) -> Move:
    why = "half the bytes a token; recurrent states stay as they are. Check the quality on your own prompts"
    return now.with_(kv_dtype="fp8"), f"KV dtype {now.kv_dtype} -> fp8", why


def _split(now: Deployment, workload: Workload, _context: int) -> Move:
    devices = now.ranks * now.replicas
    best, most = now, now.sessions(workload.typical_tokens).low
    for tp in TENSOR_SIZES:
        if tp * now.pp > devices:
            continue
        trial = now.with_(tp=tp, replicas=devices // (tp * now.pp))
        held = _sessions_or_none(trial, workload)
        if held is not None and held > most:
            best, most = trial, held
    change = f"TP {now.tp} x {now.replicas} -> TP {best.tp} x {best.replicas} replicas"
    why = "splitting frees weights for KV, and its overhead, until KV heads run out"
    if any(not layer.sharded for layer in now.spec.layers):
        why = f"a latent is on every rank: data-parallel attention would hold up to {best.tp} x as many sessions"
    return best, change, why


def _sessions_or_none(trial: Deployment, workload: Workload) -> int | None:
    try:
        return trial.sessions(workload.typical_tokens).low if trial.starts else None
    except ConfigError:  # this model cannot be split so
        return None


def _machines(now: Deployment, workload: Workload, before: int) -> Rung:
    need = -(-workload.sessions // before) if before else None
    devices = now.ranks * now.replicas
    if before >= workload.sessions:
        change, after = "none needed", before
    elif need is None:
        change, after = "this device holds no session: a larger one, or more of them in one TP group", 0
    else:
        change, after = f"{need} x {devices} = {need * devices} devices", before * need
    step = Step("more machines", change, before, after, after >= workload.sessions, "the last resort, and linear")
    return Rung(step, now)


_MOVES = (
    ("shorten the context", _shorten),
    ("tune the scheduler", _tune),
    ("quantise the KV cache", _quantise),
    ("split over devices (TP, P/D)", _split),
)

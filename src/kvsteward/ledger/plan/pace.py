"""How long a turn takes, by roofline: what decides how many sessions run at once and what a lost prefix costs.

Knows devices, not engines. Invariant: an estimate, called so; nothing about memory depends on it.

A decode step reads the weights and the running sessions' KV once (60 % of peak bandwidth); a prefill computes 2 x
parameters operations a token (40 % of peak, dense 16 bit). Source: Pope 2022 (Efficiently Scaling Transformer
Inference); the shares are usual for H100-class devices and not fitted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsteward.ledger.plan.pool import Deployment
from kvsteward.ledger.plan.workload import Workload

BANDWIDTH_SHARE = 0.6
ARITHMETIC_SHARE = 0.4
SOURCE = "roofline estimate (Pope 2022): 60 % of bandwidth, 40 % of arithmetic"
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a turn with its prefix cached, of a prefill of all of it, and sessions in a turn at once."""

    turn_s: float
    cold_prefill_s: float
    running: float


def pace(at: Deployment, workload: Workload) -> Pace:
    """The pace of `workload` on one replica. The running sessions and the step time depend on each other: iterated."""
    tokens = workload.context_p50_tokens
    cold = _prefill_s(at, tokens)
    warm = cold * (1 - workload.reused_ratio)
    share = min(workload.sessions, max(1, at.sessions(workload.typical_tokens).low)) / at.replicas
    running, turn = 1.0, warm
    size = at.session_bytes(workload.typical_tokens)
    for _ in range(_ROUNDS):
        turn = warm + workload.output_tokens * _step_s(at, running, size)
        running = max(1.0, min(share, workload.running(turn) / at.replicas))
    return Pace(turn, cold, running)


def _step_s(at: Deployment, running: float, session_bytes: int) -> float:
    return (at.rank_weight_bytes + running * session_bytes) / (BANDWIDTH_SHARE * at.device.bandwidth_gb_s * 1e9)


def _prefill_s(at: Deployment, tokens: int) -> float:
    parameters = at.spec.weights.active if at.spec.weights is not None else at.weight_bytes / 2
    return 2 * parameters * tokens / (ARITHMETIC_SHARE * at.ranks * at.device.bf16_tflops * 1e12)

"""What a wished time to the first token and time per token mean for the scheduler: fewer at once, smaller chunks.

Knows the roofline of `ledger.plan.pace`. Invariant: a setting is only lowered, and never below what the engine takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvsteward.ledger.plan import Plan, Workload
from kvsteward.ledger.plan.commands import Settings
from kvsteward.ledger.plan.pace import BANDWIDTH_SHARE, Pace, pace

SMALLEST_CHUNK_TOKENS = 512
_CHUNK_STEP = 256


@dataclass(frozen=True, slots=True)
class Target:
    """A wish, what the roofline expects after the settings were changed for it, and the reason."""

    name: str
    wanted_ms: float
    expected_ms: float
    why: str

    @property
    def met(self) -> bool:
        return self.expected_ms <= self.wanted_ms


def aim(plan: Plan, load: Workload, ttft_ms: float | None, tpot_ms: float | None) -> tuple[Settings, list[Target]]:
    """The settings for the wishes, and whether they are met: estimates of the roofline without queueing."""
    settings, targets, speed = plan.settings, [], pace(plan.deployment, load)
    if tpot_ms is not None:
        settings, target = _per_token(plan, load, speed, tpot_ms)
        targets.append(target)
    if ttft_ms is not None:
        cold = 1e3 * speed.cold_prefill_s
        why = (
            f"new tokens after a cached prefix; from nothing {cold:,.0f} ms: keep prefixes, or split prefill off (P/D)"
        )
        targets.append(Target("TTFT", ttft_ms, 1e3 * speed.prefill_s, why))
    return settings, targets


def _per_token(plan: Plan, load: Workload, speed: Pace, tpot_ms: float) -> tuple[Settings, Target]:
    at = plan.deployment
    rate = BANDWIDTH_SHARE * at.device.bandwidth_gb_s * 1e9
    size = at.session_bytes(load.typical_tokens)
    affordable = int((tpot_ms / 1e3 * rate - at.rank_weight_bytes) // size)
    running = max(1, min(plan.settings.max_num_seqs, affordable))
    step_ms = 1e3 * (at.rank_weight_bytes + running * size) / rate
    per_token_ms = 1e3 * speed.cold_prefill_s / load.context_p50_tokens
    chunk = int(tpot_ms / per_token_ms) // _CHUNK_STEP * _CHUNK_STEP
    chunk = min(plan.settings.max_num_batched_tokens, max(SMALLEST_CHUNK_TOKENS, running, chunk))
    why = (
        f"{running} at once (a step reads {at.rank_weight_bytes / 1e9:.1f} GB of weights and {size / 1e9:.2f} GB each)"
    )
    if affordable < 1:
        why += "; the weights alone take longer: more TP ranks, or quantised weights"
    changed = replace(plan.settings, max_num_seqs=running, max_num_batched_tokens=chunk)
    return changed, Target(
        "TPOT", tpot_ms, step_ms, f"{why}; a prefill chunk of {chunk:,} takes {chunk * per_token_ms:.0f} ms"
    )

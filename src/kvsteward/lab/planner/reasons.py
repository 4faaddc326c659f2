"""Each setting of a plan with the reason for its value. Knows plans; invariant: no setting without a reason."""

from __future__ import annotations

from kvsteward.ledger import Figure
from kvsteward.ledger.plan import Plan, Workload
from kvsteward.ledger.plan.commands import Settings
from kvsteward.ledger.plan.pace import pace

Reason = tuple[str, str, str]
PD_WORTH_SHARE = 0.3


def reasons(plan: Plan, settings: Settings, load: Workload) -> list[Reason]:
    """Setting, value, reason."""
    figures = {figure.name: figure for figure in plan.figures}
    limit = plan.deployment.spec.max_context_tokens
    length = figures["max_model_len"].formula + (f"; the model's limit is {limit:,}" if limit else "")
    return [
        ("max_model_len", f"{settings.max_model_len:,}", length),
        ("max_num_seqs", str(settings.max_num_seqs), _running(plan, settings, figures)),
        ("max_num_batched_tokens", f"{settings.max_num_batched_tokens:,}", _batch(plan, settings)),
        ("gpu_memory_utilization", f"{settings.utilization:.2f}", _share(plan, settings)),
        ("KV dtype", _dtype(plan), _dtype_reason(plan)),
        ("TP x replicas", f"{settings.tp} x {plan.replicas}", _split(plan, settings)),
        ("PP", str(settings.pp), "one stage: TP inside the node holds a request, and stages would add latency"),
        ("P/D", *_prefill(plan, load)),
        ("prefix caching", "on" if settings.prefix_caching else "off", _prefix(plan, load)),
        ("window", *_window(plan)),
    ]


def _running(plan: Plan, settings: Settings, figures: dict[str, Figure]) -> str:
    if settings.max_num_seqs < plan.settings.max_num_seqs:
        return f"lowered from {plan.settings.max_num_seqs} for the time per token; more turns at once wait"
    return figures["max_num_seqs"].formula


def _batch(plan: Plan, settings: Settings) -> str:
    if settings.max_num_batched_tokens < plan.settings.max_num_batched_tokens:
        return f"lowered from {plan.settings.max_num_batched_tokens:,}: a prefill chunk holds up every decoding session"
    if any(layer.span_tokens for layer in plan.deployment.spec.layers):
        return "each windowed layer is charged for these tokens beside its window"
    return "no windowed layer pays for it; a large chunk prefills faster"


def _share(plan: Plan, settings: Settings) -> str:
    device = plan.deployment.device
    if plan.engine == "llamacpp":
        return f"llama-server has no such flag: keep {1 - settings.utilization:.0%} of {device.usable_gib:.1f} GiB free"
    return f"of {device.usable_gib:.1f} GiB that the driver reports; nothing else may run on the GPU"


def _dtype(plan: Plan) -> str:
    kind = plan.settings.kv_dtype
    return {"auto": "f16", "fp8": "q8_0"}.get(kind, kind) if plan.engine == "llamacpp" else kind


def _dtype_reason(plan: Plan) -> str:
    step = next((step for step in plan.steps if step.name.startswith("quantise")), None)
    if step is None:
        return "the model's own type is enough" if plan.settings.kv_dtype == "auto" else "as asked"
    return f"{step.sessions_before:,} -> {step.sessions_after:,} sessions; check the quality on your own prompts"


def _split(plan: Plan, settings: Settings) -> str:
    at = plan.deployment
    weights = f"{at.rank_weight_bytes / 2**30:.1f} GiB of weights a GPU"
    return f"{weights}; {plan.pool.low / 2**30:.1f} GiB or more for KV; a session stays on its replica"


def _prefill(plan: Plan, load: Workload) -> tuple[str, str]:
    speed = pace(plan.deployment, load)
    share = speed.prefill_s / speed.turn_s if speed.turn_s else 0.0
    cause = f"prefill, {load.reused_ratio:.0%} cached, is {speed.prefill_s:.2f} of {speed.turn_s:.1f} s of a turn"
    if share < PD_WORTH_SHARE or plan.replicas < 2:
        return "together", f"{cause}; worth a split from {PD_WORTH_SHARE:.0%} on, with two replicas"
    return "consider", f"{cause}: one of {plan.replicas} replicas for prefill frees the others' steps"


def _prefix(plan: Plan, load: Workload) -> str:
    lost = pace(plan.deployment, load).cold_prefill_s
    return f"{load.reused_ratio:.0%} of a prompt was there before; a lost prefix costs {lost:.2f} s at p50"


def _window(plan: Plan) -> tuple[str, str]:
    spans = [layer.span_tokens for layer in plan.deployment.spec.layers if layer.span_tokens]
    if not spans:
        return (
            "none",
            f"every layer keeps all; `kvsteward serve --budget {plan.settings.max_model_len}` holds sessions to it",
        )
    total = len(plan.deployment.spec.layers)
    return f"{max(spans):,}", f"{len(spans)} of {total} layers keep no more than this of a session"

"""The plan: the smallest deployment that starts, its settings, their reasons, and the ladder from the defaults to it.

Knows the other files of this folder. Invariant: the printed command starts on the device it was planned for, at the
low end of the pool; otherwise there is a ConfigError that says what is too large.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from kvsteward.errors import ConfigError
from kvsteward.ledger.device import Device
from kvsteward.ledger.figures import Figure, table
from kvsteward.ledger.plan.commands import Settings, command
from kvsteward.ledger.plan.ladder import TENSOR_SIZES, Step, climb
from kvsteward.ledger.plan.overhead import Calibration, Interval
from kvsteward.ledger.plan.pace import SOURCE as PACE_SOURCE
from kvsteward.ledger.plan.pace import Pace, pace
from kvsteward.ledger.plan.pool import Deployment
from kvsteward.ledger.plan.workload import Workload
from kvsteward.ledger.spec import Assumption, ModelSpec

DEFAULT_UTILIZATION = 0.90
DEFAULT_BATCH_TOKENS = 8_192
DEFAULT_SEQS = 1_024
LENGTH_STEP = 256
HEADROOM = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings and how they came about. `sessions` is what fits at once, `steps` the ladder that led there."""

    settings: Settings
    deployment: Deployment
    engine: str
    replicas: int
    pool: Interval
    sessions: Interval
    figures: tuple[Figure, ...]
    steps: tuple[Step, ...]
    command: str
    enough: bool
    assumed: tuple[Assumption, ...]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Name, value, formula, source: one row a figure."""
        return table(self.figures)

    def to_dict(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "command": self.command,
            "settings": asdict(self.settings),
            "replicas": self.replicas,
            "enough": self.enough,
            "kv_pool_bytes": self.pool.to_dict(),
            "sessions": self.sessions.to_dict(),
            "figures": [figure.to_dict() for figure in self.figures],
            "ladder": [step.to_dict() for step in self.steps],
            "assumed": [item.to_dict() for item in self.assumed],
        }


def make_plan(
    spec: ModelSpec,
    device: Device,
    count: int,
    workload: Workload,
    *,
    model: str,
    engine: str = "vllm",
    weight_dtype: str = "auto",
    weight_bytes: int | None = None,
    kv_dtype: str = "auto",
    allow_fp8_kv: bool = True,
    compact_to_tokens: int | None = None,
    known: Calibration | None = None,
) -> Plan:
    """A plan for `count` devices. `kv_dtype` is where the ladder starts: the model's own, or one already quantised.

    Sessions longer than the model's limit, or than `compact_to_tokens`, are taken as compacted to it. `known` is what a
    start-up log said. ConfigError if the model does not fit the devices or its cache is not known.
    """
    if count < 1:
        raise ConfigError(f"a plan needs a device, not {count}")
    limits = [limit for limit in (compact_to_tokens, spec.max_context_tokens) if limit is not None]
    asked, workload = workload, workload.capped(min(limits)) if limits else workload
    weights = spec.weight_bytes(weight_dtype) if weight_bytes is None else weight_bytes
    context = context_length(spec, workload)
    start = _smallest(spec, device, count, engine, weights, context, known, kv_dtype)
    start = replace(start, max_model_len=spec.max_context_tokens or context)
    chosen, steps = replace(start, max_model_len=context), []
    for rung in climb(start, workload, context, quantise=allow_fp8_kv and kv_dtype == "auto"):
        steps.append(rung.step)
        chosen = rung.deployment
        if rung.step.enough:
            break
    if not chosen.starts:
        raise _too_small(chosen)
    return _plan(chosen, workload, asked, steps, model)


def context_length(spec: ModelSpec, workload: Workload) -> int:
    """`max_model_len`: the 99th percentile and the answer, in steps of 256, at most what the model takes."""
    wanted = -(-(workload.context_p99_tokens + workload.output_tokens) // LENGTH_STEP) * LENGTH_STEP
    return min(wanted, spec.max_context_tokens or wanted)


def _smallest(
    spec: ModelSpec,
    device: Device,
    count: int,
    engine: str,
    weights: int,
    context: int,
    known: Calibration | None,
    kv_dtype: str,
) -> Deployment:
    """The fewest ranks on which one request of `context` tokens fits; the other devices hold replicas."""
    last: Deployment | None = None
    for tp in (size for size in TENSOR_SIZES if size <= count):
        last = Deployment(
            spec, device, engine, tp, 1, count // tp, weights, kv_dtype, DEFAULT_UTILIZATION, context, DEFAULT_SEQS,
            DEFAULT_BATCH_TOKENS, known,
        )  # fmt: skip
        try:
            tuned = replace(
                last, kv_dtype="fp8" if kv_dtype == "auto" else kv_dtype, utilization=0.95, max_num_seqs=256
            )
            if last.starts or tuned.starts:
                return last
        except ConfigError:
            if tp == 1:
                raise
    raise _too_small(last) if last is not None else ConfigError("no device to plan for")


def _too_small(tried: Deployment) -> ConfigError:
    need = tried.rank_weight_bytes + tried.overhead.total.high + tried.session_bytes(tried.max_model_len)
    have = tried.device.usable_gib * tried.utilization
    return ConfigError(
        f"{tried.ranks} x {tried.device.name} is too small: a rank needs {need / 2**30:.1f} GiB "
        f"(weights {tried.rank_weight_bytes / 2**30:.1f}) and has {have:.1f}",
        hint="More devices, a quantised checkpoint, or a shorter context.",
    )


def _plan(chosen: Deployment, workload: Workload, asked: Workload, steps: list[Step], model: str) -> Plan:
    held, speed = chosen.sessions(workload.typical_tokens), pace(chosen, workload)
    fitting = max(1, held.low // chosen.replicas)
    wanted = max(1, math.ceil(HEADROOM * speed.running))
    if chosen.engine == "llamacpp":  # a slot is a session's place, in a turn or not
        wanted = math.ceil(workload.sessions / chosen.replicas)
    running = min(chosen.max_num_seqs, fitting, wanted)
    settings = Settings(
        model=model,
        tp=chosen.tp,
        pp=chosen.pp,
        max_model_len=chosen.max_model_len,
        max_num_seqs=running,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        utilization=chosen.utilization,
        kv_dtype=chosen.kv_dtype,
        prefix_caching=workload.reused_ratio > 0,
        static_ratio=chosen.static_ratio,
    )
    return Plan(
        settings=settings,
        deployment=chosen,
        engine=chosen.engine,
        replicas=chosen.replicas,
        pool=chosen.pool,
        sessions=held,
        figures=(*_memory(chosen), *_demand(chosen, workload, asked), *_pace_figures(speed, fitting, wanted, running)),
        steps=tuple(steps),
        command=command(chosen.engine, settings),
        enough=held.low >= workload.sessions,
        assumed=chosen.spec.assumed,
    )


def _memory(chosen: Deployment) -> tuple[Figure, ...]:
    extra, pool, device = chosen.overhead, chosen.pool, chosen.device
    share = chosen.utilization * device.usable_gib * 2**30
    weights = f"{chosen.weight_bytes:,} B / {chosen.ranks} ranks"
    identity = f"share - the four above: {_range(pool)}"
    return (
        Figure("weights a rank", chosen.rank_weight_bytes, "B", weights, "parameters of the config, or the log"),
        Figure("activations", extra.activation.best, "B", _range(extra.activation), extra.source),
        Figure("communication", extra.communication.best, "B", _range(extra.communication), extra.source),
        Figure("CUDA graphs", extra.graphs.best, "B", _range(extra.graphs), extra.source),
        Figure("share of a device", int(share), "B", f"{chosen.utilization} x {device.usable_gib} GiB", device.source),
        Figure("KV pool a rank", pool.best, "B", identity, "budget identity: exact in 58 of 59 vLLM logs"),
    )


def _demand(chosen: Deployment, workload: Workload, asked: Workload) -> tuple[Figure, ...]:
    length = workload.typical_tokens
    size, held = chosen.session_bytes(length), chosen.sessions(length)
    rules = f"allocation rules of {chosen.engine}"
    fit = f"{chosen.replicas} replicas x floor(pool / session); {held.low} .. {held.high}"
    charged = f"{length:,} tokens, KV as {chosen.kv_dtype}"
    batch = "a windowed layer is charged for these tokens beside its window"
    return (
        Figure("max_model_len", chosen.max_model_len, "tokens", _length_formula(workload, asked), "the workload's p99"),
        Figure("KV a session", size, "B", charged, rules),
        Figure("sessions that fit", held.low, "sessions", fit, "the low end of the pool"),
        Figure("batched tokens", chosen.max_num_batched_tokens, "tokens", batch, rules),
    )


def _pace_figures(speed: Pace, fitting: int, wanted: int, running: int) -> tuple[Figure, ...]:
    chosen = f"min({fitting} that fit, {wanted} wanted), a replica; {speed.running:.1f} are in a turn at once"
    return (
        Figure("turn", round(speed.turn_s, 2), "s", "new prompt tokens, then the answer", PACE_SOURCE),
        Figure(
            "lost prefix", round(speed.cold_prefill_s, 2), "s", "prefill of a p50 context from nothing", PACE_SOURCE
        ),
        Figure("max_num_seqs", running, "requests", chosen, "Little's law over turns and pauses"),
    )


def _range(interval: Interval) -> str:
    return f"{interval.low / 2**30:.2f} .. {interval.high / 2**30:.2f} GiB"


def _length_formula(workload: Workload, asked: Workload) -> str:
    formula = f"p99 {workload.context_p99_tokens:,} + answer {workload.output_tokens:,}, up to {LENGTH_STEP}"
    if asked.context_p99_tokens > workload.context_p99_tokens:
        formula += f"; longer sessions (p99 {asked.context_p99_tokens:,}) must be compacted"
    return formula

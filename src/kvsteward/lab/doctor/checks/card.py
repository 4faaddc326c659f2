"""The card is eaten by something other than KV: another process, or weights that leave the pool little."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Gpu, Observation

_OTHERS = 0.1
_POOL_SHARE = 0.15
_GIB = 1 << 30


def judge(o: Observation) -> Finding | Clear:
    gpus = o.readings[-1].gpus
    others = next((found for gpu in gpus if (found := _other(gpu)) is not None), None)
    if others is not None:
        return others
    sizes = _sizes(o)
    if sizes is None:
        if gpus:
            return Clear("no other process holds much of a card")
        raise CannotJudge("no GPU was seen from here, and the engine does not report the size of weights and pool")
    weights, pool = sizes
    part = pool / (weights + pool)
    if part >= _POOL_SHARE:
        return Clear(f"the pool has {part:.0%} of what weights and pool take")
    return Finding(
        Severity.WARNING,
        Lever.SPLIT,
        "the weights leave the KV pool little",
        (f"weights {weights / _GIB:,.1f} GiB, pool {pool / _GIB:,.1f} GiB: {part:.0%} of both",),
        (
            *o.changes((Knob.WEIGHT_FORMAT, "fp8"), (Knob.TENSOR_PARALLEL, 2), (Knob.LAYERS_ON_GPU, "fewer")),
            "or a checkpoint in 4 or 8 bits",
        ),
        "few sessions fit, however they are tuned",
        "8-bit weights give half of their memory to the pool; two cards share them",
    )


def _other(gpu: Gpu) -> Finding | None:
    """A second process with a tenth of the card or more. The largest is taken to be the engine."""
    held = [(pid, size) for pid, size in gpu.processes[1:] if size >= _OTHERS * gpu.total_bytes]
    if not held:
        return None
    listed = ", ".join(f"process {pid} holds {size / _GIB:,.1f} GiB" for pid, size in held)
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        "another process holds a part of the card",
        (f"GPU {gpu.index} ({gpu.name}): {listed} of {gpu.total_bytes / _GIB:,.1f} GiB",),
        ("one engine a card: stop the other process, then restart the engine so that it measures the card anew",),
        "the pool was sized by what was free when the engine started",
        "that memory becomes KV",
    )


def _sizes(o: Observation) -> tuple[float, float] | None:
    """Bytes of weights and of the pool, as far as the engine and the spec tell."""
    weights, pool = o.last.value(o.metrics.weights_gb), o.last.value(o.metrics.pool_gb)
    if weights and pool:
        return weights * _GIB, pool * _GIB
    if o.spec is not None and o.spec.weights is not None and o.setup.pool_bytes:
        return float(o.spec.weight_bytes() / max(1, o.setup.tensor_parallel or 1)), float(o.setup.pool_bytes)
    return None


CHECK = Check(
    "card-eaten",
    "memory of other processes (driver), or the size of weights against the pool",
    "10 % of the card; pool under 15 % of weights + pool (no source states one)",
    "vllm#20305, vllm#50135; three SGLang replicas on one card: 97,503 / 53,149 / 20,961 tokens",
    judge,
)

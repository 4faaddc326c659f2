"""Tensor parallelism beyond the KV heads: each further rank holds a copy instead of a share."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation
from kvsteward.ledger import Kind, ModelSpec

_COPY = 1.05


def judge(o: Observation) -> Finding | Clear:
    tp = o.known(_tensor_parallel(o), "the tensor-parallel size")
    if tp == 1:
        return Clear("one rank")
    spec = o.known(o.spec, "the model (give its config with --config)")
    whole, rank = spec.kv_bytes_per_token(), spec.kv_bytes_per_token(tp=tp)
    copies = rank * tp / whole if whole else 1.0
    context_parallel = o.flag(Knob.CONTEXT_PARALLEL)
    if copies < _COPY or (context_parallel or "1") not in ("1", "") or o.flag(Knob.ATTENTION_DP):
        return Clear(f"{tp} ranks share {whole:,} bytes per token")
    useful = _useful(spec, tp)
    return Finding(
        Severity.WARNING,
        Lever.SPLIT,
        "tensor parallelism beyond the KV heads: ranks hold copies of the cache",
        (
            f"TP {tp}: {rank:,} bytes per token on each rank, {rank * tp:,} in all; the model needs {whole:,}",
            "the model keeps one latent for all heads"
            if spec.count(Kind.LATENT)
            else f"KV heads are shared up to TP {useful}",
        ),
        _remedies(o, tp, useful),
        f"{copies:.1f} copies of every token",
        f"{copies:.1f} times the tokens in the same memory",
    )


def _tensor_parallel(o: Observation) -> int | None:
    text = o.flag(Knob.TENSOR_PARALLEL)
    if text is not None and text.isdigit():
        return int(text)
    return o.setup.tensor_parallel or (1 if o.flags_given or o.setup.dialect == "llama-server" else None)


def _useful(spec: ModelSpec, tp: int) -> int:
    """The largest size up to `tp` that still divides the cache."""
    whole = spec.kv_bytes_per_token()
    fitting = [n for n in range(1, tp + 1) if tp % n == 0 and spec.kv_bytes_per_token(tp=n) * n < _COPY * whole]
    return max(fitting)


def _remedies(o: Observation, tp: int, useful: int) -> tuple[str, ...]:
    spread = tp // useful
    if o.setup.dialect == "vllm":
        fewer = " ".join(o.changes((Knob.TENSOR_PARALLEL, useful), (Knob.DATA_PARALLEL, spread)))
        return (*o.changes((Knob.CONTEXT_PARALLEL, spread)), fewer)
    return o.changes((Knob.ATTENTION_DP, spread))


CHECK = Check(
    "replicated-heads",
    "bytes per token on a rank x TP against the model's own bytes per token",
    "5 % more",
    "sglang#19086; vllm recipes#762; recipes of Kimi-K2 (decode context parallelism)",
    judge,
)

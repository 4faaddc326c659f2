"""The cache is kept in 16 bits while the pool is short of room and 8 would do."""

from __future__ import annotations

from kvsteward.errors import ConfigError
from kvsteward.lab.doctor.finding import CannotJudge, Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.knobs import Knob
from kvsteward.lab.doctor.observation import Observation, or_none
from kvsteward.ledger.formats import get

_TIGHT = 0.8
_DEFAULT_BITS = 16.0


def judge(o: Observation) -> Finding | Clear:
    pressure = _pressure(o)
    if pressure is None:
        return Clear("the pool has room")
    bits = kv_bits(o)
    if bits < _DEFAULT_BITS:
        return Clear(f"the cache is kept in {bits:.1f} bits already")
    evidence = [f"KV format: {o.setup.kv_dtype or o.flag(Knob.KV_DTYPE) or 'the default'}, {bits:.0f} bits", pressure]
    if o.spec is not None:
        now, then = (o.spec.kv_bytes_per_token(kv_dtype=name) for name in ("auto", "fp8"))
        evidence.append(f"{now:,} bytes per token now, {then:,} in 8 bit")
    return Finding(
        Severity.WARNING,
        Lever.QUANTISE,
        "the cache is kept in 16 bits while the pool is short of room",
        tuple(evidence),
        _remedies(o),
        "half of the tokens that the same memory could hold",
        "2 times the tokens; check the quality of answers on your own tasks before you keep it",
    )


def kv_bits(o: Observation) -> float:
    """Bits of one number of the cache. `auto` is the model's own dtype, 16 bits unless a spec says more."""
    name = o.flag(Knob.KV_DTYPE) or o.setup.kv_dtype
    if name is None and o.flags_given:
        return _DEFAULT_BITS
    name = o.known(name, "the KV format")
    if name == "auto":
        name = o.spec.dtype if o.spec is not None else "bf16"
    try:
        return get(name).bits_per_value
    except ConfigError as error:
        raise CannotJudge(f"the KV format {name!r} is not one that the ledger knows") from error


def _pressure(o: Observation) -> str | None:
    usage = max(o.seen("kv_usage_ratio"))
    preempted = or_none(lambda: o.count("preemptions_total")) or 0
    signs = [f"{preempted:,.0f} preemptions"] if preempted else []
    if usage >= _TIGHT:
        signs.append(f"KV usage up to {usage:.0%}")
    return " and ".join(signs) or None


def _remedies(o: Observation) -> tuple[str, ...]:
    if o.setup.dialect == "llama-server":
        return (" ".join(o.changes((Knob.KV_DTYPE, "q8_0"), (Knob.V_DTYPE, "q8_0"))),)
    return o.changes((Knob.KV_DTYPE, "fp8_e4m3" if o.setup.dialect == "sglang" else "fp8"))


CHECK = Check(
    "kv-format",
    "16 bits a number while usage is high or requests are preempted",
    "usage >= 80 % or any preemption (no source states one)",
    "docs.vllm.ai/en/stable/features/quantization/quantized_kvcache; vllm docs, optimization",
    judge,
)

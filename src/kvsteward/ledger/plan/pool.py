"""One deployment on given devices: what is left for KV, and how many sessions of a length it holds.

Knows vLLM's, SGLang's and llama.cpp's rules through `alloc`. Invariant: a session count is for the pool's low end
unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvsteward.errors import ConfigError
from kvsteward.ledger.alloc import llamacpp, vllm
from kvsteward.ledger.device import Device
from kvsteward.ledger.plan.overhead import GIB, Calibration, Interval, Overhead, estimate, llamacpp_estimate
from kvsteward.ledger.spec import ModelSpec

LARGEST_VOCAB = 262_144


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on `tp x pp` ranks, `replicas` times, with the settings that change its memory."""

    spec: ModelSpec
    device: Device
    engine: str
    tp: int
    pp: int
    replicas: int
    weight_bytes: int
    kv_dtype: str
    utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    known: Calibration | None = None
    version: tuple[int, int] = (0, 30)

    def with_(self, **changes: object) -> Deployment:
        """The same deployment with other settings."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def rank_weight_bytes(self) -> int:
        """Weights of one rank: split over tensor and pipeline ranks, or as the log said."""
        if self.known is not None and self.known.weights is not None:
            return self.known.weights
        return -(-self.weight_bytes // self.ranks)

    @property
    def overhead(self) -> Overhead:
        vocab = self.spec.vocab_size or LARGEST_VOCAB
        if self.engine == "llamacpp":
            return llamacpp_estimate(vocab)
        return estimate(vocab, ranks=self.ranks, max_num_seqs=self.max_num_seqs, known=self.known)

    @property
    def pool(self) -> Interval:
        """Bytes for KV on one rank: `utilization x memory - weights - overhead`, never below 0."""
        share = int(self.utilization * self.device.usable_gib * GIB) - self.rank_weight_bytes
        extra = self.overhead.total
        return Interval(max(0, share - extra.high), max(0, share - extra.best), max(0, share - extra.low))

    @property
    def layout(self) -> vllm.Layout:
        settings = vllm.VLLM(
            version=self.version,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_dtype=self.kv_dtype,
            tp=self.tp,
            pp=self.pp,
        )
        return vllm.layout(self.spec, settings)

    def session_bytes(self, tokens: int) -> int:
        """Bytes of a session of `tokens` on one rank, as the engine charges them."""
        if self.engine == "vllm":
            return self.layout.request_bytes(tokens)
        if self.engine == "llamacpp":
            kind = "q8_0" if self.kv_dtype == "fp8" else "f16" if self.kv_dtype == "auto" else self.kv_dtype
            made = llamacpp.buffers(self.spec, llamacpp.LlamaCpp(n_ctx=tokens, k_type=kind, v_type=kind))
            return -(-made.total_bytes // self.ranks)
        return self.spec.kv_bytes(tokens, kv_dtype=self.kv_dtype, tp=self.tp, pp=self.pp)

    def sessions(self, tokens: int) -> Interval:
        """Sessions of `tokens` that all replicas hold at once: at the low, best and high end of the pool.

        A llama.cpp slot reserves `max_model_len`, however short its session is.
        """
        size = self.session_bytes(max(tokens, self.max_model_len) if self.engine == "llamacpp" else tokens)
        if size <= 0:
            raise ConfigError(f"a session of {tokens} tokens needs no memory: there is nothing to plan")
        held = [self.replicas * (part // size) for part in (self.pool.low, self.pool.best, self.pool.high)]
        return Interval(*held)

    @property
    def static_ratio(self) -> float:
        """SGLang's `--mem-fraction-static`: weights and pool over the device's memory, at the low end, rounded down."""
        static = self.rank_weight_bytes + self.pool.low
        return int(100 * static / (self.device.usable_gib * GIB)) / 100

    @property
    def starts(self) -> bool:
        """Does the low end of the pool hold one request of `max_model_len`, as the engine demands at start?"""
        spare = self.layout.block_bytes if self.engine == "vllm" else 0  # the null block
        return self.session_bytes(self.max_model_len) + spare <= self.pool.low

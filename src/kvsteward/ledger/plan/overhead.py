"""Memory that no config tells: activations, CUDA graphs, communication buffers. Intervals from measured start-ups.

Knows vLLM's log lines. Invariant: low <= best <= high, and a calibrated value is what the log said.

Measured: 41 start-ups of vLLM 0.19 on H100 with 1,024 sequences and 8,192 batched tokens (tests/ledger/data, ids
vllm019-*). Peak activation there follows the vocabulary (sampling 1,024 rows of logits): 0.36 GiB + 13,660 bytes x
vocabulary, with measured / fit between 0.78 and 1.20. Communication: 0.07 to 0.46 GiB on one rank, 2.06 to 2.21 on
several. Graphs: 0.51 to 1.85 GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvsteward.errors import ConfigError

GIB = 2**30
LLAMACPP_SOURCE = "llama.cpp compute buffer: n_ubatch x vocabulary x 4 B of logits, and the CUDA context"
SOURCE = "41 measured start-ups, vLLM 0.19 on H100 (tests/ledger/data)"
_BASE_GIB, _BYTES_PER_LOGIT, _MEASURED_SEQS = 0.36, 13.34, 1_024
_SPREAD = (0.75, 1.25)
_LARGEST_LOG = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes between `low` and `high`, most likely `best`."""

    low: int
    best: int
    high: int

    def __post_init__(self) -> None:
        if not self.low <= self.best <= self.high:
            raise ConfigError(f"an interval must be ordered, not {self.low}, {self.best}, {self.high}")

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.best + other.best, self.high + other.high)

    def to_dict(self) -> dict[str, object]:
        return {"low": self.low, "best": self.best, "high": self.high}


def _gib(low: float, best: float, high: float) -> Interval:
    return Interval(int(low * GIB), int(best * GIB), int(high * GIB))


def exactly(size: float) -> Interval:
    """An interval of one value, in bytes."""
    return Interval(int(size), int(size), int(size))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one start-up log said, in bytes; None where it said nothing."""

    weights: int | None = None
    activation: int | None = None
    non_torch: int | None = None
    graphs: int | None = None
    available_kv: int | None = None


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a rank needs beside weights and KV."""

    activation: Interval
    communication: Interval
    graphs: Interval
    source: str = field(default=SOURCE)

    @property
    def total(self) -> Interval:
        return self.activation + self.communication + self.graphs


def estimate(vocab_size: int, *, ranks: int, max_num_seqs: int, known: Calibration | None = None) -> Overhead:
    """The overhead of a vLLM or SGLang rank. Fewer sequences than measured lower the best guess, not the upper end."""
    known = known or Calibration()
    logits = _BYTES_PER_LOGIT * vocab_size / GIB
    full = _BASE_GIB + logits * _MEASURED_SEQS
    scaled = min(full, max(0.7, _BASE_GIB + logits * min(max_num_seqs, _MEASURED_SEQS)))
    activation = _gib(_SPREAD[0] * scaled, scaled, _SPREAD[1] * full)
    communication = _gib(0.07, 0.25, 0.46) if ranks == 1 else _gib(2.06, 2.1, 2.21)
    graphs = _gib(0.3, 1.0, 1.85)
    used = known.activation is not None or known.non_torch is not None or known.graphs is not None
    return Overhead(
        activation=activation if known.activation is None else exactly(known.activation),
        communication=communication if known.non_torch is None else exactly(known.non_torch),
        graphs=graphs if known.graphs is None else exactly(known.graphs),
        source="the given start-up log" if used else SOURCE,
    )


def llamacpp_estimate(vocab_size: int, n_ubatch: int = 512) -> Overhead:
    """The overhead of llama-server: logits and activations of one micro-batch, no graphs of its own."""
    logits = 4 * n_ubatch * vocab_size / GIB
    return Overhead(
        activation=_gib(0.5 * logits, logits + 0.1, logits + 1.0),
        communication=_gib(0.2, 0.35, 0.6),
        graphs=exactly(0),
        source=LLAMACPP_SOURCE,
    )


_NUMBER = r"(-?\d+(?:\.\d+)?)\s*Gi?B"
_LINES = {
    "weights": (rf"[Mm]odel loading took {_NUMBER}", rf"weights take {_NUMBER}"),
    "activation": (rf"peak activation(?: memory)?(?: takes| of)?:? *{_NUMBER}", rf"{_NUMBER} for peak activation"),
    "non_torch": (rf"non_torch_memory(?: takes| of)?:? *{_NUMBER}", rf"{_NUMBER} for non-torch memory"),
    "graphs": (
        rf"[Gg]raph capturing finished in [\d.]+ secs?, took {_NUMBER}",
        rf"[Ee]stimated CUDA graph memory:? *{_NUMBER}",
    ),
    "available_kv": (rf"Available KV cache memory:? *{_NUMBER}", rf"reserved for KV Cache(?: is)? *{_NUMBER}"),
}


def calibrate(log_text: str) -> Calibration:
    """Sizes from a vLLM start-up log. ConfigError if the text names none of them or is longer than 4 MiB."""
    if len(log_text) > _LARGEST_LOG:
        raise ConfigError("the log is longer than 4 MiB: give its start-up part")
    found: dict[str, int] = {}
    for name, patterns in _LINES.items():
        match = next((hit for pattern in patterns if (hit := re.search(pattern, log_text))), None)
        if match is not None:
            found[name] = int(float(match.group(1)) * GIB)
    if not found:
        raise ConfigError("no memory line of vLLM was found in the log", hint="Give the log of the start of vLLM.")
    return Calibration(**found)

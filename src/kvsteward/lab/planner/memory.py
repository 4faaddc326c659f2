"""Where the memory of each GPU goes, as parts that a picture can show. Invariant: the parts of a GPU add up to it."""

from __future__ import annotations

from dataclasses import dataclass

from kvsteward.ledger.plan import Interval, Plan

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Part:
    """`size_bytes` of one use; `low_bytes` to `high_bytes` where it is only known so."""

    name: str
    size_bytes: int
    low_bytes: int
    high_bytes: int

    @property
    def text(self) -> str:
        """For a person: GiB, with the interval where there is one."""
        best = f"{self.size_bytes / GIB:.1f} GiB"
        if self.low_bytes == self.high_bytes:
            return best
        return f"{best} ({self.low_bytes / GIB:.1f}-{self.high_bytes / GIB:.1f})"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its number, what it is for, and its parts from first to last."""

    index: int
    role: str
    parts: tuple[Part, ...]


def layout(plan: Plan, count: int) -> tuple[Gpu, ...]:
    """The `count` GPUs. Ranks are alike: the fullest is shown for all."""
    used = parts(plan)
    total = int(plan.deployment.device.usable_gib * GIB)
    idle = (_exact("free", total),)
    ranks = plan.deployment.ranks
    return tuple(
        Gpu(index, f"replica {index // ranks}, rank {index % ranks}", used)
        if index < ranks * plan.replicas
        else Gpu(index, "not used", idle)
        for index in range(count)
    )


def parts(plan: Plan) -> tuple[Part, ...]:
    """Weights, activations, communication, graphs, KV and what the engine leaves."""
    at = plan.deployment
    extra, total = at.overhead, int(at.device.usable_gib * GIB)
    listed = (
        _exact("weights", at.rank_weight_bytes),
        _between("activations", extra.activation),
        _between("communication", extra.communication),
        _between("graphs", extra.graphs),
        _between("KV", plan.pool),
    )
    return (*listed, _exact("free", max(0, total - sum(part.size_bytes for part in listed))))


def _exact(name: str, size: int) -> Part:
    return Part(name, size, size, size)


def _between(name: str, interval: Interval) -> Part:
    return Part(name, interval.best, interval.low, interval.high)

"""PyTorch's allocator holds memory in pieces that nothing fits into: reserved, but not allocated."""

from __future__ import annotations

from kvsteward.lab.doctor.finding import Check, Clear, Finding, Lever, Severity
from kvsteward.lab.doctor.observation import Observation

_SHARE = 0.2
_LEAST_BYTES = 1 << 30
_GIB = 1 << 30


def judge(o: Observation) -> Finding | Clear:
    torch = o.known(o.torch, "what PyTorch reserved and allocated (--torch)")
    idle = torch.reserved_bytes - torch.allocated_bytes
    if idle < _LEAST_BYTES or idle < _SHARE * torch.reserved_bytes:
        return Clear(f"{max(0, idle) / _GIB:.1f} GiB are reserved and not in use")
    return Finding(
        Severity.WARNING,
        Lever.TUNE,
        "PyTorch holds memory that it cannot use: the allocator is fragmented",
        (f"{torch.reserved_bytes / _GIB:.1f} GiB reserved, {torch.allocated_bytes / _GIB:.1f} GiB allocated",),
        ("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and restart", "give the engine a smaller memory share"),
        f"{idle / _GIB:.1f} GiB, and out-of-memory errors while memory is free",
        "that memory is free for the pool",
    )


CHECK = Check(
    "allocator",
    "reserved against allocated bytes of torch.cuda.memory_stats()",
    "20 % and 1 GiB (no source states one)",
    "pytorch.org/docs/stable/notes/cuda.html (memory management); vllm#27508",
    judge,
)

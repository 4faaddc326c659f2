"""The cards of this machine as NVIDIA's driver reports them; nothing where there is no driver or no `pynvml`.

Knows no engine. Invariant: it only reads.
"""

from __future__ import annotations

from typing import Any

from kvsteward.lab.doctor.observation import Gpu


def read_gpus() -> tuple[Gpu, ...]:
    """All cards, or () if there are none that can be asked."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_card(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _card(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    return Gpu(
        index,
        name.decode() if isinstance(name, bytes) else str(name),
        int(memory.total),
        int(memory.used),
        _busy(nvml, handle),
        _processes(nvml, handle),
    )


def _busy(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except nvml.NVMLError:
        return None  # a MIG slice has no such figure


def _processes(nvml: Any, handle: Any) -> tuple[tuple[int, int], ...]:
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return ()
    # The driver hides the memory of other users' processes: it is None then.
    sized = [(int(one.pid), int(one.usedGpuMemory or 0)) for one in found]
    return tuple(sorted(sized, key=lambda pair: -pair[1]))

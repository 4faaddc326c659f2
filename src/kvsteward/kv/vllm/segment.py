"""Memory that the scheduler's process makes and the workers' processes see: the slots of the host pool.

It is an anonymous file (`memfd_create`): nothing is left behind when the processes end, however they end, and the
size limit of /dev/shm in a container does not apply. A worker opens it through /proc of the process that made it,
so all must run on one machine, as one user, in one PID namespace.

Linux only; no vLLM import. Invariant: `attach` maps exactly what `create` made, or raises ConfigError.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from kvsteward.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SegmentName:
    """Where another process finds it."""

    pid: int
    fd: int
    size_bytes: int


class Segment:
    def __init__(self, name: SegmentName, area: mmap.mmap) -> None:
        self.name = name
        self._area = area

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """Memory is taken when it is first written to. Raises ConfigError where it cannot be had."""
        try:
            fd = os.memfd_create("kvsteward-host-pool")
            os.ftruncate(fd, size_bytes)
            area = mmap.mmap(fd, size_bytes)
        except (AttributeError, OSError, ValueError) as error:
            raise ConfigError(f"no shared memory of {size_bytes} bytes: {error}") from error
        return cls(SegmentName(os.getpid(), fd, size_bytes), area)

    @classmethod
    def attach(cls, name: SegmentName) -> Segment:
        """The same memory in another process. Raises ConfigError where it is not there."""
        try:
            fd = os.open(f"/proc/{name.pid}/fd/{name.fd}", os.O_RDWR)
            try:
                area = mmap.mmap(fd, name.size_bytes)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the host pool of process {name.pid} cannot be opened: {error}",
                hint="Scheduler and workers must run on one machine, as one user, in one PID namespace.",
            ) from error
        return cls(name, area)

    @property
    def view(self) -> memoryview:
        return memoryview(self._area)

    def close(self) -> None:
        """The maker's handle is closed, so nobody can attach any more; the memory stays as long as views of it do."""
        if self.name.pid == os.getpid() and self.name.fd >= 0:
            os.close(self.name.fd)
            self.name = SegmentName(self.name.pid, -1, self.name.size_bytes)

"""The process of the embedded engine: one `xllamacpp.Server`, its parameters on stdin, its address on stdout.

Protocol: the parent writes one JSON line (`ChildParams`) and keeps stdin open; the child answers with one JSON line,
`{"url": "http://127.0.0.1:PORT"}` or `{"error": "..."}`. Everything that llama.cpp prints goes to stderr.

It imports nothing of kvsteward, so that a start costs the engine's load and nothing else. Invariant: it never outlives
its parent. It ends when stdin ends, and on Linux the kernel kills it when its parent dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_STOP_LIMIT_S = 3.0


def main() -> None:
    """Runs until stdin ends. Exit status: 0 stopped, 1 could not start."""
    answer = _claim_stdout()
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    params = json.loads(line)
    _die_with(params["parent_pid"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ended = threading.Event()
    threading.Thread(target=_watch_stdin, args=(ended,), daemon=True).start()
    try:
        server = _launch(params)
    except (RuntimeError, ImportError, OSError, MemoryError, AttributeError, TypeError, ValueError) as error:
        _say(answer, {"error": f"{error}"})
        sys.exit(1)
    _say(answer, {"url": server.listening_address})
    ended.wait()
    _stop(server)


def _claim_stdout() -> int:
    """A private copy of stdout for the answer; whatever llama.cpp prints there goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    return answer


def _say(answer: int, message: dict[str, str]) -> None:
    os.write(answer, json.dumps(message).encode() + b"\n")
    os.close(answer)


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before we asked
            os._exit(0)


def _watch_stdin(ended: threading.Event) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    ended.set()
    # The main thread may be inside a model load that nothing interrupts.
    threading.Event().wait(_STOP_LIMIT_S)
    os._exit(0)


def _stop(server: Any) -> NoReturn:
    del server  # ends its threads; the watcher above bounds how long that may take
    os._exit(0)


def _launch(params: dict[str, Any]) -> Any:
    import xllamacpp

    if params["needs_bytes"]:
        _refuse_if_too_big(params["needs_bytes"], xllamacpp.get_device_info())
    common = xllamacpp.CommonParams()
    common.model.path = params["model"]
    common.cpuparams.n_threads = params["threads"]
    for name in ("cache_type_k", "cache_type_v"):
        setattr(common, name, getattr(xllamacpp.ggml_type, "GGML_TYPE_" + params[name].upper()))
    for name, value in params["common"].items():
        setattr(common, name, value)
    return xllamacpp.Server(common)


def _refuse_if_too_big(needs_bytes: int, devices: list[dict[str, Any]]) -> None:
    """llama.cpp asks the kernel for memory that it may never get and then dies late, so ask before."""
    if any("GPU" in str(device.get("type", "")).upper() for device in devices):
        return
    free_bytes = available_bytes()
    if free_bytes is not None and needs_bytes > free_bytes:
        raise MemoryError(
            f"not enough memory: weights and KV cache need {needs_bytes / 2**30:.1f} GiB, "
            f"{free_bytes / 2**30:.1f} GiB are free"
        )


def available_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that this process may still take: the host's, or the container's where that is less. None: unknown."""
    limits = []
    try:
        fields = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        most = int((cgroup / "memory.max").read_text())
        limits.append(most - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        pass
    return min(limits, default=None)


if __name__ == "__main__":
    main()

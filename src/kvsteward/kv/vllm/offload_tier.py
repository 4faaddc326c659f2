"""A Valkey tier for vLLM's own OffloadingConnector (GPU machines): chunks go from vLLM's CPU tier to Valkey and back.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": ...,
        "secondary_tiers": [{"type": "KVStewardValkeyTier", "module_path": "kvsteward.kv.vllm.offload_tier",
                             "url": "valkey://HOST:6379"}]}

It runs in the scheduler's process: each call only queues; one thread writes, others read, one of vLLM's asks what is
there. A chunk is checked before a byte of it reaches vLLM's memory. Whatever goes wrong is a job that did not succeed.

The session is what the request's hint names (`kv_transfer_params.kvsteward.session`). Invariant: each job that was
submitted is reported exactly once; `drain_jobs` waits no longer than the sockets may.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvsteward.errors import ConfigError, ProtocolError
from kvsteward.kv.blocks.codecs import Codec, Raw
from kvsteward.kv.blocks.lossless import Lossless
from kvsteward.kv.blocks.record import DAMAGED, Miss, Reason, decode, encode_header
from kvsteward.kv.blocks.tier import TierFigures, Write
from kvsteward.kv.blocks.valkey import ValkeyTier
from kvsteward.kv.vllm import compat, compat_offload
from kvsteward.kv.vllm.hints import Told, parse

log = logging.getLogger("vllm.kvsteward")
BATCH = 8
MAX_USERS = 65_536
SEVERAL = ""
NO_ROOM = memoryview(b"")


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a request said; kept with it."""

    told: Told


@dataclass(slots=True)
class _Job:
    number: int
    keys: list[bytes]
    names: list[bytes]
    """The keys in the block store."""
    chunks: list[int]
    session: str = ""
    expires_s: float = 0.0
    loads: bool = False


@dataclass(slots=True)
class _Done:
    result: Any
    failed: list[bytes] = field(default_factory=list)


class _Lookups(compat_offload.AsyncLookupManager):  # type: ignore[misc]
    """vLLM's own thread and table of what was asked; ours is the question."""

    def __init__(self, tier_type: str, tier: ValkeyTier, name: Callable[[bytes], bytes]) -> None:
        self._tier, self._name = tier, name
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        answer = self._tier.holds([self._name(key) for key in keys])
        if isinstance(answer, Miss):
            self._tier.missed(answer.reason)
            return [False for _ in keys]
        return answer


class KVStewardValkeyTier(compat_offload.SecondaryTierManager):  # type: ignore[misc]
    """`url`, `ttl_s`, `timeout_s`, `cluster` as in `kvsteward.kv.blocks.valkey`; `salt` keeps tenants apart; `revision`
    names the weights where the model's name does not; `codec` is raw or lossless; `max_jobs` bounds what waits: a job
    over it fails at once. Raises ConfigError for options that cannot be honoured."""

    medium: ClassVar[Any] = compat_offload.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        url: str,
        ttl_s: float | None = 86_400.0,
        timeout_s: float = 2.0,
        cluster: bool = False,
        salt: str = "",
        revision: str = "",
        codec: str = "raw",
        readers: int = 2,
        max_jobs: int = 1024,
        locality: str = "REMOTE",
        allow_version: str | None = None,
    ) -> None:
        compat.check(allow_version)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if readers < 1 or max_jobs < 1:
            raise ConfigError(f"{readers} readers and {max_jobs} jobs: both must be 1 or more")
        self.locality = compat_offload.Locality(locality)
        self._chunk_bytes = int(self.block_size_bytes)
        self._memory = primary_kv_view.cast("B")
        self._codec = _codec(codec, offloading_spec.config.model.dtype)
        self._codecs: dict[int, Codec] = {c.number: c for c in (Raw(), self._codec)}
        found = compat_offload.fingerprint(offloading_spec, self._chunk_bytes, revision=revision, salt=salt, codec="")
        self._digest = found.digest()
        self._tier = ValkeyTier(
            url, namespace=self._digest.hex(), ttl_s=ttl_s, timeout_s=timeout_s, cluster=cluster, name=tier_type
        )
        self._lookups = _Lookups(tier_type, self._tier, self._name)
        self._users: OrderedDict[bytes, str] = OrderedDict()
        """The session that asked for a key, SEVERAL for more than one."""
        self._max_jobs = max_jobs
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._open = 0
        self._finished: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[_Job | str | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[_Job | str | None] = queue.SimpleQueue()
        self.refused_hints = 0
        self._threads = [
            self._thread("write", self._stores),
            *(self._thread(f"read-{n}", self._loads) for n in range(readers)),
        ]

    def _thread(self, name: str, jobs: queue.SimpleQueue[_Job | str | None]) -> threading.Thread:
        thread = threading.Thread(target=self._work, args=(jobs,), name=f"kvsteward-offload-{name}", daemon=True)
        thread.start()
        return thread

    def _name(self, key: bytes) -> bytes:
        return compat_offload.store_key(self._digest, key)

    # the scheduler's calls

    def on_new_request(self, req_context: Any) -> Any:
        try:
            told = parse(req_context.kv_transfer_params)
        except ProtocolError as error:
            self.refused_hints += 1
            log.warning("kvsteward: a hint is left out: %s", error.message)
            told = Told()
        req_context.set_state(_Heard(told))
        return compat_offload.RequestOffloadingContext()

    def _told(self, req_context: Any) -> Told:
        heard: _Heard | None = req_context.get_state(_Heard)
        return heard.told if heard else Told()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return compat_offload.LookupResult.RETRY
        if found:
            self._used(self._name(key), self._told(req_context).session)
        return compat_offload.LookupResult.HIT if found else compat_offload.LookupResult.MISS

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        session = self._told(req_context).session
        for key in keys:
            self._used(self._name(key), session)

    def _used(self, name: bytes, session: str) -> None:
        before = self._users.pop(name, session)
        self._users[name] = session if before == session else SEVERAL
        while len(self._users) > MAX_USERS:
            self._users.popitem(last=False)

    def submit_store(self, job_metadata: Any) -> None:
        job = self._job(job_metadata)
        if self._told(job_metadata.req_context).hint.ttl_s == 0:  # not to be kept
            self._finished.put(_Done(compat_offload.JobResult(job.number, success=True, transfer_bytes=0)))
            return
        for name in job.names:
            self._used(name, job.session)
        self._submit(job, self._stores)

    def submit_load(self, job_metadata: Any) -> None:
        job = self._job(job_metadata)
        job.loads = True
        self._submit(job, self._loads)

    def _job(self, metadata: Any) -> _Job:
        told = self._told(metadata.req_context)
        keys = list(metadata.keys)
        expires_s = time.time() + told.hint.ttl_s if told.hint.ttl_s else 0.0
        chunks = [int(chunk) for chunk in metadata.chunk_ids]
        return _Job(metadata.job_id, keys, [self._name(key) for key in keys], chunks, told.session, expires_s)

    def _submit(self, job: _Job, jobs: queue.SimpleQueue[_Job | str | None]) -> None:
        with self._lock:
            room = self._open < self._max_jobs
            self._open += room
        if room:
            jobs.put(job)
        else:
            self._finished.put(
                _Done(compat_offload.JobResult(job.number, success=False), job.keys if job.loads else [])
            )

    def get_finished_jobs(self) -> list[Any]:
        results: list[Any] = []
        while True:
            try:
                done = self._finished.get_nowait()
            except queue.Empty:
                return results
            self._lookups.mark_miss(done.failed)
            results.append(done.result)

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)
        told = self._told(req_context)
        if told.over and told.session:
            self._stores.put(told.session)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        with self._lock:
            self._idle.wait_for(lambda: not self._open)

    def shutdown(self) -> None:
        """Ends the threads when what is queued is done, and closes the connections."""
        self._stores.put(None)
        for _ in self._threads[1:]:
            self._loads.put(None)
        for thread in self._threads:
            thread.join(10.0)
        self._lookups.shutdown()
        self._tier.close()

    def figures(self) -> TierFigures:
        return self._tier.figures()

    # the threads

    def _work(self, jobs: queue.SimpleQueue[_Job | str | None]) -> None:
        while (job := jobs.get()) is not None:
            if isinstance(job, str):
                self._tier.forget_session(job, self._shared)
                continue
            start = time.monotonic()
            good: list[bytes] = []
            try:
                for at in range(0, len(job.keys), BATCH):
                    part = slice(at, at + BATCH)
                    act = self._load if job.loads else self._store
                    kept = act(job, job.names[part], job.chunks[part])
                    good += [key for key, ok in zip(job.keys[part], kept, strict=True) if ok]
            except Exception:  # whatever it is, the job ends: vLLM waits for its result
                log.exception("kvsteward: a job of tier %s failed", self.tier_type)
            self._finish(job, good, time.monotonic() - start)

    def _finish(self, job: _Job, good: list[bytes], seconds: float) -> None:
        kept = set(good)
        result = compat_offload.JobResult(
            job.number,
            success=len(good) == len(job.keys),
            successful_keys=tuple(good) if job.loads and good and len(good) < len(job.keys) else None,
            transfer_time=seconds,
            transfer_bytes=len(good) * self._chunk_bytes,
        )
        self._finished.put(_Done(result, [key for key in job.keys if key not in kept] if job.loads else []))
        with self._lock:
            self._open -= 1
            self._idle.notify_all()

    def _shared(self, names: Sequence[bytes]) -> set[bytes]:
        return {name for name in names if self._users.get(name) == SEVERAL}

    def _chunk(self, number: int) -> memoryview:
        return self._memory[number * self._chunk_bytes : (number + 1) * self._chunk_bytes]

    def _store(self, job: _Job, names: Sequence[bytes], chunks: Sequence[int]) -> list[bool]:
        writes = []
        for name, number in zip(names, chunks, strict=True):
            chunk, codec = self._chunk(number), self._codec
            payload = codec.encode(chunk)
            if memoryview(payload).nbytes >= chunk.nbytes:
                payload, codec = chunk, self._codecs[Raw.number]
            header = encode_header(name, payload, codec=codec.number, raw_bytes=chunk.nbytes, expires_s=job.expires_s)
            writes.append(Write(name, (header, payload), job.session, job.expires_s))
        return [reason is None for reason in self._tier.write(writes)]

    def _load(self, job: _Job, names: Sequence[bytes], chunks: Sequence[int]) -> list[bool]:
        answers = self._tier.read(names, [NO_ROOM] * len(names))
        good = [
            self._unpack(name, answer, self._chunk(number))
            for name, answer, number in zip(names, answers, chunks, strict=True)
        ]
        if job.session and any(good):
            self._tier.use(job.session, [name for name, ok in zip(names, good, strict=True) if ok])
        return good

    def _unpack(self, name: bytes, answer: memoryview | Miss, chunk: memoryview) -> bool:
        record = answer if isinstance(answer, Miss) else decode(answer, name, now_s=time.time())
        if not isinstance(record, Miss):
            codec = self._codecs.get(record.codec)
            if codec is None or record.raw_bytes != chunk.nbytes:
                record = Miss(Reason.CODEC if codec is None else Reason.SIZE)
            else:
                try:
                    codec.decode(record.payload, chunk)
                except ValueError as error:
                    record = Miss(Reason.CODEC, str(error))
                else:
                    return True
        self._tier.missed(record.reason)
        if record.reason in DAMAGED:
            log.warning("kvsteward: a record of tier %s is dropped: %s", self.tier_type, record.reason)
            self._tier.forget([name])
        return False


def _codec(name: str, dtype: str) -> Codec:
    if name == "raw":
        return Raw()
    if name == "lossless":
        kind = dtype.removeprefix("torch.")
        return Lossless(4 if kind == "float32" else 1 if "8" in kind.replace("bfloat16", "") else 2)
    raise ConfigError(f"the codec {name!r} is unknown", hint="Known: raw, lossless.")

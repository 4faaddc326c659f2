"""The KV connector: `vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStewardConnector",
"kv_connector_module_path": "kvsteward.kv.vllm.connector", "kv_role": "kv_both"}'`.

In the scheduler's process it replaces the block pool's free list by one that is ordered by `policy.retention`. With
`host_gib` it also keeps what leaves the pool in tiers (`tiers`): `loads` plans in the scheduler's process what `worker`
copies in the workers'. All options (`kv_connector_extra_config`) stand in `options` and in docs/vllm.md.

Knows nothing of HTTP. Invariant: no fault of ours reaches the engine. After the first one, which is logged, the free
list runs in vLLM's own order (LRU), or the tiers are left alone; what was promised to vLLM and cannot be loaded is
computed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsteward.errors import ProtocolError
from kvsteward.kv.vllm import compat, options, stats, tiers
from kvsteward.kv.vllm.copies import Place, Shape
from kvsteward.kv.vllm.hints import Told, parse
from kvsteward.kv.vllm.learned import Learned
from kvsteward.kv.vllm.loads import Moves
from kvsteward.kv.vllm.snapshot import snapshot
from kvsteward.kv.vllm.steward import MAX_OWNERS, Steward
from kvsteward.kv.vllm.worker import Report, Worker

FIGURES_EVERY_S = 5.0
log = logging.getLogger("vllm.kvsteward")


@dataclass
class Step(compat.KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, once a step. `places`: of each rank, told with the first moves."""

    moves: Moves = field(default_factory=Moves)
    places: Mapping[tuple[int, int], Place] | None = None


@dataclass
class Parts(compat.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once: what its part of a block is."""

    shape: Shape


@dataclass
class Did(compat.KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, once a step. `took_s`: how long the slowest one copied."""

    report: Report
    took_s: float = 0.0

    def aggregate(self, other: Any) -> Did:
        self.report.add(other.report)
        self.took_s = max(self.took_s, other.took_s)
        return self


class KVStewardConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = options.parse(self._kv_transfer_config.kv_connector_extra_config)
        compat.check(self._options.allow_version)
        if self._options.tiers:
            compat.check_tiers(vllm_config, kv_cache_config)
            compat.recompute_bad_loads(vllm_config)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._figures_at = -FIGURES_EVERY_S
        self._pool: Any = None
        self._steward: Steward | None = None
        self._learned = Learned(self._options.learned_path, time.monotonic(), compat.data_parallel_rank(vllm_config))
        self._told: dict[str, Told] = {}
        self._matched = ("", 0)
        """The request that is being scheduled, and how many of its tokens the pool has."""
        self._tiers: tiers.Tiers | None = None
        self._worker: Worker | None = None
        self._took_s = 0.0
        """In the scheduler or in this worker: what the step that is under way has waited for us."""
        self._longest_step_s = self._longest_copy_s = 0.0
        self._deaf = False
        self._news_at = -stats.EVERY_S
        self._heard = 0

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> stats.SessionStats:
        return stats.SessionStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> stats.SessionMetrics:
        return stats.SessionMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        if not compat.caching(gpu_block_pool):
            log.warning("kvsteward: prefix caching is off, there is nothing to keep")
            return
        blocks = compat.free_blocks(gpu_block_pool)
        steward = Steward(
            blocks,
            time.monotonic,
            block_tokens=self._block_tokens,
            reorder_s=self._options.reorder_s,
            returns=self._learned.returns(MAX_OWNERS),
        )
        steward.free.on_fault(self._give_up)
        compat.replace(gpu_block_pool, steward.free)
        self._steward = steward
        log.info("kvsteward: keeps %d blocks of %d tokens by their worth", len(blocks), self._block_tokens)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Parts]) -> None:
        if not self._options.tiers:  # vLLM calls it though no worker had anything to say
            return
        shapes = {rank: parts.shape for rank, parts in sorted(metadata.items())}
        config, cache = self._vllm_config, self._kv_cache_config

        def fingerprint(salt: str) -> Any:
            return compat.fingerprint(config, cache, list(shapes.values()), salt)

        self._tiers = tiers.Tiers(self._options, shapes, fingerprint, time.monotonic)
        log.info("kvsteward: tiers: %s", self._tiers.describe())

    def on_new_request(self, request: Any) -> None:
        with self._guard() as steward:
            told = self._hear(request)
            if steward is not None and told.note:
                self._heed(request, told, steward)
            elif steward is not None:
                steward.began(request.request_id, request.session_id)
        told = self._told.get(request.request_id, Told())
        with self._guard_tiers() as below:
            if below is not None and told.note and told.over:
                session = compat.tenant_session(request) or told.stored
                if session:
                    below.loads.forget(session)
            elif below is not None and not told.note and compat.same_weights(request):
                below.loads.began(request, compat.tenant_session(request), told.hint.ttl_s)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        told = self._told.pop(request.request_id, Told())
        with self._guard() as steward:
            if steward is not None and not told.note:
                blocks = [block_id for group in block_ids for block_id in group]
                reason = compat.stop_reason(request)
                size = compat.size(request)
                steward.ended(request.request_id, request.session_id, told, reason, blocks, size)
        with self._guard_tiers() as below:
            if below is not None:
                below.loads.ended(request, block_ids[0], final=told.over)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens: int | None = 0
        self._matched = (request.request_id, num_computed_tokens)
        with self._guard_tiers() as below:
            if below is not None:
                tokens = below.loads.matched(request, num_computed_tokens)
        return tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id, tokens = self._matched
        self._matched = ("", 0)
        with self._guard() as steward:
            told = self._told.get(request.request_id, Told())
            if steward is not None and request_id == request.request_id and not told.note:
                steward.matched(*compat.followed(request, self._pool, tokens, steward.follows))
        with self._guard_tiers() as below:
            if below is not None:
                below.loads.allocated(request, compat.allocated(blocks), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        with self._guard() as steward:
            if steward is not None:
                steward.step()
                if self._options.check:
                    compat.check_totals(self._pool, steward.free)
        step = Step()
        if self._tiers is None and self._options.tiers and not self._deaf:
            self._deaf = True
            log.error("kvsteward: the workers did not say what their KV is; there are no tiers")
        with self._guard_tiers() as below:
            if below is not None:
                step.moves = below.plan(
                    compat.scheduled(scheduler_output), lambda request: compat.blocks_of(scheduler_output, request)
                )
                step.places = below.places(step.moves)
        if self._tiers is not None and self._tiers.given_up:  # promised before a fault, or after one
            step.moves = self._tiers.rescue()
        with self._guard():
            self._write_figures()
        self._longest_step_s, self._took_s = max(self._longest_step_s, self._took_s), 0.0
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        with self._guard_tiers() as below:
            if below is None:
                return
            if connector_output.invalid_block_ids:
                compat.uncache(
                    self._kv_cache_manager, self._pool, below.loads.running, connector_output.invalid_block_ids
                )
            did = connector_output.kv_connector_worker_meta
            self._longest_copy_s = max(self._longest_copy_s, did.took_s if did is not None else 0.0)
            below.heard(did.report if did is not None else Report())

    def has_pending_push_work(self) -> bool:
        """Blocks of turns that ended are still to be saved: the engine takes a step for it before it rests."""
        below = self._tiers
        return below is not None and not below.given_up and below.loads.unsent

    def get_kv_connector_stats(self) -> stats.SessionStats | None:
        """After each step, in both processes: the workers have nothing to say, the scheduler speaks once a second."""
        with self._guard() as steward:
            now = time.monotonic()
            if steward is not None and now - self._news_at >= stats.EVERY_S:
                self._news_at = now
                self._learned.save(steward.returns, now)
                return stats.SessionStats(snapshot(steward.figures(), self._heard, self._waits()))
        return None

    def reset_cache(self) -> bool | None:
        with self._guard() as steward:
            if steward is not None:
                steward.clear()
        with self._guard_tiers() as below:
            if below is not None:
                below.reset()
        return True

    # worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._options.tiers:
            self._worker = Worker(compat.copies(self._vllm_config, self._kv_cache_config, kv_caches))

    def get_handshake_metadata(self) -> Parts | None:
        return Parts(self._worker.copies.shape) if self._worker else None

    def has_connector_metadata(self) -> bool:
        """No: vLLM then leaves out two calls for each layer of each step. Nothing here is done layer by layer."""
        return False

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self._worker is not None and kv_connector_metadata.moves:
            places = kv_connector_metadata.places
            with self._timed():
                self._worker.before(kv_connector_metadata.moves, places[compat.rank()] if places else None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None and self._connector_metadata is not None:
            with self._timed():
                self._worker.load(self._connector_metadata.moves)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if self._worker is not None and self._connector_metadata is not None:
            with self._timed():
                self._worker.save(self._connector_metadata.moves)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.bad() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Did | None:
        took_s, self._took_s = self._took_s, 0.0
        report = self._worker.report() if self._worker is not None else None
        return Did(report, took_s) if report is not None else None

    # both

    def shutdown(self) -> None:
        with self._guard() as steward:
            self._learned.close(steward.returns if steward is not None else None)
        if self._tiers is not None:
            self._tiers.close()
            self._tiers = None

    def _heed(self, request: Any, told: Told, steward: Steward) -> None:
        session = request.session_id or told.session
        if session:
            steward.note(session, told)
        if compat.is_word(request):  # whoever said it waits for the figures
            self._heard += 1
            self._news_at = -stats.EVERY_S

    def _hear(self, request: Any) -> Told:
        try:
            told = parse(request.kv_transfer_params)
            if told.session and not compat.is_word(request):
                raise ProtocolError("only the endpoint plug-in's own notes may name a session")
        except ProtocolError as error:
            if self._steward is not None:
                if not self._steward.refused_hints:
                    log.warning("kvsteward: a hint is not used: %s", error.message)
                self._steward.refused_hints += 1
            return Told()
        if told != Told():
            self._told[request.request_id] = told
        return told

    def _write_figures(self) -> None:
        path, now = self._options.figures_path, time.monotonic()
        if path is None or self._steward is None or now - self._figures_at < FIGURES_EVERY_S:
            return
        self._figures_at = now
        figures = self._steward.figures()
        body: dict[str, Any] = {
            "free_blocks": figures.free_blocks,
            "turns": figures.turns,
            "refused_hints": figures.refused_hints,
            "lru": figures.lru,
            "longest_waits_s": self._waits(),
            "sessions": {s: {"blocks": n, "tokens": figures.tokens(s)} for s, n in figures.sessions.items()},
        }
        if self._tiers is not None:
            body["tiers"] = self._tiers.figures()
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(body))
        os.replace(fresh, path)  # noqa: PTH105  # readers never see half a file

    def _waits(self) -> dict[str, float]:
        """Seconds, the longest ones so far: what one step waited for our part of the scheduler, and for copies; what a
        request waited for blocks from below."""
        below = self._tiers
        return {
            "step": self._longest_step_s,
            "copy": self._longest_copy_s,
            "request": below.loads.counts.longest_wait_s if below is not None else 0.0,
        }

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._took_s += time.monotonic() - began_s

    @contextlib.contextmanager
    def _guard(self) -> Iterator[Steward | None]:
        """The engine must outlive any fault of ours."""
        began_s = time.monotonic()
        try:
            yield self._steward
        except Exception as error:  # noqa: BLE001  # whatever it is, the engine goes on without us
            self._give_up(error)
        finally:
            self._took_s += time.monotonic() - began_s

    @contextlib.contextmanager
    def _guard_tiers(self) -> Iterator[tiers.Tiers | None]:
        below = self._tiers if self._tiers is not None and not self._tiers.given_up else None
        began_s = time.monotonic()
        try:
            yield below
        except Exception as error:  # noqa: BLE001  # whatever it is, the engine goes on without tiers
            if below is not None:
                below.give_up(error)
        finally:
            self._took_s += time.monotonic() - began_s

    def _give_up(self, error: Exception) -> None:
        steward, self._steward = self._steward, None
        if steward is not None:
            steward.free.ranked_by(None)
            log.error("kvsteward: stopped, vLLM's own order (LRU) is used from now on", exc_info=error)

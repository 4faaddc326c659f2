"""The KV connector: `vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStewardConnector",
"kv_connector_module_path": "kvsteward.kv.vllm.connector", "kv_role": "kv_both"}'`.

It moves no KV. In the scheduler's process it replaces the block pool's free list by one that is ordered by
`policy.retention`; in the workers it does nothing. Options in `kv_connector_extra_config`: `reorder_s` (0.25),
`allow_version`, `figures_path` (a JSON file of what idle sessions hold, renewed every 5 s at most), `check` (true: the
totals of the block pool are checked in every step, for tests).

Knows nothing of HTTP. Invariant: no fault of ours reaches the engine: after the first one, which is logged, the
free list runs in vLLM's own order (LRU) and all hooks do nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsteward.errors import ProtocolError
from kvsteward.kv.vllm import compat, stats
from kvsteward.kv.vllm.hints import Told, parse
from kvsteward.kv.vllm.snapshot import snapshot
from kvsteward.kv.vllm.steward import Steward

FIGURES_EVERY_S = 5.0
log = logging.getLogger("vllm.kvsteward")


class NothingToMove(compat.KVConnectorMetadata):  # type: ignore[misc]
    """The workers have nothing to do."""


class KVStewardConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = dict(self._kv_transfer_config.kv_connector_extra_config)
        compat.check(options.get("allow_version"))
        self._reorder_s = float(options.get("reorder_s", 0.25))
        self._block_tokens = int(vllm_config.cache_config.block_size)
        path = options.get("figures_path")
        self._figures_path = Path(path) if path else None
        self._figures_at = -FIGURES_EVERY_S
        self._check = bool(options.get("check", False))
        self._pool: Any = None
        self._steward: Steward | None = None
        self._told: dict[str, Told] = {}
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
        if not compat.caching(gpu_block_pool):
            log.warning("kvsteward: prefix caching is off, there is nothing to keep")
            return
        blocks = compat.free_blocks(gpu_block_pool)
        steward = Steward(blocks, time.monotonic, block_tokens=self._block_tokens, reorder_s=self._reorder_s)
        steward.free.on_fault(self._give_up)
        compat.replace(gpu_block_pool, steward.free)
        self._pool, self._steward = gpu_block_pool, steward
        log.info("kvsteward: keeps %d blocks of %d tokens by their worth", len(blocks), self._block_tokens)

    def on_new_request(self, request: Any) -> None:
        with self._guard() as steward:
            if steward is None:
                return
            told = self._hear(request, steward)
            if told.note:
                session = request.session_id or told.session
                if session:
                    steward.note(session, told)
                if compat.is_word(request):  # whoever said it waits for the figures
                    self._heard += 1
                    self._news_at = -stats.EVERY_S
                return
            steward.began(request.request_id, request.session_id)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        with self._guard() as steward:
            told = self._told.pop(request.request_id, Told())
            if steward is not None and not told.note:
                blocks = [block_id for group in block_ids for block_id in group]
                reason = compat.stop_reason(request)
                steward.ended(request.request_id, request.session_id, told, reason, blocks)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def build_connector_meta(self, scheduler_output: Any) -> NothingToMove:
        with self._guard() as steward:
            if steward is not None:
                steward.step()
                if self._check:
                    compat.check_totals(self._pool, steward.free)
                self._write_figures(steward)
        return NothingToMove()

    def get_kv_connector_stats(self) -> stats.SessionStats | None:
        """After each step, in both processes: the workers have nothing to say, the scheduler speaks once a second."""
        with self._guard() as steward:
            now = time.monotonic()
            if steward is not None and now - self._news_at >= stats.EVERY_S:
                self._news_at = now
                return stats.SessionStats(snapshot(steward.figures(), self._heard))
        return None

    def reset_cache(self) -> bool | None:
        with self._guard() as steward:
            if steward is not None:
                steward.free.clear()
        return True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    # worker side: nothing

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def _hear(self, request: Any, steward: Steward) -> Told:
        try:
            told = parse(request.kv_transfer_params)
            if told.session and not compat.is_word(request):
                raise ProtocolError("only the endpoint plug-in's own notes may name a session")
        except ProtocolError as error:
            if not steward.refused_hints:
                log.warning("kvsteward: a hint is not used: %s", error.message)
            steward.refused_hints += 1
            return Told()
        if told != Told():
            self._told[request.request_id] = told
        return told

    def _write_figures(self, steward: Steward) -> None:
        now = time.monotonic()
        if self._figures_path is None or now - self._figures_at < FIGURES_EVERY_S:
            return
        self._figures_at = now
        figures = steward.figures()
        body = {
            "free_blocks": figures.free_blocks,
            "turns": figures.turns,
            "refused_hints": figures.refused_hints,
            "sessions": {s: {"blocks": n, "tokens": figures.tokens(s)} for s, n in figures.sessions.items()},
        }
        fresh = self._figures_path.with_suffix(".new")
        fresh.write_text(json.dumps(body))
        os.replace(fresh, self._figures_path)  # noqa: PTH105  # readers never see half a file

    @contextlib.contextmanager
    def _guard(self) -> Iterator[Steward | None]:
        """The engine must outlive any fault of ours."""
        try:
            yield self._steward
        except Exception as error:  # noqa: BLE001  # whatever it is, the engine goes on without us
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        steward, self._steward = self._steward, None
        self._told.clear()
        if steward is not None:
            steward.free.ranked_by(None)
            log.error("kvsteward: stopped, vLLM's own order (LRU) is used from now on", exc_info=error)

"""A llama-server, known by its URL.

It knows llama-server's endpoints and its habit of letting a request that is not streamed outlive its client
(`streams_only`). Invariant: a request body is passed on byte for byte, but for one field, `id_slot`, put in front of
the others; a client that sends its own `id_slot` wins, since of equal keys the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from kvsteward.engines.base import EngineInfo, EngineLoad, EngineRequest
from kvsteward.engines.http import HttpOptions, HttpReply
from kvsteward.engines.metrics import LLAMA_SERVER, parse_load
from kvsteward.engines.openai import OpenAIEngine, Overrides, poll_until, with_fields
from kvsteward.engines.slots import SlotTable
from kvsteward.errors import EngineError, EngineUnavailableError

_SLOT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_COUNT_PATH = "/v1/chat/completions/input_tokens"
_REMEMBERED_REQUESTS = 1024


class LlamaServerEngine(OpenAIEngine):
    """llama-server by URL. `/props` is needed; `/slots`, `/metrics` and slot erasure are used where they are on.

    Over HTTP the server does not say whether its slots share one pool (`--kv-unified`, its default) or split it. So
    `kv_capacity_tokens` is the context of one slot, which holds in both cases; `kv_unified=False` multiplies it.
    """

    dialect: ClassVar[str] = "llama-server"
    health_path: ClassVar[str] = "/health"

    def __init__(
        self, options: HttpOptions, overrides: Overrides | None = None, *, kv_unified: bool | None = None
    ) -> None:
        super().__init__(replace(options, reuse_streams=False), overrides)  # cpp-httplib closes after a stream
        self._kv_unified = kv_unified
        self._table = SlotTable(0)
        self._slot_of_request: dict[str, int] = {}
        self._unplaced = 0
        self._sees_slots = False
        self._counts_directly = True

    async def _discover(self) -> EngineInfo:
        props = await self._props()
        cards = await self._model_cards()
        slots = int(props.get("total_slots") or 1)
        per_slot = _int(props.get("default_generation_settings", {}).get("n_ctx"))
        self._table = SlotTable(slots)
        self._sees_slots = await self._slots() is not None
        return EngineInfo(
            dialect=self.dialect,
            models=tuple(str(card["id"]) for card in cards),
            version=props.get("build_info"),
            context_limit_tokens=per_slot,
            kv_capacity_tokens=per_slot and per_slot * (slots if self._kv_unified is False else 1),
            block_tokens=1,
            max_running=slots,
            modalities=modalities_of(props),
            streams_only=True,
        )

    async def load(self) -> EngineLoad:
        text = await self._client.get_text("/metrics")
        return EngineLoad() if text is None else parse_load(text, LLAMA_SERVER)

    async def count_prompt_tokens(self, body: Mapping[str, Any]) -> int | None:
        if self._counts_directly:
            status, answer = await self._client.post_json(_COUNT_PATH, body)
            if status == 200 and isinstance(answer, dict):
                return _int(answer.get("input_tokens"))
            self._counts_directly = status not in (404, 405, 501)
        return await self._count_by_template(body)

    async def confirm_released(self, request_id: str, *, within_s: float) -> bool:
        if not self._sees_slots:
            return False
        return await poll_until(lambda: self._is_released(request_id), within_s)

    async def release_session(self, session_id: str, *, moved: bool = False, cache_salt: str | None = None) -> bool:
        if self._table.slot_of(session_id) is None or (slot := self._table.take(session_id)) is None:
            return False
        try:
            status, _ = await self._client.post_json(f"/slots/{slot}?action=erase", {})
        finally:
            self._table.give_back(slot)
        if status == 200:
            self._table.forget(session_id)
        return status == 200

    async def enter(self, request: EngineRequest) -> tuple[HttpReply, int | None]:
        slot = await self._choose_slot(request)
        self._in_flight += 1
        self._unplaced += slot is None
        try:
            body = request.body if slot is None else with_fields(request.body, b'"id_slot":%d' % slot)
            return await self._client.send(request.path, body, self._stamp(request)), slot
        except BaseException:
            self.leave(slot)
            raise

    def leave(self, place: int | None) -> None:
        self._in_flight -= 1
        if place is None:
            self._unplaced -= 1
        else:
            self._table.give_back(place)

    async def _choose_slot(self, request: EngineRequest) -> int | None:
        if request.session_id is None or request.path not in _SLOT_PATHS:
            return None
        # Requests without a place sit on slots that we did not choose: only the server knows which.
        avoid = await self._busy_slots() if self._unplaced else frozenset()
        slot = None if avoid is None else self._table.take(request.session_id, avoid)
        if slot is not None:
            while len(self._slot_of_request) >= _REMEMBERED_REQUESTS:
                self._slot_of_request.pop(next(iter(self._slot_of_request)))
            self._slot_of_request[request.request_id] = slot
        return slot

    async def _busy_slots(self) -> frozenset[int] | None:
        slots = await self._slots() if self._sees_slots else None
        if slots is None:
            return None
        return frozenset(int(slot["id"]) for slot in slots if slot.get("is_processing"))

    async def _is_released(self, request_id: str) -> bool:
        slots = await self._slots()
        if slots is None:
            return False
        processing = [slot["id"] for slot in slots if slot.get("is_processing")]
        place = self._slot_of_request.get(request_id)
        return len(processing) <= self._in_flight or (place is not None and place not in processing)

    async def _props(self) -> dict[str, Any]:
        status, props = await self._client.get_json("/props")
        if status == 200 and isinstance(props, dict):
            return props
        if status == 503:
            raise EngineUnavailableError(f"the llama-server at {self._client.url} is still loading its model")
        raise EngineError(f"the server at {self._client.url} answers /props with {status}: is it a llama-server?")

    async def _slots(self) -> list[dict[str, Any]] | None:
        status, slots = await self._client.get_json("/slots")
        return slots if status == 200 and isinstance(slots, list) else None

    async def _count_by_template(self, body: Mapping[str, Any]) -> int | None:
        status, rendered = await self._client.post_json("/apply-template", body)
        if status != 200 or not isinstance(rendered, dict):
            return None
        question = {"content": rendered.get("prompt", ""), "add_special": True, "parse_special": True}
        status, answer = await self._client.post_json("/tokenize", question)
        tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        return len(tokens) if isinstance(tokens, list) else None


def modalities_of(props: Mapping[str, Any]) -> frozenset[str]:
    """What `/props` says that the model can take in, besides text: "image", "audio", "video"."""
    said = props.get("modalities")
    if not isinstance(said, dict):
        return frozenset({"text"})
    names = {"vision": "image", "audio": "audio", "video": "video"}
    return frozenset({"text"} | {name for key, name in names.items() if said.get(key)})


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None

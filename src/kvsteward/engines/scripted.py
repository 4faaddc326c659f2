"""An engine in the process, for tests: scripted answers over a real KV budget, a real queue and real preemption.

Public, and meant for users of kvsteward too: it needs no model and no socket, is deterministic, and fails on demand.

    engine = ScriptedEngine(ScriptedOptions(kv_capacity_tokens=4096), answers=["hello", Answer(tool_calls=...)])
    engine.inject(Fault(die_after_chunks=3))          # the next request gets this fault

`scripted_server.serve_scripted(engine)` puts it behind a URL. It knows no model and no HTTP. Invariants: the tokens of
running requests never exceed the pool; a request that ends, however it ends, gives all its blocks back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol

import orjson

from kvsteward.engines.base import Engine, EngineInfo, EngineLoad, EngineReply, EngineRequest
from kvsteward.engines.scripted_kv import BlockPool, Table
from kvsteward.engines.scripted_wire import (
    Answer,
    ChatWriter,
    Piece,
    ToolCall,
    Usage,
    error_body,
    overflow_body,
    pieces_of_answer,
    tokens_of_prompt,
    tokens_of_text,
)
from kvsteward.errors import ConfigError, EngineError, EngineUnavailableError

__all__ = ["Answer", "Clock", "Fault", "LoopClock", "ScriptedEngine", "ScriptedOptions", "ToolCall"]

Imitated = Literal["openai", "vllm", "sglang", "llama-server"]
Answers = Sequence[Answer | str] | Callable[[Mapping[str, Any]], Answer | str]
_KEPT_REQUESTS = 1024
_CHAT = "/v1/chat/completions"


class Clock(Protocol):
    """Time as the engine sees it, in seconds."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The event loop's own time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request. Counts are of chunks that were sent before."""

    refuse: bool = False
    """The connection is refused: `open` raises EngineUnavailableError."""
    status: int | None = None
    """An error answer with this status, in place of the answer."""
    die_after_chunks: int | None = None
    """The engine dies: the body breaks off with EngineError."""
    malform_after_chunks: int | None = None
    """One event is cut in the middle of its JSON."""
    hang_after_chunks: int | None = None
    """Nothing more comes, and the connection stays open."""
    chunk_delay_s: float = 0.0
    """So long before each chunk."""
    zombie: bool = False
    """The engine does not notice that its client left: it goes on to the end of the answer, holding its KV."""


@dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """The engine's figures. Rates of None take no time."""

    imitates: Imitated = "vllm"
    """Whose error shapes and habits it has. As llama-server, a request that is not streamed outlives its client."""
    name: str = "scripted"
    hints: bool = False
    """As vLLM, it has kvsteward's connector and its endpoint plug-in: what it is told is in `notes`."""
    model: str = "scripted"
    kv_capacity_tokens: int = 16_384
    block_tokens: int = 16
    context_limit_tokens: int = 8_192
    max_running: int = 8
    max_waiting: int = 1024
    chars_per_token: int = 4
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    kv_bytes_per_token: int | None = None
    modalities: frozenset[str] = field(default_factory=lambda: frozenset({"text"}))


@dataclass(slots=True, eq=False)
class _Sequence:
    """One request inside the engine."""

    request: EngineRequest
    body: Mapping[str, Any]
    prompt: list[int]
    pieces: list[Piece]
    finish: str
    fault: Fault
    outlives: bool
    writer: ChatWriter
    out: asyncio.Queue[bytes | EngineError | None] = field(default_factory=asyncio.Queue)
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    table: Table | None = None
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    sent_chunks: int = 0
    task: asyncio.Task[None] | None = None


class ScriptedEngine(Engine):
    """See the module. Not thread-safe: it lives on one event loop."""

    def __init__(
        self, options: ScriptedOptions | None = None, *, answers: Answers = ("ok",), clock: Clock | None = None
    ) -> None:
        """Raises ConfigError if one request of the allowed length could not fit into the pool."""
        self.options = options or ScriptedOptions()
        self.name = self.options.name
        self.requests: deque[EngineRequest] = deque(maxlen=_KEPT_REQUESTS)
        """What was asked of it, oldest first."""
        self.notes: deque[tuple[str, str, Mapping[str, Any]]] = deque(maxlen=_KEPT_REQUESTS)
        """(session, "note" or "release", what was said) of each word to its endpoint plug-in."""
        self.preemptions_total = 0
        self.prefix_queried_tokens_total = 0
        self.prefix_hit_tokens_total = 0
        self.pool = BlockPool(self.options.kv_capacity_tokens // self.options.block_tokens, self.options.block_tokens)
        self._answers = answers
        self._clock = clock or LoopClock()
        self._faults: deque[Fault] = deque()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._living: dict[_Sequence, None] = {}
        self._session_blocks: dict[str, list[int]] = {}
        self._asked = 0
        self._closed = False
        if self.options.context_limit_tokens > self.pool.blocks * self.options.block_tokens:
            raise ConfigError("the context limit is larger than the KV capacity", param="context_limit_tokens")
        self.info = self._describe()

    def inject(self, *faults: Fault) -> None:
        """The next requests get these faults, one each."""
        self._faults.extend(faults)

    async def start(self) -> EngineInfo:
        self._closed = False
        return self.info

    async def close(self) -> None:
        self._closed = True
        tasks = [sequence.task for sequence in self._living if sequence.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage_ratio=self.pool.used_blocks / self.pool.blocks,
            preemptions_total=self.preemptions_total,
            prefix_queried_tokens_total=self.prefix_queried_tokens_total,
            prefix_hit_tokens_total=self.prefix_hit_tokens_total,
        )

    async def count_prompt_tokens(self, body: Mapping[str, Any]) -> int | None:
        return len(tokens_of_prompt(body, self.options.chars_per_token))

    def open(self, request: EngineRequest) -> AbstractAsyncContextManager[EngineReply]:
        return _Opened(self, request)

    async def confirm_released(self, request_id: str, *, within_s: float) -> bool:
        deadline = self._clock.now() + within_s
        while any(sequence.request.request_id == request_id for sequence in self._living):
            if self._clock.now() >= deadline:
                return False
            await self._clock.sleep(min(0.01, within_s))
        return True

    async def release_session(self, session_id: str, *, moved: bool = False, cache_salt: str | None = None) -> bool:
        if any(sequence.request.session_id == session_id for sequence in self._living):
            return False
        return self.pool.forget(self._session_blocks.pop(session_id, [])) > 0

    async def check(self) -> None:
        if self._closed:
            raise EngineUnavailableError("the scripted engine is closed")

    def held_blocks(self) -> dict[str, int]:
        """Cached blocks by the session that left them; shared ones count for each."""
        return {session: self.pool.known(hashes) for session, hashes in self._session_blocks.items()}

    def active_sessions(self) -> list[str | None]:
        """The session id of each request that the engine works on, its zombies included."""
        return [sequence.request.session_id for sequence in self._running]

    def abort(self, request_id: str) -> None:
        """Ends the requests whose id starts so, as SGLang's `/abort_request` does."""
        for sequence in list(self._living):
            if sequence.request.request_id.startswith(request_id) and sequence.task is not None:
                sequence.task.cancel()

    def _describe(self) -> EngineInfo:
        options = self.options
        return EngineInfo(
            dialect="scripted",
            models=(options.model,),
            version="1",
            context_limit_tokens=options.context_limit_tokens,
            kv_capacity_tokens=self.pool.blocks * options.block_tokens,
            block_tokens=options.block_tokens,
            kv_bytes_per_token=options.kv_bytes_per_token,
            max_running=options.max_running,
            modalities=options.modalities,
            streams_only=options.imitates == "llama-server",
        )

    # The life of one request: _begin -> _run (wait, prefill, decode) -> _end.

    def _begin(self, request: EngineRequest) -> _Sequence | _Refusal:
        """Reads the request and queues it, or says at once why not. Raises EngineUnavailableError."""
        if self._closed:
            raise EngineUnavailableError("the scripted engine is closed")
        self.requests.append(request)
        self._asked += 1
        fault = self._faults.popleft() if self._faults else Fault()
        if fault.refuse:
            raise EngineUnavailableError("the scripted engine refuses the connection")
        if fault.status is not None:
            return self._refuse(fault.status, "InternalServerError", "a fault was injected")
        body = _object(request.body)
        if request.path != _CHAT:
            return self._refuse(404, "NotFoundError", "Not Found")
        if body is None or not isinstance(body.get("messages"), list) or not body["messages"]:
            return self._refuse(400, "BadRequestError", "a JSON object with 'messages' is needed")
        return self._queue(request, body, fault)

    def _queue(self, request: EngineRequest, body: dict[str, Any], fault: Fault) -> _Sequence | _Refusal:
        options = self.options
        prompt = tokens_of_prompt(body, options.chars_per_token)
        if len(prompt) >= options.context_limit_tokens:
            return _Refusal(400, overflow_body(options.imitates, len(prompt), options.context_limit_tokens))
        if len(self._waiting) >= options.max_waiting:
            return self._refuse(503, "ServiceUnavailableError", "the queue is full")
        answer = self._answer_to(body)
        pieces = pieces_of_answer(answer, options.chars_per_token)
        limit = _limit(body, options.context_limit_tokens - len(prompt))
        whole = "tool_calls" if answer.tool_calls else "stop"
        sequence = _Sequence(
            request=request,
            body=body,
            prompt=prompt,
            pieces=pieces[:limit],
            finish=whole if len(pieces) <= limit else "length",
            fault=fault,
            outlives=fault.zombie or (options.imitates == "llama-server" and not body.get("stream")),
            writer=ChatWriter(body, answer, f"chatcmpl-{request.request_id}", options.model, int(self._clock.now())),
        )
        sequence.tokens = list(prompt)
        self._living[sequence] = None
        self._waiting.append(sequence)
        self._admit()
        sequence.task = asyncio.create_task(self._run(sequence), name=f"scripted-{request.request_id}")
        sequence.task.add_done_callback(lambda _: self._end(sequence))  # also if it is cancelled before its first step
        return sequence

    async def _run(self, sequence: _Sequence) -> None:
        try:
            await self._decode(sequence)
            await self._finish(sequence)
        except EngineError as error:
            sequence.out.put_nowait(error)

    async def _decode(self, sequence: _Sequence) -> None:
        await self._prefill(sequence)
        stream = bool(sequence.body.get("stream"))
        if stream:
            await self._send(sequence, sequence.writer.first())
        for piece in sequence.pieces:
            sequence.tokens += tokens_of_text(piece.text, self.options.chars_per_token) or [0]
            while not self._grow(sequence):
                await self._prefill(sequence)
            await self._clock.sleep(_seconds(1, self.options.decode_tokens_per_s))
            if stream:
                await self._send(sequence, sequence.writer.delta(piece))

    async def _finish(self, sequence: _Sequence) -> None:
        usage = Usage(len(sequence.prompt), sequence.cached_tokens or 0, len(sequence.pieces))
        if sequence.body.get("stream"):
            for event in sequence.writer.last(sequence.finish, usage):
                await self._send(sequence, event)
        else:
            await self._send(sequence, sequence.writer.whole(sequence.pieces, sequence.finish, usage))

    async def _prefill(self, sequence: _Sequence) -> None:
        """Waits for room, then computes what the prefix cache does not have."""
        await sequence.admitted.wait()
        assert sequence.table is not None
        cached = sequence.table.cached_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
            self.prefix_queried_tokens_total += len(sequence.prompt)
            self.prefix_hit_tokens_total += cached
        await self._clock.sleep(_seconds(len(sequence.tokens) - cached, self.options.prefill_tokens_per_s))

    async def _send(self, sequence: _Sequence, chunk: bytes) -> None:
        fault = sequence.fault
        if fault.chunk_delay_s:
            await self._clock.sleep(fault.chunk_delay_s)
        if fault.die_after_chunks == sequence.sent_chunks:
            raise EngineError("the scripted engine died in the middle of its answer")
        if fault.hang_after_chunks == sequence.sent_chunks:
            await asyncio.Event().wait()
        if fault.malform_after_chunks == sequence.sent_chunks:
            chunk = chunk[: len(chunk) // 2] + b"\n\n"
        sequence.sent_chunks += 1
        sequence.out.put_nowait(chunk)

    def _admit(self) -> None:
        """Starts waiting requests, first come first served, while slots and blocks last."""
        while self._waiting and len(self._running) < self.options.max_running:
            table = self.pool.allocate(self._waiting[0].tokens)
            if table is None:
                return
            sequence = self._waiting.popleft()
            sequence.table = table
            self._running.append(sequence)
            sequence.admitted.set()

    def _grow(self, sequence: _Sequence) -> bool:
        """Room for the newest token. False if the request itself had to make room and waits again."""
        if sequence.table is None:  # preempted while it computed
            return False
        while not self.pool.grow(sequence.table, sequence.tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: _Sequence) -> None:
        """The last one in loses its blocks and will be computed again, before all that wait."""
        self.preemptions_total += 1
        self._running.remove(victim)
        self._release_blocks(victim)
        victim.admitted.clear()
        self._waiting.appendleft(victim)

    def _end(self, sequence: _Sequence) -> None:
        del self._living[sequence]
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._release_blocks(sequence)
        sequence.out.put_nowait(None)
        self._admit()

    def _release_blocks(self, sequence: _Sequence) -> None:
        table, sequence.table = sequence.table, None
        if table is not None:
            if sequence.request.session_id is not None:
                self._session_blocks.pop(sequence.request.session_id, None)
                self._session_blocks[sequence.request.session_id] = table.hashes
                while len(self._session_blocks) > _KEPT_REQUESTS:
                    self._session_blocks.pop(next(iter(self._session_blocks)))
            self.pool.release(table)

    def _answer_to(self, body: Mapping[str, Any]) -> Answer:
        if callable(self._answers):
            answer = self._answers(body)
        else:
            answer = self._answers[(self._asked - 1) % len(self._answers)]
        return Answer(answer) if isinstance(answer, str) else answer

    def _refuse(self, status: int, kind: str, message: str) -> _Refusal:
        return _Refusal(status, error_body(self.options.imitates, status, kind, message))


@dataclass(frozen=True, slots=True)
class _Refusal:
    status: int
    body: Mapping[str, Any]


class _Reply(EngineReply):
    def __init__(self, status: int, content_type: str, source: AsyncIterator[bytes]) -> None:
        self.status = status
        self.headers = {"content-type": content_type}
        self._source = source

    def chunks(self) -> AsyncIterator[bytes]:
        return self._source


class _Opened:
    """The context of one request; to leave it is to hang up."""

    def __init__(self, engine: ScriptedEngine, request: EngineRequest) -> None:
        self._engine = engine
        self._request = request
        self._sequence: _Sequence | None = None

    async def __aenter__(self) -> EngineReply:
        begun = self._engine._begin(self._request)
        if isinstance(begun, _Refusal):
            return _Reply(begun.status, "application/json", _once(orjson.dumps(begun.body)))
        self._sequence = begun
        if begun.body.get("stream"):
            return _Reply(200, "text/event-stream", _drain(begun.out))
        try:
            whole = [chunk async for chunk in _drain(begun.out)]  # its head comes with its body
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return _Reply(200, "application/json", _once(b"".join(whole)))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sequence = self._sequence
        if sequence is not None and sequence.task is not None and not sequence.outlives:
            sequence.task.cancel()


async def _drain(out: asyncio.Queue[bytes | EngineError | None]) -> AsyncIterator[bytes]:
    while (item := await out.get()) is not None:
        if isinstance(item, EngineError):
            raise item
        yield item


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _limit(body: Mapping[str, Any], room: int) -> int:
    asked = body.get("max_completion_tokens") or body.get("max_tokens")
    return min(asked, room) if isinstance(asked, int) and asked > 0 else room


def _seconds(tokens: int, per_s: float | None) -> float:
    return 0.0 if per_s is None else tokens / per_s

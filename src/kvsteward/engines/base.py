"""The contract of an engine: what the gateway may ask of vLLM, SGLang, llama-server or any OpenAI-compatible server.

An adapter translates; it decides nothing and knows no sessions beyond the id that it is handed. To add one, write a
file here, give it a line in `registry.py`, a row in the metric tables (`metrics.py`) and a row in the shared test
matrix (`tests/engines/test_contract.py`).

Invariant: leaving the context of an `EngineReply` closes the connection to the engine, whatever happened, so that
no engine keeps decoding for a client that has gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine runs. `None` means: the engine does not say."""

    dialect: str
    """One of "llama-server", "vllm", "sglang", "openai", "scripted"."""
    models: tuple[str, ...]
    version: str | None = None
    context_limit_tokens: int | None = None
    """The longest prompt + output of one request."""
    kv_capacity_tokens: int | None = None
    """Tokens that the whole KV pool holds, over all requests."""
    block_tokens: int | None = None
    k_dtype: str | None = None
    v_dtype: str | None = None
    kv_bytes_per_token: int | None = None
    weight_bytes: int | None = None
    max_running: int | None = None
    """Requests that can decode at the same time (slots, max_num_seqs)."""
    modalities: frozenset[str] = field(default_factory=lambda: frozenset({"text"}))
    streams_only: bool = False
    """True where a request that is not streamed outlives its client, so that the gateway must always stream."""
    prompt_logprobs: bool = False
    """It can say how likely each token of a prompt is."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A reading of a live engine. Counters are totals since its start; `None` means: not reported."""

    running: int | None = None
    waiting: int | None = None
    kv_usage_ratio: float | None = None
    preemptions_total: int | None = None
    prefix_queried_tokens_total: int | None = None
    prefix_hit_tokens_total: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What idle sessions have in an engine's pool by its own account. `sessions`: blocks and tokens of the largest."""

    sessions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    blocks: int = 0
    tokens: int = 0
    """Of all sessions, those that are not named too."""
    complete: bool = True
    """All are named: another session has nothing."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What the gateway knows of a session that helps an engine to choose which idle KV it gives up."""

    ttl_s: float | None = None
    priority: str = "default"
    """One of "interactive", "default", "batch"."""
    tools: tuple[str, ...] = ()
    """What it waits for: its turn ended in calls of these tools."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as it goes to the engine. `body` is the JSON as it will be sent."""

    path: str
    body: bytes
    request_id: str
    session_id: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class EngineReply(ABC):
    """The engine's answer: status and headers are known, the body is still coming."""

    status: int
    headers: Mapping[str, str]

    @abstractmethod
    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, cut anywhere. Raises EngineError when the engine dies in the middle."""


class Engine(ABC):
    """One engine process, or one URL. Async, safe for concurrent use. All methods raise only EngineError subclasses."""

    info: EngineInfo
    """Filled by `start`."""
    name: str
    """What people call this engine: its URL, or its kind. Known before `start`, and the same after a restart."""
    isolates: bool = False
    """True where prompts can be kept from sharing a cache (`cache_fields`)."""
    takes_hints: bool = False
    """True where the engine orders its idle KV by what it is told; `start` finds out."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Reaches (or launches) the engine and learns what it is. Idempotent; called again after a crash."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go of everything, and of the process where the adapter owns one. Idempotent."""

    @abstractmethod
    async def load(self) -> EngineLoad:
        """Reads the live figures. Changes nothing."""

    @abstractmethod
    async def count_prompt_tokens(self, body: Mapping[str, Any]) -> int | None:
        """The exact prompt length of a chat body (messages, tools, template fields) as the engine will count it,
        or None where the engine cannot say. A round trip: not for every turn. Changes nothing."""

    async def prompt_logprobs(
        self, prompt: str, *, model: str, request_id: str, cache_salt: str | None = None
    ) -> Sequence[tuple[str, float | None]] | None:
        """The text of each token of a prompt and its log-probability given those before it (None for the first), or
        None where the engine cannot say. A prefill of the whole prompt, which no cache shortens."""
        return None

    @abstractmethod
    def open(self, request: EngineRequest) -> AbstractAsyncContextManager[EngineReply]:
        """Sends a request. An error status is an ordinary reply: the caller reads `status`. Nothing is retried."""

    @abstractmethod
    async def confirm_released(self, request_id: str, *, within_s: float) -> bool:
        """After a reply was left early: True once the engine's own figures show that it stopped working on it."""

    @abstractmethod
    async def release_session(self, session_id: str, *, moved: bool = False, cache_salt: str | None = None) -> bool:
        """Gives back the KV of an idle session now. True if the engine had some and could; False where it cannot.
        `moved`: the session goes on elsewhere, so that what a shared store has of it must stay. `cache_salt`: that of
        its turns."""

    def cache_fields(self, salt: str | None, sent: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields for the body of a request, so that its cache is shared only where the salt is the same. `sent` is the
        client's body, whose own salt divides further. Pure; empty where the engine cannot (`isolates`)."""
        return {}

    def hint_fields(self, keep: Keep, sent: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields for the body of a turn that tell the engine what is known of its session. `sent` is the client's body,
        whose own word wins. Pure; empty where the engine takes no hints."""
        return {}

    async def note_pause(self, session_id: str, keep: Keep) -> None:
        """The session's turn ended in tool calls, `keep.tools`. Nothing where the engine takes no hints."""
        return

    async def held(self) -> Held | None:
        """What idle sessions have in the pool; None where the engine does not say. Changes nothing."""
        return None

    @abstractmethod
    async def check(self) -> None:
        """Raises EngineUnavailableError unless the engine would answer a request now. Cheap: the health probe."""

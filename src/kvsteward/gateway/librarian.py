"""Finds by meaning: keeps a vector for each passage of the logs, and says which entries lie near a question.

After a turn its session is put in a queue; one task embeds what is new on the path to the head, oldest first, so that
what is known is always the beginning of a path, and whatever was missed (a crash, an endpoint that was down, a log of
before) is caught up with at the session's next turn. No turn waits for it, and it uses a thread of its own.

A question of a turn or of the API does wait, a bounded time, and is asked only of an endpoint that has not just failed.

Knows nothing of words, ranks and answers (`recall`). Invariants: a failure is counted and costs nothing but the
vectors; vectors of two models, lengths or prefixes never meet; what is queued, read and tried is bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kvsteward.context.passages import RECIPE, passages
from kvsteward.engines.embeddings import Embedder, EmbeddingOptions, Vector
from kvsteward.errors import (
    EngineError,
    EngineResponseError,
    EngineTimeoutError,
    EngineUnavailableError,
    KVStewardError,
    NotFoundError,
    StoreError,
)
from kvsteward.sessions import Session, SessionStore, Space, VectorIndex
from kvsteward.sessions.words import searched_text

if TYPE_CHECKING:
    from kvsteward.gateway.app import Steward

log = logging.getLogger("kvsteward")
T = TypeVar("T")

Miss = Literal["timeout", "unavailable", "refused", "unusable", "resting", "no_vectors"]
"""Why a search had to do without meaning: what the endpoint did; it failed a moment ago; nothing is embedded yet."""

MAX_QUEUE = 1_024
BATCH = 32
"""Passages of one request."""
TRIES = 3
_BATCHES_A_TURN = 8
"""Of one session, before the next one has its turn."""
_MAX_BACK = 20_000
_BLOCK = 16
_QUERY_CHARS = 2_000
_PASSING = frozenset({401, 403, 404, 408, 425, 429, 502, 503, 504})
"""Statuses that say nothing about the texts that were sent."""


@dataclass(frozen=True, slots=True)
class Sought:
    """Entries by meaning, best first; or why there are none."""

    hashes: tuple[str, ...] = ()
    miss: Miss | None = None


class Moved(Exception):
    """The endpoint's vectors have another length than before: another model stands behind its name."""


class Librarian:
    """The vectors of one gateway. Mutable, for one event loop."""

    def __init__(self, steward: Steward, options: EmbeddingOptions, vectors: VectorIndex) -> None:
        self._steward, self._vectors = steward, vectors
        self._embedder = Embedder(options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvsteward-vectors")
        self._queue: OrderedDict[str, int] = OrderedDict()
        """Sessions with something new, and how often they failed."""
        self._at_work = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._space: Space | None = None
        self._failed_s: float | None = None
        prefix = hashlib.blake2b(options.text_prefix.encode(), digest_size=4).hexdigest() if options.text_prefix else ""
        self._recipe = RECIPE + prefix

    @property
    def waiting(self) -> int:
        """Sessions in the queue and at work."""
        return len(self._queue) + self._at_work

    def start(self) -> None:
        self._embedder.open()
        self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Idempotent. What is queued is caught up with by the next gateway."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._embedder.close()
        await self._call(self._vectors.close)
        self._thread.shutdown(wait=False)  # that was its last work

    def after_turn(self, session_id: str) -> None:
        """A turn is in the log. What cannot be queued is caught up with after a later turn."""
        if session_id not in self._queue and len(self._queue) >= MAX_QUEUE:
            self._count("dropped")
            return
        self._queue.setdefault(session_id, 0)
        self._wake.set()

    def forget(self, session_id: str) -> None:
        """The session has ended. Its vectors go with its log."""
        self._queue.pop(session_id, None)

    async def search(self, session_id: str, query: str, limit: int) -> Sought:
        """Entries of a session by meaning, all branches. Never raises for what the endpoint does."""
        found = await self._search(session_id, query, limit)
        self._steward.telemetry.recall_searches.labels(found.miss or "fused").inc()
        return found

    # -- asking -------------------------------------------------------------------------------------------------

    async def _search(self, session_id: str, query: str, limit: int) -> Sought:
        if self._resting():
            return Sought(miss="resting")
        try:
            vector = await self._embedder.query(query[:_QUERY_CHARS])
        except EngineError as error:
            self._failed(error)
            return Sought(miss=miss_of(error))
        self._failed_s = None
        space = self._learn(vector)
        try:
            near = await self._call(self._vectors.nearest, session_id, space, vector, limit=limit)
        except (StoreError, ValueError) as error:
            log.warning("cannot search the vectors of %s: %s", session_id, error)
            return Sought(miss="unusable")
        if not near:
            self.after_turn(session_id)  # a log of before, or of another model
            return Sought(miss="no_vectors")
        return Sought(tuple(one.hash for one in near))

    def _learn(self, vector: Vector) -> Space:
        """The space of a vector that came. Where it is another than before, sessions are embedded again."""
        space = Space(self._embedder.options.model, len(vector), self._recipe)
        if self._space not in {None, space}:
            log.warning("embeddings of %s have %d dimensions now", space.model, space.dimensions)
        self._space = space
        return space

    def _resting(self) -> bool:
        return self._failed_s is not None and self._steward.now() - self._failed_s < self._embedder.options.rest_s

    def _failed(self, error: EngineError) -> None:
        if not self._resting():
            log.warning("recall goes by words alone for now: %s", error.message)
        self._failed_s = self._steward.now()

    # -- embedding ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """One session after the other, for ever."""
        while True:
            await self._wake.wait()
            while self._queue:
                session_id, failures = self._queue.popitem(last=False)
                self._at_work = 1
                left = await self._tried_session(session_id, failures)
                self._at_work = 0
                if left is not None:
                    self._queue.setdefault(session_id, left)
            self._wake.clear()

    async def _tried_session(self, session_id: str, failures: int) -> int | None:
        """None where there is nothing more to do for now, else how often in a row the session has failed."""
        try:
            done = await self._embedded(session_id)
        except EngineError as error:
            self._failed(error)
            self._count("failed")
            if failures + 1 >= TRIES:
                self._count("given_up")
                return None
            await asyncio.sleep(self._embedder.options.rest_s)
            return failures + 1
        except (KVStewardError, ValueError) as error:  # the store, or an entry that is not what it was
            log.warning("cannot embed %s: %s", session_id, error)
            self._count("failed")
            return None
        self._failed_s = None
        return None if done else 0

    async def _embedded(self, session_id: str) -> bool:
        """Embeds what is new in a session. False where more is left."""
        desk = self._steward.desk
        session = await desk.call(desk.store.get, session_id)
        if session is None:
            return True
        space = self._space or self._learn((await self._tried(["."]))[0])
        new, whole = await self._new(session, space)
        sent = 0
        for start in range(0, len(new), BATCH):
            if sent >= _BATCHES_A_TURN:
                return False
            try:
                sent += await self._embedded_entries(session_id, space, new[start : start + BATCH])
            except Moved:
                return False
        if whole:
            await self._call(self._vectors.forget_others, session_id, space)
        return True

    async def _new(self, session: Session, space: Space) -> tuple[list[str], bool]:
        """The entries on the path to the head that have no vectors yet, oldest first; and whether that is all of it."""
        desk, at, new = self._steward.desk, session.head, list[str]()
        while len(new) < _MAX_BACK:
            block, at = await desk.call(_back, desk.store, session.id, at)
            known = await self._call(self._vectors.known, session.id, space, block)
            for hash_ in block:
                if hash_ in known:
                    return new[::-1], False
                new.append(hash_)
            if not at:
                return new[::-1], True
        return new[::-1], True

    async def _embedded_entries(self, session_id: str, space: Space, hashes: Sequence[str]) -> int:
        """Embeds these entries, each whole. Returns how many requests it took; raises Moved, EngineError."""
        desk, taken = self._steward.desk, list[tuple[str, list[str]]]()
        requests = 0

        async def flush() -> None:
            nonlocal requests
            if taken:
                requests += await self._kept(session_id, space, taken)
                taken.clear()

        for hash_ in hashes:
            entry = await desk.call(desk.store.item, session_id, hash_)
            if entry is None:
                break  # deleted meanwhile
            texts = await self._call(passages_of, entry.raw)
            if sum(len(held) for _, held in taken) + len(texts) > BATCH:
                await flush()
            if not taken and await self._call(self._vectors.adopt, session_id, space, hash_):
                self._count("adopted", len(texts))
            else:
                taken.append((hash_, texts))
        await flush()
        return requests

    async def _kept(self, session_id: str, space: Space, entries: Sequence[tuple[str, list[str]]]) -> int:
        texts = [text for _, held in entries for text in held]
        vectors = list[Vector | None]()
        for start in range(0, len(texts), BATCH):
            vectors += await self._each(texts[start : start + BATCH])
        if any(vector is not None and len(vector) != space.dimensions for vector in vectors):
            self._learn(next(v for v in vectors if v is not None and len(v) != space.dimensions))
            raise Moved
        at = 0
        for hash_, held in entries:
            own = [vector for vector in vectors[at : at + len(held)] if vector is not None]
            at += len(held)
            await self._call(self._vectors.add, session_id, space, hash_, own)
            self._count("stored", len(own))
            self._count("refused", len(held) - len(own))
        return max(1, -(-len(texts) // BATCH))

    async def _each(self, texts: Sequence[str]) -> list[Vector | None]:
        """A vector for each text; None for one that the endpoint does not want, which a whole batch fails of. A batch
        that takes too long, on a CPU for one, is halved."""
        try:
            return list[Vector | None](await self._tried(texts))
        except EngineTimeoutError:
            if len(texts) == 1:
                raise
            half = len(texts) // 2
            return [*await self._each(texts[:half]), *await self._each(texts[half:])]
        except EngineResponseError as error:
            if error.status in _PASSING or (len(texts) == 1 and error.status >= 500):
                raise
            if len(texts) == 1:
                return [None]
            refused = error
        found = list[Vector | None]()
        for text in texts:
            try:
                found += await self._embedder.texts([text])
            except EngineResponseError as error:
                found.append(None)
                if error.status in _PASSING or (error.status >= 500 and len(found) >= TRIES and not any(found)):
                    raise
        if not any(found):
            raise refused
        return found

    async def _tried(self, texts: Sequence[str]) -> list[Vector]:
        """Up to `TRIES` times, with growing pauses, where trying again may help."""
        for attempt in range(TRIES):
            try:
                return await self._embedder.texts(texts)
            except EngineError as error:
                if attempt == TRIES - 1 or not _may_pass(error, len(texts)):
                    raise
            await asyncio.sleep(self._embedder.options.back_off_s * 2**attempt)
        raise AssertionError("a try ends in a vector or an error")

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """On this object's thread: it reads files and multiplies."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    def _count(self, outcome: str, number: int = 1) -> None:
        if number:
            self._steward.telemetry.embedded.labels(outcome).inc(number)


def _may_pass(error: EngineError, texts: int) -> bool:
    """Whether the same request may have another answer soon."""
    if isinstance(error, EngineResponseError):
        return error.status >= 500 or error.status in {408, 425, 429}
    return texts == 1 or not isinstance(error, EngineTimeoutError)


def miss_of(error: EngineError) -> Miss:
    """What an error of the endpoint is called in the counters."""
    if isinstance(error, EngineTimeoutError):
        return "timeout"
    if isinstance(error, EngineUnavailableError):
        return "unavailable"
    return "refused" if isinstance(error, EngineResponseError) else "unusable"


def passages_of(raw: bytes) -> list[str]:
    """What of a message is embedded: the text that a search by words sees, too."""
    return passages(searched_text(raw))


def _back(store: SessionStore, session_id: str, at: str) -> tuple[list[str], str]:
    """On the store's thread: some entries of the path that ends at `at`, newest first, and where it goes on ("" at its
    beginning)."""
    found = list[str]()
    for _ in range(_BLOCK):
        try:
            entry = store.item(session_id, at)
        except NotFoundError:
            return found, ""
        if entry is None:
            return found, ""
        found.append(entry.hash)
        if entry.depth == 1:
            return found, ""
        at = entry.parent
    return found, at

"""The desk where a turn finds its session: who is it, what is already in the log, what is new, what is its view.

Joins the session store (on a thread of its own, since it blocks) with the views that the context pipeline makes of
it. Views are cached and can always be derived again from the log. Mutable, for one event loop.

Invariant: what a client sent is in the log before an engine sees it; what an engine said is in the log before the
client is told that the answer is complete.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
import orjson

from kvsteward.context.hygiene import canonical_tools
from kvsteward.context.images import hashes
from kvsteward.context.layout import Arrival, Item, View, derive, with_note
from kvsteward.context.pipeline import Note, Prepared, Reduction, decode_epoch, encode_epoch
from kvsteward.context.tokens import Estimator
from kvsteward.context.unsure import Classified
from kvsteward.errors import NotFoundError, StateError, StoreError
from kvsteward.gateway.ids import Ids
from kvsteward.gateway.settings import Settings, Tenant
from kvsteward.sessions.base import Decision, Entry, Found, Session, SessionStore, State
from kvsteward.sessions.lifecycle import step
from kvsteward.wire.chat import ChatRequest, Message, check_tool_pairs, text_of
from kvsteward.wire.fingerprint import body_hash, chain, link, root
from kvsteward.wire.identity import Identity

T = TypeVar("T")
_MAX_VIEWS = 1_024
_LOOK_BACK = 512
_TITLE_CHARS = 80


@dataclass(frozen=True, slots=True)
class Resolved:
    """A turn's session. `node` is the newest entry that was known before; `arrivals` come after it."""

    session: Session
    node: str
    view: View
    log_tokens: int
    """Length of the path up to `node`, as it was received."""
    arrivals: tuple[Arrival, ...]

    @property
    def head(self) -> str:
        return self.arrivals[-1].hash if self.arrivals else self.node


@dataclass(frozen=True, slots=True)
class Tools:
    """The client's tools: as they were sent, and as the engine is shown them."""

    sent: Any = None
    shown: Any = None


@dataclass(frozen=True, slots=True)
class Shown:
    """A view, and the length of the log that it stands for."""

    view: View
    log_tokens: int


class Desk:
    """Sessions of one gateway."""

    def __init__(self, store: SessionStore, settings: Settings, now: Callable[[], float]) -> None:
        self.store = store
        self._settings = settings
        self._now = now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvsteward-store")
        self._views: OrderedDict[tuple[str, str], Shown] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._active: dict[str, int] = {}
        self._unended: set[str] = set()
        self.estimator = Estimator()
        self.ids = Ids()

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a store call on the store's thread. It is finished even if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()

        def finished(done: Future[T]) -> None:
            loop.call_soon_threadsafe(_hand_over, done, waiter)

        self._thread.submit(function, *args, **kwargs).add_done_callback(finished)
        return await waiter

    async def close(self) -> None:
        """Closes the store, and waits beside the loop for what other tasks had still asked of its thread."""
        try:
            await self.call(self.store.close)
        finally:
            await asyncio.to_thread(self._thread.shutdown)

    def lock(self, session_id: str) -> asyncio.Lock:
        """One turn of a session is prepared at a time; any number of them may stream."""
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        return lock

    # -- finding the session ------------------------------------------------------------------------------------

    async def resolve(self, request: ChatRequest, identity: Identity, tenant: Tenant) -> Resolved:
        """The session of a request, found or created. Raises NotFoundError for an unknown `previous_response_id`,
        ProtocolError for a tool message without its call."""
        if identity.how == "previous_response_id":
            return await self._continued(request, identity.value, tenant)
        check_tool_pairs(request.messages)
        hashes = list(chain(request.messages, tenant=tenant.name))
        if identity.how == "fingerprint":
            session, known = await self._by_fingerprint(request, hashes, tenant)
        else:
            session, known = await self._by_id(storage_id(tenant.name, identity.value), request, hashes, tenant)
        return await self._resolved(session, request.messages, hashes, known, tenant)

    async def _resolved(
        self, session: Session, messages: Sequence[Message], hashes: Sequence[str], known: int, tenant: Tenant
    ) -> Resolved:
        node = hashes[known - 1] if known else root(tenant.name)
        shown = await self.shown(session.id, node) if known else Shown(View(), 0)
        arrivals = tuple(Arrival(hashes[i], i + 1, messages[i]) for i in range(known, len(messages)))
        return Resolved(session, node, shown.view, shown.log_tokens, arrivals)

    async def _by_id(
        self, session_id: str, request: ChatRequest, hashes: Sequence[str], tenant: Tenant
    ) -> tuple[Session, int]:
        session = await self.call(self.store.get, session_id)
        if session is None:
            return self._new(session_id, request, tenant), 0
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] == session.head:
                return session, index + 1
        found = await self.call(self.store.find, hashes[::-1], session_id=session_id)
        return session, hashes.index(found[0].hash) + 1 if found else 0

    async def _by_fingerprint(self, request: ChatRequest, hashes: Sequence[str], tenant: Tenant) -> tuple[Session, int]:
        """A history is recognised by an answer in it: two sessions that begin alike are still two sessions."""
        first = next((i for i, m in enumerate(request.messages) if m["role"] == "assistant"), len(hashes))
        if first == len(hashes):
            return self._new(self.ids.new(), request, tenant), 0
        session, place = await self.call(self._recognised, hashes[first:][::-1][:_LOOK_BACK])
        if place is None:
            return self._new(self.ids.new(), request, tenant), 0
        known = hashes.index(place.hash) + 1
        return session or await self._branched(place, request, tenant), known

    def _recognised(self, hashes: Sequence[str]) -> tuple[Session | None, Found | None]:
        """On the store's thread: the longest history that is known, and the session that goes on from it. None for
        the session: its history is another session's past."""
        found = self.store.find(hashes)
        longest = [f for f in found if f.hash == found[0].hash]
        for place in longest:
            session = self.store.get(place.session_id)
            if session and (place.is_head or self._answers_again(session, place)):
                return session, place
        return None, longest[0] if longest else None

    def _answers_again(self, session: Session, place: Found) -> bool:
        """The client repeats a request whose answer it did not keep: the session's head is that answer."""
        head = self.store.item(session.id, session.head)
        return head is not None and head.parent == place.hash and head.source == "engine"

    async def _branched(self, place: Found, request: ChatRequest, tenant: Tenant) -> Session:
        source = await self.call(self.store.get, place.session_id)
        session = replace(
            self._new(self.ids.new(), request, tenant),
            head=place.hash,
            branched_from=place.session_id,
            engine=source.engine if source else None,  # what both begin with is cached there
        )
        await self.call(self.store.branch, session, place.session_id, place.hash)
        return session

    async def _continued(self, request: ChatRequest, response_id: str, tenant: Tenant) -> Resolved:
        """`previous_response_id`: the messages go on from that answer, unless the client sent the whole history."""
        place = await self.call(self.store.find_response, tenant.name, response_id)
        session = await self.call(self.store.get, place.session_id) if place else None
        if place is None or session is None:
            raise NotFoundError(
                f"no answer with the id '{response_id}' is in the log",
                hint="Send the whole history, or an id that this deployment returned and has not deleted.",
                param="previous_response_id",
            )
        hashes = list(chain(request.messages, tenant=tenant.name))
        if place.hash in hashes:
            check_tool_pairs(request.messages)
            return await self._resolved(session, request.messages, hashes, hashes.index(place.hash) + 1, tenant)
        path = await self.call(self.store.path, session.id, place.hash)
        history = [orjson.loads(entry.raw) for entry in path]
        check_tool_pairs([*history, *request.messages])
        return await self.after(session, place.hash, len(path), request.messages)

    async def after(self, session: Session, node: str, depth: int, messages: Sequence[Message]) -> Resolved:
        """Messages that go on from a known entry."""
        shown = await self.shown(session.id, node) if depth else Shown(View(), 0)
        arrivals: list[Arrival] = []
        parent = node
        for offset, message in enumerate(messages):
            parent = link(parent, message)
            arrivals.append(Arrival(parent, depth + offset + 1, message))
        return Resolved(session, node, shown.view, shown.log_tokens, tuple(arrivals))

    def _new(self, session_id: str, request: ChatRequest, tenant: Tenant) -> Session:
        title = next((text_of(m) for m in request.messages if m["role"] == "user"), "")
        return self.new_session(session_id, tenant, request.model, " ".join(title.split())[:_TITLE_CHARS])

    def new_session(
        self, session_id: str, tenant: Tenant, model: str | None = None, title: str = "", ttl_s: float | None = None
    ) -> Session:
        """A session's row; it is stored with its first entries."""
        now = self._now()
        return Session(
            id=session_id,
            tenant=tenant.name,
            state="new",
            head=root(tenant.name),
            created_s=now,
            last_used_s=now,
            ttl_s=ttl_s or tenant.ttl_s or self._settings.ttl_s,
            model=model or None,
            title=title,
        )

    # -- views --------------------------------------------------------------------------------------------------

    async def shown(self, session_id: str, node: str) -> Shown:
        """The view at an entry: from the cache, or derived from the log and its decisions."""
        key = (session_id, node)
        cached = self._views.get(key)
        if cached is not None:
            self._views.move_to_end(key)
            return cached
        path = await self.call(self.store.path, session_id, node)
        decisions = await self.call(self.store.decisions, session_id)
        return self.remember(session_id, node, await asyncio.to_thread(rebuild, path, decisions, self.estimator))

    def remember(self, session_id: str, node: str, shown: Shown) -> Shown:
        self._views[(session_id, node)] = shown
        while len(self._views) > _MAX_VIEWS:
            self._views.popitem(last=False)
        return shown

    def recount(self, session_id: str, node: str, view: View) -> None:
        """The engine has counted the view at an entry."""
        shown = self._views.get((session_id, node))
        if shown is not None:
            self._views[(session_id, node)] = replace(shown, view=view)

    def forget(self, session_id: str) -> None:
        for key in [key for key in self._views if key[0] == session_id]:
            del self._views[key]

    # -- writing the log ----------------------------------------------------------------------------------------

    async def log_arrivals(self, resolved: Resolved, prepared: Prepared | None, tools: Tools | None = None) -> Session:
        """Writes what the client sent, and what the pipeline decided about it. `prepared` None: the turn was refused;
        what was said is kept all the same."""
        now = self._now()
        items = {item.hash: item for item in prepared.view.items} if prepared else {}
        entries: list[Entry] = []
        parent = resolved.node
        log_tokens = resolved.log_tokens
        for arrival in resolved.arrivals:
            item = items.get(arrival.hash)
            tokens = item.log_tokens if item else self.estimator.message(arrival.message)
            log_tokens += tokens
            raw = orjson.dumps(arrival.message)
            entries.append(Entry(arrival.hash, parent, arrival.depth, "client", raw, now, tokens))
            parent = arrival.hash
        decisions = _decisions(resolved, prepared, tools, now) if entries or prepared else []
        count = 0
        if prepared:
            self.remember(resolved.session.id, resolved.head, Shown(prepared.view, log_tokens))
            count = self._count_in(resolved.session.id)

        def changed(session: Session) -> Session:
            """Only what this turn knows: the rest is other turns' and other gateways' too."""
            session = replace(
                session, head=resolved.head, last_used_s=now, log_tokens=log_tokens, engine=resolved.session.engine
            )
            if prepared is None:
                return session
            saved_tokens = max(0, log_tokens - prepared.view.message_tokens)
            return replace(
                session,
                state=_started(session.state, count),
                view_tokens=prepared.tokens,
                log_tokens=max(log_tokens, prepared.tokens + saved_tokens),
                saved_tokens=saved_tokens,
            )

        try:
            return await self.call(self._append, resolved.session, changed, entries, decisions)
        except BaseException:
            if count:  # this turn will not end by itself. Its append is finished even now, and this comes after it
                self._thread.submit(self._end_turn, resolved.session.id)
            raise

    async def decide(self, session_id: str, decision: Decision) -> None:
        """Records one decision at an entry that is in the log."""
        await self.call(self._decide, session_id, decision)

    def _decide(self, session_id: str, decision: Decision) -> None:
        self.store.amend(session_id, lambda session: session, [], [decision])

    def _count_in(self, session_id: str) -> int:
        """Counts a turn in. Its end is `log_answer` or `turn_failed`."""
        count = self._active[session_id] = self._active.get(session_id, 0) + 1
        return count

    def _ended(self, session: Session) -> State:
        """The state once one more turn has ended. `_count_out` makes it so, after the store has it."""
        last = self._active.get(session.id, 1) <= 1
        return step(session.state, "turn_ended") if last and session.state == "active" else session.state

    def _count_out(self, session_id: str) -> None:
        count = self._active.pop(session_id, 1) - 1
        if count > 0:
            self._active[session_id] = count

    def _append(
        self,
        known: Session,
        changed: Callable[[Session], Session],
        entries: Sequence[Entry],
        decisions: Sequence[Decision],
    ) -> Session:
        """On the store's thread. A session that is likely new is made without asking; what the store says counts."""
        if known.state == "new":
            self._create(known)
        session = self.store.amend(known.id, changed, entries, decisions)
        if session is None:
            self._create(known)
            session = self.store.amend(known.id, changed, entries, decisions)
        if session is None:
            raise NotFoundError(f"the session '{known.id}' was deleted while its turn began")
        return session

    def _create(self, session: Session) -> None:
        with suppress(StateError):  # another turn of the session has made it
            self.store.create(replace(session, head=root(session.tenant)))

    async def log_answer(
        self,
        session_id: str,
        parent: str,
        depth: int,
        message: Message,
        *,
        finish: str,
        response_id: str | None,
        tokens: int,
        turn_id: str,
        view: View,
        again_tokens: int | None = None,
    ) -> None:
        """Writes what the engine said. `view` is the view with the answer in it; `again_tokens` what the engine had to
        prefill again, if this turn compacted."""
        entry = Entry(
            hash=view.head,
            parent=parent,
            depth=depth,
            source="engine",
            raw=orjson.dumps(message),
            created_s=self._now(),
            tokens=tokens,
            finish=finish,
            response_id=response_id,
        )
        before = self._views.get((session_id, parent))
        log_tokens = (before.log_tokens if before else 0) + tokens
        self.remember(session_id, entry.hash, Shown(view, log_tokens))
        await self.call(self._append_answer, session_id, entry, turn_id, view, log_tokens, again_tokens)

    def _append_answer(
        self, session_id: str, entry: Entry, turn_id: str, view: View, log_tokens: int, again_tokens: int | None
    ) -> None:
        def changed(session: Session) -> Session:
            session = replace(
                session,
                state=self._ended(session),
                last_used_s=entry.created_s,
                turns=session.turns + 1,
                compactions=session.compactions + (again_tokens is not None),
                again_tokens=session.again_tokens + (again_tokens or 0),
            )
            if session.head != entry.parent:
                return session
            view_tokens, saved_tokens = view.estimate_tokens(0), max(0, log_tokens - view.message_tokens)
            # The log is summed up from estimates, the view is counted by the engine: it is never more than its log.
            known_tokens = max(log_tokens, view_tokens + saved_tokens)
            return replace(
                session, head=entry.hash, log_tokens=known_tokens, view_tokens=view_tokens, saved_tokens=saved_tokens
            )

        # None: deleted while the engine was speaking. What was deleted stays deleted.
        self.store.amend(session_id, changed, [entry], end_draft=turn_id)
        self._count_out(session_id)

    async def bound(self, session_id: str, engine: str) -> Session:
        """Writes down which engine a session's turns go to."""
        return await self.call(self._bind, session_id, engine)

    def _bind(self, session_id: str, engine: str) -> Session:
        session = self.store.amend(session_id, lambda stored: replace(stored, engine=engine))
        if session is None:
            raise NotFoundError(f"there is no session '{session_id}'")
        return session

    async def turn_failed(self, session_id: str) -> None:
        """A turn ended without an answer to log."""
        await self.call(self._end_turn, session_id)

    def _end_turn(self, session_id: str) -> None:
        now = self._now()
        try:
            self.store.amend(session_id, lambda stored: replace(stored, state=self._ended(stored), last_used_s=now))
        except StoreError:
            self._unended.add(session_id)  # `settle` says it when the store is there again
            raise
        finally:
            self._count_out(session_id)

    async def settle(self) -> None:
        """Says to the store which sessions are not active any more, where it could not be told as their turns ended."""
        for session_id in tuple(self._unended):
            if session_id not in self._active:
                await self.call(self.store.amend, session_id, _idle)
            self._unended.discard(session_id)


def _started(state: State, count: int) -> State:
    """The state with one more turn, the `count`th that runs here."""
    state = step(state, "revive") if state == "expired" else state
    return step(state, "turn_started") if count == 1 or state != "active" else state


def _idle(session: Session) -> Session:
    return replace(session, state=step(session.state, "turn_ended")) if session.state == "active" else session


def _hand_over(done: Future[T], waiter: asyncio.Future[T]) -> None:
    """The result of a store call, to the caller if it still waits."""
    if waiter.done():
        return
    error = done.exception()
    if error is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(done.result())


def storage_id(tenant: str, session_id: str) -> str:
    """The id under which a tenant's session is kept: two tenants may use the same name."""
    return f"{tenant}/{session_id}" if tenant else session_id


def public_id(session: Session) -> str:
    return session.id.removeprefix(f"{session.tenant}/") if session.tenant else session.id


def rebuild(path: Sequence[Entry], decisions: Sequence[Decision], estimator: Estimator) -> Shown:
    """The view of a path from the log alone. Pure."""
    reduced = {d.at: msgspec.json.decode(d.payload, type=Reduction).text for d in decisions if d.kind == "distil"}
    epochs = [(d.at, decode_epoch(d.payload)) for d in decisions if d.kind == "compact"]
    on_path = {entry.hash for entry in path}
    noted = [msgspec.json.decode(d.payload, type=Note) for d in decisions if d.kind == "note" and d.at in on_path]
    tools = [orjson.loads(d.payload) for d in decisions if d.kind == "tools" and d.at in on_path]
    told = [msgspec.json.decode(d.payload, type=Classified) for d in decisions if d.kind == "class" and d.at in on_path]
    classes = {hash_: found for one in told for hash_, found in one.items.items()}
    items = []
    for entry in path:
        message = orjson.loads(entry.raw)
        item = Item(entry.hash, entry.depth, message, entry.tokens, entry.tokens, hashes(message))
        items.append(replace(item, classes=classes[entry.hash]) if entry.hash in classes else item)
    view = derive(items, epochs, reduced, {note.hash: note.text for note in noted})
    view = replace(
        view,
        moved=noted[-1].moved if noted else (),
        tools=canonical_tools(_tools_shown(tools[-1])) if tools else None,
    )
    changed = {**reduced, **view.epoch.overrides}
    shown = tuple(
        replace(i, tokens=estimator.message(with_note(i.message, i.note)))
        if i.hash in changed or i.images or i.note
        else i
        for i in view.items
    )
    return Shown(replace(view, items=shown), sum(entry.tokens for entry in path))


def _tools_shown(payload: Any) -> Any:
    """Of a "tools" decision: the tools as the engine was shown them. (Older logs have the tools alone.)"""
    return payload["shown"] if isinstance(payload, dict) else payload


def _decisions(resolved: Resolved, prepared: Prepared | None, tools: Tools | None, now: float) -> list[Decision]:
    found: list[Decision] = []
    for reduction in prepared.reductions if prepared else ():
        if reduction.kind == "distil":
            found.append(Decision(reduction.hash, "distil", orjson.dumps(reduction), now))
    for asked in prepared.asked if prepared else ():
        found.append(Decision(asked.at, "ask", orjson.dumps(asked), now))
    if prepared and prepared.classified:
        found.append(Decision(resolved.head, "class", orjson.dumps(prepared.classified), now))
    if prepared and prepared.epoch:
        found.append(Decision(resolved.head, "compact", encode_epoch(prepared.epoch), now))
    if prepared and prepared.note:
        found.append(Decision(prepared.note.hash, "note", orjson.dumps(prepared.note), now))
    if tools and tools.shown and tools.shown != resolved.view.tools:
        found.append(Decision(resolved.head, "tools", orjson.dumps(tools), now))
    return found


def tools_key(tools: Any) -> str:
    """Names a set of tools by its content."""
    return body_hash(orjson.dumps(tools)) if tools else ""

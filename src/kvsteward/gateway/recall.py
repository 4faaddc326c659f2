"""Recall, the gateway's side: offers the tool, finds what it asks for, and records what was shown.

The client never sees the tool, its calls or their results; the operator finds each as a decision of kind "recall" at
the entry that the answer follows. Invariant: what one turn is given stays inside the budget that was admitted for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from kvsteward.context.fusion import fused
from kvsteward.context.images import image_parts
from kvsteward.context.layout import View
from kvsteward.context.pipeline import Prepared
from kvsteward.context.recall import (
    MAX_CALLS,
    MAX_HITS,
    MIN_ROOM_TOKENS,
    Ask,
    Hit,
    compose,
    parse_ask,
    shown_whole,
    with_tool,
)
from kvsteward.errors import NotFoundError, UnsupportedError
from kvsteward.sessions.base import Decision, Entry, SessionStore
from kvsteward.wire.chat import ChatRequest

if TYPE_CHECKING:
    from kvsteward.gateway.app import Steward
    from kvsteward.gateway.turn import Turn

_IMAGES = "[kvsteward: the images that were recalled]"
HEADER = "X-KVSteward-Recall"
_RANKED = 4 * MAX_HITS
"""Entries of each ranking that count: those that the view shows whole are taken out after."""
_SOUGHT = 5 * _RANKED
"""Entries by meaning, other branches among them."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """The answer to one call, and the messages that it is made of."""

    text: str
    tokens: int
    hashes: tuple[str, ...]
    images: tuple[Mapping[str, Any], ...] = ()
    """The image parts that were asked for by hash."""
    search: str = ""
    """How it was found, where there are vectors: "fused", or "words" and why (`librarian.Miss`)."""


def wanted(steward: Steward, headers: Mapping[str, str], request: ChatRequest) -> bool:
    """Per request, else per deployment. Never for several choices, which would ask for different things, nor where the
    client forbids calls. Raises UnsupportedError for a header that is neither on nor off."""
    asked = headers.get(HEADER.lower(), "").lower()
    if asked not in {"", "on", "off"}:
        raise UnsupportedError(f"{HEADER} must be 'on' or 'off', not '{asked}'", param=HEADER)
    on = asked == "on" or (asked == "" and steward.settings.recall)
    return on and (request.body.get("n") or 1) == 1 and request.body.get("tool_choice") != "none"


def offered(request: ChatRequest) -> ChatRequest:
    """The request with our tool after the client's."""
    return replace(request, body={**request.body, "tools": with_tool(request.tools)})


def withdrawn(request: ChatRequest) -> ChatRequest:
    """The request as the client sent it: for the last round, in which nothing more may be asked."""
    tools = request.tools[:-1]
    body = {k: v for k, v in request.body.items() if k != "tools" or tools}
    return replace(request, body={**body, "tools": tools} if tools else body)


def room_tokens(prepared: Prepared) -> int:
    """How much one turn may be given in all its rounds."""
    marks = prepared.marks
    return max(0, min(marks.hard - prepared.tokens, 2 * marks.tool_limit))


async def answer_calls(
    steward: Steward,
    turn: Turn,
    session_id: str,
    head: str,
    prepared: Prepared,
    calls: Sequence[Mapping[str, Any]],
    room: int,
) -> list[dict[str, Any]]:
    """A tool message for each call, in at most `room` tokens together, and the images that were asked for: a tool's
    result is text, so they follow in a user message."""
    messages: list[dict[str, Any]] = []
    images: list[Mapping[str, Any]] = []
    images_too = "image" in turn.at.info.modalities
    for number, call in enumerate(calls):
        arguments = str(call["function"]["arguments"])
        limit = min(prepared.marks.tool_limit, int(room / min(2, max(1, len(calls) - number))))
        ask = parse_ask(arguments)
        if number >= MAX_CALLS:
            found = Recalled(f"Only {MAX_CALLS} calls are answered at a time.", 10, ())
        elif isinstance(ask, str):
            found = Recalled(ask, steward.desk.estimator.text(ask), ())
        elif limit < MIN_ROOM_TOKENS:
            found = Recalled("There is no room for more in this turn. Answer with what you have.", 16, ())
        else:
            found = await look_up(steward, session_id, head, prepared.view, ask, limit)
        room -= found.tokens
        for part in found.images if images_too else ():
            cost = steward.desk.estimator.message({"content": [part]})
            if cost <= room and part not in images:
                room -= cost
                images.append(part)
        steward.telemetry.recalls.inc()
        payload = {"arguments": arguments, "hashes": found.hashes, "tokens": found.tokens, "text": found.text}
        payload |= {"search": found.search} if found.search else {}
        await steward.desk.decide(session_id, Decision(head, "recall", orjson.dumps(payload), steward.wall()))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": found.text})
    if images:
        messages.append({"role": "user", "content": [{"type": "text", "text": _IMAGES}, *images]})
    return messages


async def look_up(steward: Steward, session_id: str, head: str, view: View, ask: Ask, limit_tokens: int) -> Recalled:
    """Finds what is asked for on the path to `head`. The messages that the view shows whole are not found again."""
    desk = steward.desk
    entries, search = await find(steward, session_id, head, ask)
    if not ask.hash:
        shown = shown_whole(view)
        entries = [entry for entry in entries if entry.hash not in shown] or entries[:1]
    hits = [Hit(entry.hash, entry.depth, orjson.loads(entry.raw)) for entry in entries[:MAX_HITS]]
    labels = {stub.hash: stub.label for stub in view.epoch.stubs}
    text = compose(ask, hits, labels, limit_tokens, desk.estimator)
    images = [part for hit in hits for part in image_parts(hit.message, ask.hash)] if ask.hash else []
    return Recalled(text, desk.estimator.text(text), tuple(hit.hash for hit in hits), tuple(images), search)


async def find(steward: Steward, session_id: str, head: str, ask: Ask) -> tuple[Sequence[Entry], str]:
    """What is found, best first, and how (`Recalled.search`)."""
    desk = steward.desk
    if ask.hash:
        try:
            entry = await desk.call(desk.store.item, session_id, ask.hash)
        except NotFoundError:  # two start so: both may be shown
            entry = None
        if entry is not None:
            return [entry], ""
    query = ask.query or ask.hash
    by_words = await desk.call(desk.store.lookup, session_id, query, head=head, limit=_RANKED)
    if steward.librarian is None:
        return by_words, ""
    sought = await steward.librarian.search(session_id, query, _SOUGHT)
    if sought.miss is not None:
        return by_words, f"words: {sought.miss}"
    return await desk.call(_fused, desk.store, session_id, head, by_words, sought.hashes), "fused"


def _fused(
    store: SessionStore, session_id: str, head: str, by_words: Sequence[Entry], by_meaning: Sequence[str]
) -> Sequence[Entry]:
    """On the store's thread: both rankings as one, of entries on the path to `head`."""
    on_path = store.on_path(session_id, head, by_meaning)
    near = [hash_ for hash_ in by_meaning if hash_ in on_path][:_RANKED]
    held: dict[str, Entry | None] = {entry.hash: entry for entry in by_words}
    order = fused([[*held], near])[:_RANKED]
    entries = [held[hash_] if hash_ in held else store.item(session_id, hash_) for hash_ in order]
    return [entry for entry in entries if entry is not None]

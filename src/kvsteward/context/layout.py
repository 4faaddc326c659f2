"""The view of a session: what the model sees of its log, and in which order.

    [system messages, byte for byte] [the condensed part, once there is one] [items, append-only until the next epoch]

An *epoch* lasts from one compaction to the next. Within an epoch the view only grows at its end, so the engine's
prefix cache stays valid. A view is derived: `derive` builds it from the log's path and the recorded decisions alone.

Invariant: a tool result never stands in a view without the call that it answers, nor a call without its results
(unless the client has not sent them yet).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvsteward.context.hygiene import Moved
from kvsteward.context.images import shown
from kvsteward.context.tokens import Estimator
from kvsteward.wire.chat import OWN_FIELD, PINNED_ROLES, text_of

Message = Mapping[str, Any]

HASH_CHARS = 8
"""Digits of a hash that a view prints."""
ACKNOWLEDGEMENT = "Noted. I continue from here."
"""Said by the assistant between the condensed part and a user message: many templates want roles to alternate."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message of the log that is not in the view yet."""

    hash: str
    depth: int
    message: Message


@dataclass(frozen=True, slots=True)
class Classed:
    """A sentence of a user that rules are unsure of, and what the engine's model says that it is."""

    text: str
    given: str
    """"plan", "fact" or "trace"; empty where its answer could not be used: then the rules' word counts."""


@dataclass(frozen=True, slots=True)
class Item:
    """One message as the view shows it. `log_tokens` is the length of what was received, `tokens` of what is shown."""

    hash: str
    depth: int
    message: Message
    tokens: int
    log_tokens: int
    images: tuple[str, ...] = ()
    """Names of its images (`context.images.hashes`)."""
    original: Message | None = None
    """What was received, where `message` was shortened and rules may still read it (not kept for tool results)."""
    note: str = ""
    """Shown after its text: what left the system prompt because it changes (`context.hygiene`)."""
    classes: tuple[Classed, ...] = ()
    """What the engine's model was asked about it (`context.unsure`); empty: it was not asked."""

    @property
    def said(self) -> Message:
        """The message as it was received, or as it is shown where that is no longer known."""
        return self.message if self.original is None else self.original

    def shortened(self, text: str, estimator: Estimator) -> Item:
        """The same item with a shorter text."""
        message = with_text(self.message, text)
        original = None if self.role == "tool" else self.said
        return replace(self, message=message, tokens=estimator.message(message), original=original)

    @property
    def role(self) -> str:
        return str(self.message.get("role"))

    @property
    def text(self) -> str:
        return text_of(self.message)

    @property
    def call_ids(self) -> tuple[str, ...]:
        return tuple(call["id"] for call in self.message.get("tool_calls") or ())


@dataclass(frozen=True, slots=True)
class Fact:
    """A value of a message that left the view, kept because later turns may use it again."""

    value: str
    source: str
    """Hash of the entry that it stands in."""
    depth: int
    score: float


@dataclass(frozen=True, slots=True)
class Stub:
    """A line that stands for a message that left the view."""

    hash: str
    depth: int
    label: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the engine's summary at one compaction, why, and the counts."""

    outcome: Literal["used", "repaired", "replaced", "late"]
    """"late": there was none in time."""
    reason: str = ""
    lines: int = 0
    """Lines that the engine wrote."""
    invented: int = 0
    """Lines cut for a value that stands in no source."""
    orders: int = 0
    """Lines cut because they give orders."""
    plan_added: int = 0
    facts: int = 0
    """Facts of the span that left."""
    facts_added: int = 0
    """Facts that neither the summary nor the table had: added as lines."""
    facts_left: int = 0
    """Facts for whose lines there was no room; the log has them."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class PlanItem:
    """A text that stays word for word (`context.plan`)."""

    text: str
    kind: str
    source: str
    """Hash of the entry that it stands in."""
    depth: int
    role: str = "user"
    """Who said it."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """The result of the last compaction. `through` is the depth up to which messages are condensed into `block`."""

    through: int = 0
    block: str = ""
    block_tokens: int = 0
    summary: str = ""
    requests: tuple[tuple[int, str], ...] = ()
    facts: tuple[Fact, ...] = ()
    stubs: tuple[Stub, ...] = ()
    dropped: int = 0
    """Messages condensed since the session began."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Items of this epoch whose text was shortened further at the compaction."""
    hidden_images: tuple[str, ...] = ()
    """Images that are not shown in messages up to the depth `hidden_through`."""
    hidden_through: int = 0
    judged: Verdict | None = None
    """What became of the engine's summary. None where none was wanted."""
    plan: tuple[PlanItem, ...] = ()
    """The Plan of what was condensed."""
    spoken: bool = False
    """A user message is among what was condensed."""
    sections: int = 0
    """How many were appended to the block since it was written anew."""

    def shows(self, item: Item, seen: set[str]) -> Message:
        """An item as this epoch shows it. `seen` has the images shown before it."""
        hidden = self.hidden_images if item.depth <= self.hidden_through else ()
        return bare(with_note(shown(item.message, item.images, seen, hidden), item.note))

    def recounted(self, item: Item, seen: set[str], estimator: Estimator) -> Item:
        return replace(item, tokens=estimator.message(self.shows(item, seen)))


@dataclass(frozen=True, slots=True)
class View:
    """What the model sees. `known_tokens` is the engine's own count of the first `known_items` items, with pinned
    messages, condensed part, tools and template; 0 where it has not counted yet."""

    pinned: tuple[Item, ...] = ()
    epoch: Epoch = Epoch()
    items: tuple[Item, ...] = ()
    known_tokens: int = 0
    known_items: int = 0
    known_for: str = ""
    """Names the tools and the model that the count is valid for."""
    moved: tuple[Moved, ...] = ()
    """What left the system prompt because it changes, as it was last noted."""
    tools: Any = None
    """The client's tools as the engine was shown them last."""

    @property
    def head(self) -> str:
        last = self.items or self.pinned
        return last[-1].hash if last else ""

    @property
    def depth(self) -> int:
        last = self.items or self.pinned
        return last[-1].depth if last else 0

    def estimate_tokens(self, tools_tokens: int) -> int:
        """The engine's last count plus the estimates of what came since."""
        if self.known_tokens:
            return self.known_tokens + sum(item.tokens for item in self.items[self.known_items :])
        return tools_tokens + self.message_tokens

    @property
    def message_tokens(self) -> int:
        """The messages alone, by the same estimate as the log's length, so that the two can be compared."""
        condensed = self.epoch.block_tokens + 2 * len(ACKNOWLEDGEMENT.split()) if self.epoch.block else 0
        return condensed + sum(item.tokens for item in (*self.pinned, *self.items))

    def unknown_tokens(self) -> int:
        """How much of `estimate_tokens` is an estimate."""
        return sum(item.tokens for item in self.items[self.known_items :]) if self.known_tokens else 0

    def counted(self, tokens: int, known_for: str) -> View:
        """The same view, once the engine has counted all of it."""
        return replace(self, known_tokens=tokens, known_items=len(self.items), known_for=known_for)

    def for_tools(self, known_for: str) -> View:
        """The same view; the engine's count is forgotten if it was made with other tools or another model."""
        return (
            self if self.known_for == known_for else replace(self, known_tokens=0, known_items=0, known_for=known_for)
        )

    def with_items(self, more: Iterable[Item]) -> View:
        """Appends. System messages before anything else are pinned; later ones stay in their place."""
        pinned, items = list(self.pinned), list(self.items)
        for item in more:
            leading = not items and not self.epoch.block and item.role in PINNED_ROLES
            (pinned if leading else items).append(item)
        return replace(self, pinned=tuple(pinned), items=tuple(items))

    def render(self) -> list[Message]:
        """The messages for the engine."""
        seen: set[str] = set()
        messages = [bare(shown(item.message, item.images, seen, ())) for item in self.pinned]
        if self.epoch.block:
            messages.append({"role": "user", "content": self.epoch.block})
            if not self.items or self.items[0].role != "assistant":
                messages.append({"role": "assistant", "content": ACKNOWLEDGEMENT})
        messages.extend(self.epoch.shows(item, seen) for item in self.items)
        return messages

    def recounted(self, estimator: Estimator) -> View:
        """The same view, each item's length estimated as it is rendered."""
        seen: set[str] = set()
        return replace(self, items=tuple(self.epoch.recounted(item, seen, estimator) for item in self.items))


def with_text(message: Message, text: str) -> Message:
    """The same message with other text. Parts that are not text (images) stay."""
    content = message.get("content")
    if isinstance(content, list):
        rest = [part for part in content if not isinstance(part.get("text"), str)]
        if rest:
            return {**message, "content": [{"type": "text", "text": text}, *rest]}
    return {**message, "content": text}


def note_holder(items: Sequence[Item]) -> int | None:
    """Which item a note is put after: the newest of a user, or else of a tool, behind the last answer."""
    newest = [n for n in range(len(items) - 1, -1, -1) if items[n].role in {"user", "tool"}]
    users = [n for n in newest if items[n].role == "user" and all(i.role in {"user", "tool"} for i in items[n:])]
    return users[0] if users else newest[0] if newest else None


def with_note(message: Message, note: str) -> Message:
    """The message with a text after its own."""
    if not note:
        return message
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": note}]}
    return {**message, "content": f"{content}\n\n{note}" if content else note}


def bare(message: Message) -> Message:
    """The message without the field that is ours to read."""
    return {k: v for k, v in message.items() if k != OWN_FIELD} if OWN_FIELD in message else message


def cuts(items: Sequence[Item]) -> list[int]:
    """Indexes where a view may begin: before a user or assistant message, with no call open that is still answered."""
    found: list[int] = []
    open_calls: set[str] = set()
    for index, item in enumerate(items):
        if item.role != "tool" and not open_calls:
            found.append(index)
        open_calls.update(item.call_ids)
        if item.role == "tool":
            open_calls.discard(str(item.message.get("tool_call_id")))
        elif item.role == "user":
            open_calls.clear()  # the client went on without the results: they will not come
    return found


def derive(
    path: Iterable[Item],
    epochs: Sequence[tuple[str, Epoch]],
    reduced: Mapping[str, str],
    notes: Mapping[str, str] | None = None,
) -> View:
    """Rebuilds the view of a path: `epochs` are the compactions recorded on it, each at the entry where it was taken,
    in order; `reduced` maps an entry to its text after reduction on entry, `notes` to what is shown after its text.
    Token counts are those of the items."""
    items = list(path)
    on_path = {item.hash for item in items}
    epoch = next((e for at, e in reversed(epochs) if at in on_path), Epoch())
    shown = {**reduced, **epoch.overrides}
    items = [_derived(i, shown.get(i.hash), (notes or {}).get(i.hash, "")) for i in items]
    pinned: list[Item] = []
    for item in items:
        if item.role not in PINNED_ROLES:
            break
        pinned.append(item)
    rest = tuple(i for i in items[len(pinned) :] if i.depth > epoch.through)
    return View(tuple(pinned), epoch, rest)


def _derived(item: Item, text: str | None, note: str) -> Item:
    if text is not None:
        original = None if item.role == "tool" else item.said
        item = replace(item, message=with_text(item.message, text), original=original)
    return replace(item, note=note) if note else item

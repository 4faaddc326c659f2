"""Images in a view: each is sent once in an epoch, and leaves with it if nobody refers to it again.

An image is named by the hash of its data URL. Its first place in a view shows it; at every later one stands a line
that says so. At a compaction, one that was already answered and that nothing newer refers to becomes a line with its
hash: recall brings it back. Only data URLs count as the same: what a web address returns may change.

Pure. Invariant: what is shown of a message depends only on the messages before it and on the epoch, so a view is the
same when it is derived again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvsteward.wire.chat import IMAGE_DIGITS, IMAGE_TYPES, image_hash, image_urls, text_of

Message = Mapping[str, Any]

AGAIN = "[kvsteward: image {hash} again, shown above]"
LEFT_OUT = "[kvsteward: image {hash}, shown earlier, left out here]"
_REFERS = re.compile(
    r"\b(images?|pictures?|photos?|screenshots?|figures?|charts?|diagrams?|drawings?|scans?|it shows|you see)\b", re.I
)


def hashes(message: Message) -> tuple[str, ...]:
    """A name for each image part, "" for one that is not a data URL. Empty for a message without images."""
    urls = image_urls(message)
    return tuple(image_hash(url) if url.startswith("data:") else "" for url in urls)


def shown(message: Message, names: Sequence[str], seen: set[str], hidden: Collection[str]) -> Message:
    """The message with a line in place of each image that is hidden or was seen before. `seen` gets what it shows."""
    if not any(names):
        return message
    left = iter(names)
    parts = [_part(part, next(left, ""), seen, hidden) if _is_image(part) else part for part in message["content"]]
    return {**message, "content": parts}


def _part(part: Mapping[str, Any], name: str, seen: set[str], hidden: Collection[str]) -> Mapping[str, Any]:
    if not name:
        return part
    if name in seen:
        return {"type": "text", "text": AGAIN.format(hash=name[:IMAGE_DIGITS])}
    if name in hidden:
        return {"type": "text", "text": LEFT_OUT.format(hash=name[:IMAGE_DIGITS])}
    seen.add(name)
    return part


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in IMAGE_TYPES


def stale(messages: Sequence[tuple[Message, Sequence[str]]]) -> tuple[str, ...]:
    """Of messages that stay in view, each with its images' names: the images that were answered and that nothing after
    refers to, by sending them again, by their hash, or by a word such as "picture" in a message not answered yet."""
    last_answer = max((i for i, (message, _) in enumerate(messages) if message.get("role") == "assistant"), default=-1)
    newest = [text_of(message) for message, _ in messages[last_answer + 1 :] if message.get("role") == "user"]
    if any(_REFERS.search(text) for text in newest):
        return ()
    count: dict[str, int] = {}
    for index, (_, names) in enumerate(messages):
        for name in names:
            count[name] = count.get(name, 0) + (1 if index < last_answer else 2)
    once = [name for name, times in count.items() if name and times == 1]
    return tuple(name for name in once if not any(name[:IMAGE_DIGITS] in text for text in newest))


def image_parts(message: Message, prefix: str = "") -> list[Mapping[str, Any]]:
    """The image parts of a message: those whose hash starts with `prefix`, or all where none does."""
    content = message.get("content")
    parts = [p for p in content if _is_image(p)] if isinstance(content, list) else []
    named = [p for p, url in zip(parts, image_urls(message), strict=True) if image_hash(url).startswith(prefix)]
    return named or parts


def with_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with a `uuid` on each image that has none: vLLM then finds it in its multimodal cache without
    reading it (https://docs.vllm.ai/en/latest/features/multimodal_inputs.html, "Cached inputs")."""
    return [_with_ids(m) if isinstance(m.get("content"), list) and any(hashes(m)) else m for m in messages]


def _with_ids(message: Message) -> Message:
    names = iter(hashes(message))
    parts = []
    for part in message["content"]:
        name = next(names) if _is_image(part) else ""
        parts.append({**part, "uuid": name} if name and "uuid" not in part else part)
    return {**message, "content": parts}

"""What one turn cost in tokens, in the vocabulary used everywhere in kvsteward.

`prompt_tokens` = `cached_tokens` (found in the engine's prefix cache) + `new_tokens` (prefilled). After the turn
`prompt_tokens + output_tokens` are resident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def resident_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def parse_usage(answer: Mapping[str, Any]) -> Usage | None:
    """Usage from a completion or a chunk: OpenAI's `usage`; llama-server's `timings` tells what was cached where
    `usage` does not. None if the engine did not say."""
    usage = answer.get("usage")
    if not isinstance(usage, Mapping):
        return None
    prompt = _count(usage.get("prompt_tokens"))
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else 0
    timings = answer.get("timings")
    if not cached and isinstance(timings, Mapping):
        cached = _count(timings.get("cache_n"))
    return Usage(prompt, min(cached, prompt), _count(usage.get("completion_tokens")))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0

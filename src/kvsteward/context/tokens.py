"""Estimates of length in tokens, calibrated by what the engine counted.

An exact count is a round trip, so the ordinary turn uses the engine's last count and adds an estimate of what is new.
The estimate is bytes times a rate that follows what engines report; the error never adds up, because each turn's
usage replaces it.

Invariant: estimates never decrease when text is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

MESSAGE_OVERHEAD_TOKENS = 5
"""Role marks of a chat template: 4 to 6 tokens in ChatML and Llama 3."""
IMAGE_TOKENS = 1_024
"""A placeholder's length until the engine has counted (Qwen2-VL and LLaVA use 256 to 2,880)."""
_SLOWNESS = 0.1
_LOWEST, _HIGHEST = 0.12, 1.0


@dataclass(frozen=True, slots=True)
class Estimator:
    """`tokens_per_byte` starts at English prose and JSON with a small vocabulary (0.30), on the safe side."""

    tokens_per_byte: float = 0.30

    def text(self, text: str) -> int:
        return int(len(text.encode()) * self.tokens_per_byte) + 1

    def message(self, message: Mapping[str, Any]) -> int:
        """Content, calls and role marks."""
        tokens = MESSAGE_OVERHEAD_TOKENS
        content = message.get("content")
        if isinstance(content, str):
            tokens += self.text(content)
        elif isinstance(content, list):
            tokens += sum(self._part(part) for part in content)
        for call in message.get("tool_calls") or ():
            tokens += self.json(call)
        return tokens

    def json(self, value: Any) -> int:
        """A JSON value as a template prints it (tools, calls)."""
        return int(len(orjson.dumps(value)) * self.tokens_per_byte) + 1 if value else 0

    def _part(self, part: Mapping[str, Any]) -> int:
        if isinstance(part.get("text"), str):
            return self.text(part["text"])
        return IMAGE_TOKENS if "image" in str(part.get("type")) else self.json(part)

    def observed(self, estimated_tokens: int, counted_tokens: int) -> Estimator:
        """A better estimator after the engine counted what was estimated. Short texts teach nothing."""
        if estimated_tokens < 200 or counted_tokens < 200:
            return self
        rate = self.tokens_per_byte * counted_tokens / estimated_tokens
        rate = min(_HIGHEST, max(_LOWEST, rate))
        return replace(self, tokens_per_byte=(1 - _SLOWNESS) * self.tokens_per_byte + _SLOWNESS * rate)

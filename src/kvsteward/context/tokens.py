"""Estimates of length in tokens, calibrated by what the engine counted.

An exact count is a round trip, so the ordinary turn uses the engine's last count and adds an estimate of what is new.
The estimate is a weighted count of bytes times a rate that follows what engines report; the error never adds up,
because each turn's usage replaces it. The weights say how much finer tokenizers cut what is not letters. With Qwen's
tokenizer on 1,500 messages of agent sessions, nine in ten estimates lie within -15 % and +18 % of the count; by bytes
alone they lay within -36 % and +37 %.

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
_LOWEST, _HIGHEST = 0.08, 0.8
_DIGITS = b"0123456789"
_MARKS = bytes(code for code in range(33, 127) if not chr(code).isalnum())
_DIGIT_WEIGHT, _MARK_WEIGHT, _WIDE_WEIGHT = 4.0, 2.5, 2.0


@dataclass(frozen=True, slots=True)
class Estimator:
    """`tokens_per_unit`: a letter or a blank is one unit. It starts a little on the safe side."""

    tokens_per_unit: float = 0.24

    def text(self, text: str) -> int:
        return int(_units(text) * self.tokens_per_unit) + 1

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
        return self.text(orjson.dumps(value).decode()) if value else 0

    def _part(self, part: Mapping[str, Any]) -> int:
        if isinstance(part.get("text"), str):
            return self.text(part["text"])
        return IMAGE_TOKENS if "image" in str(part.get("type")) else self.json(part)

    def observed(self, estimated_tokens: int, counted_tokens: int) -> Estimator:
        """A better estimator after the engine counted what was estimated. Short texts teach nothing."""
        if estimated_tokens < 200 or counted_tokens < 200:
            return self
        rate = self.tokens_per_unit * counted_tokens / estimated_tokens
        rate = min(_HIGHEST, max(_LOWEST, rate))
        return replace(self, tokens_per_unit=(1 - _SLOWNESS) * self.tokens_per_unit + _SLOWNESS * rate)


def _units(text: str) -> float:
    """The length of a text, what is cut finer counted more. Linear, a few passes in C."""
    raw = text.encode("utf-8", "surrogatepass")
    size = len(raw)
    digits = size - len(raw.translate(None, _DIGITS))
    marks = size - len(raw.translate(None, _MARKS))
    wide = size - len(text.encode("ascii", "ignore"))
    return size + (_DIGIT_WEIGHT - 1) * digits + (_MARK_WEIGHT - 1) * marks + (_WIDE_WEIGHT - 1) * wide

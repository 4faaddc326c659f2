"""Reading numbers out of a model's own config: checked, bounded, and with every filled-in default written down.

Knows keys, not models. Invariant: a value is either in the config, or listed in `assumed`, or a ConfigError names it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvsteward.errors import ConfigError
from kvsteward.ledger.spec import Assumption

T = TypeVar("T")
LARGEST = 2**40
MAX_LAYERS = 4096


class Reader:
    """A view of one config dict. `path` says where it sits in the file; `assumed` collects what was filled in."""

    def __init__(self, config: Mapping[str, Any], path: str = "", assumed: list[Assumption] | None = None) -> None:
        self.config = config
        self.path = path
        self.assumed: list[Assumption] = [] if assumed is None else assumed

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def sub(self, key: str) -> Reader | None:
        """The nested dict under `key`, or None."""
        value = self.config.get(key)
        return Reader(value, self.name(key), self.assumed) if isinstance(value, Mapping) else None

    def assume(self, key: str, value: T, reason: str) -> T:
        self.assumed.append(Assumption(self.name(key), value, reason))
        return value

    def raw(self, *keys: str) -> Any:
        """The first of `keys` that is there and not null."""
        return next((self.config[key] for key in keys if self.config.get(key) is not None), None)

    def has(self, *keys: str) -> bool:
        return self.raw(*keys) is not None

    def optional_count(self, *keys: str, least: int = 0) -> int | None:
        """A whole number of `least` or more under the first of `keys`, or None. ConfigError if it is anything else."""
        for key in keys:
            value = self.config.get(key)
            if value is not None:
                return whole(value, self.name(key), least)
        return None

    def count(self, *keys: str) -> int:
        """A whole number above 0 under the first of `keys`. ConfigError if there is none."""
        value = self.optional_count(*keys, least=1)
        if value is None:
            raise ConfigError(
                f"the model config has no {self.name(keys[0])}",
                hint=f"Looked for: {', '.join(keys)}. Give the whole config.json of the model.",
                param=self.name(keys[0]),
            )
        return value

    def count_or(self, default: int, reason: str, *keys: str, least: int = 1) -> int:
        """As `count`, with a default that goes on the list of assumptions."""
        value = self.optional_count(*keys, least=least)
        return self.assume(keys[0], default, reason) if value is None else value

    def flag(self, *keys: str) -> bool | None:
        value = self.raw(*keys)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.name(keys[0])} must be true or false, not {value!r}", param=self.name(keys[0]))
        return value

    def text(self, *keys: str) -> str | None:
        value = self.raw(*keys)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.name(keys[0])} must be text, not {value!r}", param=self.name(keys[0]))
        return value

    def sequence(self, key: str) -> list[Any] | None:
        """A list of at most `MAX_LAYERS` things, or None."""
        value = self.config.get(key)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > MAX_LAYERS:
            raise ConfigError(f"{self.name(key)} must be a list of at most {MAX_LAYERS}", param=self.name(key))
        return list(value)


def whole(value: object, name: str, least: int = 0) -> int:
    """`value` as a whole number in bounds. Takes 32.0, refuses NaN, infinities, booleans, text, negatives."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if not isinstance(value, bool | int) and hasattr(value, "__index__"):
        value = operator.index(value)  # numpy's integers
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}", param=name)
    if not least <= value <= LARGEST:
        raise ConfigError(f"{name} must be {least} or more, not {value}", param=name)
    return value

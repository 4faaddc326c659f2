"""Regular expressions that an operator wrote in a policy. Invariant: a bad one is an error that names its place."""

from __future__ import annotations

import re
from functools import lru_cache

from kvsteward.errors import ConfigError


@lru_cache(maxsize=512)
def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """The pattern, ready for use; letters match in either case."""
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"{where}: {pattern!r} is not a regular expression: {error}", param=where) from None

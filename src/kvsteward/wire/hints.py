"""What a gateway says of a session to the connector inside vLLM: the sender's half of `kv_transfer_params.kvsteward`.

`kv/vllm/hints.py` is the other half and describes the fields. Pure. Invariant: what a client put there itself is kept,
and wins; but for CONTROL, which would speak of other sessions or other engines than its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FIELD = "kvsteward"
VERSION = 1
MAX_TOOLS = 16
MAX_NAME = 128
CONTROL = frozenset({"note", "moved", "session", "scope"})


def keeping(ttl_s: float | None, priority: str) -> dict[str, Any]:
    """How long a session is worth keeping, and how much its time counts."""
    return {"class": priority, **({"ttl_s": ttl_s} if ttl_s is not None else {})}


def pausing(tools: Sequence[str]) -> dict[str, Any]:
    """Why its turn ended. Names that are too long or too many are left out."""
    return {"stop": "tool_calls", "tools": [name for name in tools if len(name) <= MAX_NAME][:MAX_TOOLS]}


def with_hint(params: object, hint: Mapping[str, Any]) -> dict[str, Any] | None:
    """A client's `kv_transfer_params` (None: it sent none) with our hint in it. None: they are left as they are, since
    they are no object, or speak another version."""
    if params is not None and not isinstance(params, Mapping):
        return None
    theirs = (params or {}).get(FIELD, {})
    if not isinstance(theirs, Mapping) or theirs.get("version", VERSION) != VERSION:
        return None
    own = {name: value for name, value in theirs.items() if name not in CONTROL}
    return {**(params or {}), FIELD: {"version": VERSION, **hint, **own}}

"""What a caller says about a session, in `kv_transfer_params` of a vLLM request. Version 1:

    {"kvsteward": {
        "version": 1,
        "class": "interactive" | "default" | "batch",   how much its time counts
        "ttl_s": 120,                                   keep this long after the turn; 0: do not keep
        "final": true,                                  this is the session's last turn
        "stop": "tool_calls",                           why the turn before the pause ended
        "tools": ["run_tests"],                         what it waits for
        "note": true,                                   no turn at all: news of a paused session
        "moved": true,                                  with `final`: it goes on in another engine, so what a shared
                                                        store has of it stays
        "session": "s-1"                                of the endpoint plug-in's own notes, which have no session id
        "scope": "0123456789abcdef"                     with `session`: the name of its requests' `cache_salt`
    }}

All but `version` may be left out. The session itself comes from vLLM (`X-Session-ID` or `session_id`). Which tools a
turn will call is known only when it has ended, so a gateway sends it as a note: a request of one token with the
session's id, whose own blocks are not kept, or a word to the endpoint plug-in. A note can also say `final`, for a
session that is over.

Pure. Invariant: `parse` answers with a hint or raises `ProtocolError`; unknown fields are refused, not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvsteward.errors import ProtocolError
from kvsteward.policy.retention import MAX_TTL_S, NO_HINT, WEIGHTS, Hint
from kvsteward.wire.hints import FIELD, MAX_NAME, MAX_TOOLS, VERSION

__all__ = ["FIELD", "VERSION", "Told", "parse"]

MAX_SESSION = 1024
_FIELDS = {"version", "class", "ttl_s", "final", "stop", "tools", "note", "moved", "session", "scope"}


@dataclass(frozen=True, slots=True)
class Told:
    """A parsed hint. `stop` "" and no tools: not said."""

    hint: Hint = NO_HINT
    stop: str = ""
    tools: tuple[str, ...] = ()
    note: bool = False
    moved: bool = False
    session: str = ""
    scope: str = ""

    @property
    def stored(self) -> str:
        """The session's name in the store."""
        return f"{self.scope}:{self.session}" if self.scope and self.session else self.session

    @property
    def over(self) -> bool:
        """The session is over for good: nothing of it is needed anywhere."""
        return self.hint.final and not self.moved


def parse(kv_transfer_params: object) -> Told:
    """The hint in a request's `kv_transfer_params`; nothing said is an empty hint. Raises ProtocolError."""
    body = kv_transfer_params.get(FIELD) if isinstance(kv_transfer_params, Mapping) else None
    if body is None:
        return Told()
    if not isinstance(body, Mapping) or body.get("version") != VERSION:
        raise ProtocolError(f"kv_transfer_params.{FIELD} must be an object with version {VERSION}")
    unknown = sorted(map(str, body.keys() - _FIELDS))
    if unknown:
        raise ProtocolError(f"kv_transfer_params.{FIELD} has unknown fields: {', '.join(unknown)[:200]}")
    hint = Hint(_ttl(body.get("ttl_s")), _flag(body, "final"), _priority(body.get("class", "default")))
    return Told(
        hint,
        _name(body.get("stop", ""), "stop"),
        _tools(body.get("tools", ())),
        _flag(body, "note"),
        _flag(body, "moved"),
        _name(body.get("session", ""), "session", MAX_SESSION),
        _name(body.get("scope", ""), "scope"),
    )


def _ttl(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ProtocolError(f"kv_transfer_params.{FIELD}.ttl_s must be seconds, 0 or more")
    return min(float(value), MAX_TTL_S)


def _flag(body: Mapping[object, object], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ProtocolError(f"kv_transfer_params.{FIELD}.{name} must be true or false")
    return value


def _priority(value: object) -> str:
    if not isinstance(value, str) or value not in WEIGHTS:
        raise ProtocolError(f"kv_transfer_params.{FIELD}.class must be one of {', '.join(WEIGHTS)}")
    return value


def _name(value: object, field: str, limit: int = MAX_NAME) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise ProtocolError(f"kv_transfer_params.{FIELD}.{field} must be text of at most {limit} characters")
    return value


def _tools(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_TOOLS:
        raise ProtocolError(f"kv_transfer_params.{FIELD}.tools must be a list of at most {MAX_TOOLS} names")
    return tuple(_name(tool, "tools") for tool in value)

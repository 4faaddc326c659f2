"""The session store in Valkey, which several gateways may share."""

from __future__ import annotations

from kvsteward.sessions.valkey.store import ValkeyStore

__all__ = ["ValkeyStore"]

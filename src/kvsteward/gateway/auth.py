"""Which tenant sent this: by API key, if the deployment has any."""

from __future__ import annotations

from collections.abc import Mapping

from kvsteward.errors import AuthenticationError
from kvsteward.gateway.settings import Settings, Tenant


def tenant_of(headers: Mapping[str, str], settings: Settings) -> Tenant:
    """The tenant of a request. Raises AuthenticationError where keys are set and none of them was sent."""
    if not settings.keys:
        return settings.default_tenant
    sent = headers.get("authorization", "")
    key = sent[7:].strip() if sent[:7].lower() == "bearer " else headers.get("x-api-key", "")
    tenant = settings.keys.get(key)
    if tenant is None:
        raise AuthenticationError("no API key was sent" if not key else "this API key is not known")
    return tenant

"""Which tenant sent this: by API key, if the deployment has any."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from kvsteward.errors import AuthenticationError, ForeignOriginError
from kvsteward.gateway.settings import Settings, Tenant


def operates(tenant: Tenant, settings: Settings) -> bool:
    """Whether this tenant may see and steer the engines: an admin, or anybody where there are no keys."""
    return tenant.admin or not settings.keys


def tenant_of(headers: Mapping[str, str], settings: Settings) -> Tenant:
    """The tenant of a request. Raises AuthenticationError where keys are set and none of them was sent,
    ForeignOriginError where there are none and a browser says that another site's page is asking."""
    if not settings.keys:
        origin = headers.get("origin")
        if origin and urlsplit(origin).netloc != headers.get("host"):
            raise ForeignOriginError(f"this gateway has no API keys and does not serve pages of {origin}")
        return settings.default_tenant
    sent = headers.get("authorization", "")
    key = sent[7:].strip() if sent[:7].lower() == "bearer " else headers.get("x-api-key", "")
    tenant = settings.keys.get(key)
    if tenant is None:
        raise AuthenticationError("no API key was sent" if not key else "this API key is not known")
    return tenant

"""What a deployment sets. Checked once, at the edge; nothing reads the environment anywhere else.

The command line fills these values; `from_env` and a YAML file for tenants are the other doors.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from kvsteward.context.marks import Policy
from kvsteward.context.policies import load_policy
from kvsteward.engines.base import Engine, EngineInfo
from kvsteward.engines.embeddings import EmbeddingOptions
from kvsteward.errors import ConfigError
from kvsteward.policy.admission import Limits
from kvsteward.policy.retention import WEIGHTS

Mode = Literal["managed", "passthrough"]
MODES = ("managed", "passthrough")
MIN_SECRET_CHARS = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """One user of the deployment. Sessions of two tenants never meet."""

    name: str = ""
    mode: Mode = "managed"
    ttl_s: float | None = None
    budget_tokens: int | None = None
    policy: Policy | None = None
    """None: the deployment's."""
    priority: str = "default"
    """How much its time counts where idle KV must go: "interactive", "default" or "batch"."""
    admin: bool = False
    """It may see and steer the engines, and move any tenant's sessions."""
    cache_salt: str | None = field(default=None, repr=False)
    """Its prompts share an engine's cache with no others than its own. A secret: who knows it can share."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A deployment. `budget_tokens` None: the engine's context limit for one request."""

    mode: Mode = "managed"
    budget_tokens: int | None = None
    policy: Policy = field(default_factory=Policy)
    limits: Limits = field(default_factory=Limits)
    recall: bool = False
    """Offer the model a tool that returns what left its view. `X-KVSteward-Recall` says otherwise for a request."""
    recall_rounds: int = 3
    """How often one turn may look something up."""
    embeddings: EmbeddingOptions | None = None
    """Who makes vectors of the logs, so that recall finds by meaning too. None: by words alone."""
    ttl_s: float = 1_800.0
    log_retention_s: float = 30 * 86_400.0
    max_body_bytes: int = 64 * 2**20
    summary_timeout_s: float = 60.0
    selective_timeout_s: float = 10.0
    """How long a turn waits for the log-probabilities of one window of a text."""
    prose_timeout_s: float = 20.0
    """How long a turn waits, over all its messages, for what the engine's model writes of long prose."""
    summaries_at_once: int = 2
    """How many sessions' summaries may be written at the same time, in the background."""
    sweep_every_s: float = 15.0
    draft_every_s: float = 0.25
    release_within_s: float = 2.0
    keys: Mapping[str, Tenant] = field(default_factory=dict)
    """API key -> tenant. Empty: no key is asked for, and all belongs to one unnamed tenant."""
    default_tenant: Tenant = field(default_factory=Tenant)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        for name in ("ttl_s", "log_retention_s", "sweep_every_s", "max_body_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if not 1 <= self.recall_rounds <= 16:
            raise ConfigError(f"recall_rounds must be between 1 and 16, not {self.recall_rounds}")
        if not 1 <= self.summaries_at_once <= 64:
            raise ConfigError(f"summaries_at_once must be between 1 and 64, not {self.summaries_at_once}")
        if self.budget_tokens is not None and self.budget_tokens < 512:
            raise ConfigError(
                f"a budget of {self.budget_tokens} tokens is too small to hold a conversation; use 512 or more"
            )

    def cache_salt(self, tenant: str) -> str | None:
        """Of a tenant by its name."""
        return next(
            (one.cache_salt for one in self.keys.values() if one.name == tenant), self.default_tenant.cache_salt
        )


def check_isolation(settings: Settings, engines: Sequence[Engine]) -> None:
    """Raises ConfigError where a tenant's cache is to be kept apart and an engine cannot do that."""
    isolated = next((tenant.name for tenant in settings.keys.values() if tenant.cache_salt), None)
    shared = next((engine.name for engine in engines if not engine.isolates), None)
    if isolated is not None and shared is not None:
        raise ConfigError(
            f"tenant {isolated!r} has 'isolate_cache: true', and the engine {shared} cannot keep prompts apart",
            hint="vLLM can (its cache_salt). Give each such tenant an engine of its own, or leave the setting out.",
        )


def check_selective(settings: Settings, engines: Sequence[EngineInfo]) -> None:
    """Raises ConfigError where selective context is asked for and an engine gives no log-probabilities of a prompt."""
    policies = [settings.policy, *(tenant.policy for tenant in settings.keys.values() if tenant.policy)]
    deaf = next((engine.dialect for engine in engines if not engine.prompt_logprobs), None)
    if deaf is not None and any(policy.selective is not None for policy in policies):
        raise ConfigError(
            f"--selective needs the log-probabilities of a prompt, and a {deaf} engine does not give them",
            hint="vLLM gives them. Without the option, long prose is reduced by the distillers, and nobody is asked.",
            param="selective",
        )


def check_asks(settings: Settings) -> None:
    """Raises ConfigError where a policy has the engine's model asked and every turn under it is passed through as it
    came."""
    for who, mode, policy in (
        ("the deployment", settings.mode, settings.policy),
        *((f"tenant {t.name!r}", t.mode, t.policy) for t in (settings.default_tenant, *settings.keys.values())),
    ):
        if policy is None or "passthrough" not in (mode, settings.mode):
            continue
        for setting, asks in (("plan.unsure", policy.plan.unsure), ("trace.prose", policy.prose)):
            if asks == "engine":
                raise ConfigError(
                    f"{setting}: engine has nothing to do: requests of {who} pass through as they are",
                    hint="Use mode managed, or leave the setting out.",
                    param=setting,
                )


def cache_salt_of(secret: bytes, tenant: str) -> str:
    """A tenant's salt, 64 hex digits: HMAC-SHA256 (RFC 2104) of its name. The same wherever the secret is."""
    return hmac.new(secret, b"kvsteward cache salt\n" + tenant.encode(), hashlib.sha256).hexdigest()


def load_tenants(path: Path, cache_secret: str | None = None) -> dict[str, Tenant]:
    """API keys from a YAML file:

        isolate_cache: false
        tenants:
          support: {api_key: sk-1, mode: managed, ttl_s: 600, budget_tokens: 8192, class: interactive, policy: support}
          operators: {api_key: sk-2, admin: true, isolate_cache: true}

    Without `cache_secret` the salts of isolated caches are made for this process alone. Raises ConfigError that names
    the tenant and the field."""
    try:
        parsed = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    tenants = parsed.get("tenants") if isinstance(parsed, dict) else None
    if not isinstance(tenants, dict):
        raise ConfigError(f"{path} must have a mapping 'tenants' of name to settings")
    if cache_secret is not None and len(cache_secret) < MIN_SECRET_CHARS:
        raise ConfigError(f"the cache secret must have {MIN_SECRET_CHARS} characters or more", param="cache_secret")
    secret = cache_secret.encode() if cache_secret is not None else secrets.token_bytes(32)
    isolate = parsed.get("isolate_cache", False)
    if not isinstance(isolate, bool):
        raise ConfigError(f"{path}: isolate_cache must be true or false")
    keys: dict[str, Tenant] = {}
    for name, values in tenants.items():
        key, tenant = _tenant(str(name), values, path)
        own = values.get("isolate_cache", isolate)
        if not isinstance(own, bool):
            raise ConfigError(f"{path}: tenant {name!r}: isolate_cache must be true or false")
        if own:
            tenant = replace(tenant, cache_salt=cache_salt_of(secret, tenant.name))
        if key in keys:
            raise ConfigError(f"{path}: tenants {keys[key].name!r} and {name!r} have the same api_key")
        keys[key] = tenant
    return keys


def _tenant(name: str, values: Any, path: Path) -> tuple[str, Tenant]:
    if not isinstance(values, dict) or not isinstance(values.get("api_key"), str):
        raise ConfigError(f"{path}: tenant {name!r} needs an api_key")
    unknown = set(values) - {"api_key", "mode", "ttl_s", "budget_tokens", "policy", "class", "admin", "isolate_cache"}
    if unknown:
        raise ConfigError(f"{path}: tenant {name!r} has unknown settings: {', '.join(sorted(unknown))}")
    mode = values.get("mode", "managed")
    if mode not in MODES:
        raise ConfigError(f"{path}: tenant {name!r}: mode must be one of {', '.join(MODES)}")
    priority, admin = values.get("class", "default"), values.get("admin", False)
    if priority not in WEIGHTS:
        raise ConfigError(f"{path}: tenant {name!r}: class must be one of {', '.join(WEIGHTS)}")
    if not isinstance(admin, bool):
        raise ConfigError(f"{path}: tenant {name!r}: admin must be true or false")
    named = values.get("policy")
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"{path}: tenant {name!r}: policy must name a preset or a file")
    try:
        policy = load_policy(named, path.parent) if named else None
    except ConfigError as error:
        raise ConfigError(f"{path}: tenant {name!r}: {error.message}", hint=error.hint) from None
    ttl_s, budget_tokens = values.get("ttl_s"), values.get("budget_tokens")
    return values["api_key"], Tenant(name, mode, ttl_s, budget_tokens, policy, priority, admin)

"""Every error that kvsteward raises, as one tree.

    KVStewardError
    ├── RequestError                  the client asked for something that cannot be done           400
    │   ├── ProtocolError             not valid JSON, a wrong type, an orphan tool message          400
    │   ├── BodyTooLargeError         the body is over the limit                                    413
    │   ├── ContextOverflowError      does not fit, even after compaction                           400
    │   ├── UnsupportedError          understood, but this engine or deployment cannot do it        400
    │   ├── AuthenticationError       no key, or a wrong one                                        401
    │   ├── ForeignOriginError        a web page of another site sent it                            403
    │   ├── ForbiddenError            this key may not do it                                        403
    │   ├── ConflictError             cannot be done now: a turn runs, an engine is drained         409
    │   └── NotFoundError             no such session, item or model                                404
    ├── OverloadedError               the queue is full or the wait was too long; retry later       503
    ├── EngineError                   the engine failed                                             502
    │   ├── EngineUnavailableError    cannot be reached, or is restarting                           503
    │   ├── EngineTimeoutError        did not answer in time                                        504
    │   └── EngineResponseError       answered with an error of its own (its status is kept)
    ├── StoreError                    the session log cannot be read or written                     507
    │   ├── StoreUnavailableError     its server cannot be reached now; retry later                 503
    │   └── CorruptLogError           a stored message no longer matches its hash                   500
    ├── StateError                    an illegal step of a life cycle: a fault in kvsteward         500
    ├── ConfigError                   a setting, a model config or a file that cannot be used       400
    └── InvariantError                an integrity check failed: a fault in kvsteward               500

The module knows nothing of HTTP frameworks or wire formats. Invariant: each error has a status, a stable `code`
that programs may test, and a `hint` that tells a person what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class KVStewardError(Exception):
    """Base of all errors. `status` is the HTTP status, `code` is stable, `hint` says what to do."""

    status: int = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"
    default_hint: ClassVar[str] = "This is a fault in kvsteward; please report it with the request id."

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(KVStewardError):
    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"
    default_hint = "Correct the request and send it again."


class ProtocolError(RequestError):
    code = "invalid_request"


class BodyTooLargeError(RequestError):
    status = 413
    code = "body_too_large"
    default_hint = "Send a smaller body, or raise --max-body-mib."


class ContextOverflowError(RequestError):
    code = "context_length_exceeded"
    default_hint = "Shorten the system prompt, the tools or the newest message, or give the engine a longer context."


class UnsupportedError(RequestError):
    code = "unsupported"
    default_hint = "Use an engine or a model that supports this, or leave the field out."


class AuthenticationError(RequestError):
    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"
    default_hint = "Send 'Authorization: Bearer KEY' with a key that this deployment knows."


class ForeignOriginError(RequestError):
    status = 403
    code = "foreign_origin"
    kind = "permission_error"
    default_hint = "Set API keys (--tenants) to let web pages of other sites use this gateway."


class ForbiddenError(RequestError):
    status = 403
    code = "forbidden"
    kind = "permission_error"
    default_hint = "Use the key of a tenant with 'admin: true'."


class ConflictError(RequestError):
    status = 409
    code = "conflict"
    default_hint = "Wait until the turn has ended, then send the request again."


class NotFoundError(RequestError):
    status = 404
    code = "not_found"
    kind = "not_found_error"
    default_hint = "Check the id; GET /v1/sessions and GET /v1/models list what exists."


class OverloadedError(KVStewardError):
    status = 503
    code = "overloaded"
    kind = "overloaded_error"
    default_hint = "Retry after the time in Retry-After, or give the engine a larger KV budget."


class EngineError(KVStewardError):
    status = 502
    code = "engine_error"
    kind = "engine_error"
    default_hint = "Look at the engine's log; GET /health shows what kvsteward knows of it."


class EngineUnavailableError(EngineError):
    status = 503
    code = "engine_unavailable"
    default_hint = "Check that the engine runs and that its URL is right; an embedded engine restarts by itself."


class EngineTimeoutError(EngineError):
    status = 504
    code = "engine_timeout"
    default_hint = "Retry, or raise the timeout."


class EngineResponseError(EngineError):
    """The engine's own error answer. `status` is the engine's; `body` its error object, in OpenAI's shape."""

    code = "engine_response"

    def __init__(self, message: str, *, status: int, body: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = body or {}


class StoreError(KVStewardError):
    status = 507
    code = "store_error"
    kind = "store_error"
    default_hint = "Free disk space or point --store at a writable place; nothing was acknowledged that is not stored."


class StoreUnavailableError(StoreError):
    status = 503
    code = "store_unavailable"
    default_hint = "Check that the store's server runs and can be reached; what was acknowledged is stored. Then retry."


class CorruptLogError(StoreError):
    status = 500
    code = "corrupt_log"
    default_hint = "Run 'kvsteward sessions verify'; restore the store from a backup. The entry is not used."


class StateError(KVStewardError):
    code = "illegal_state"


class ConfigError(KVStewardError):
    status = 400
    code = "invalid_config"
    kind = "invalid_request_error"
    default_hint = "Correct the setting or the file that the message names."


class InvariantError(KVStewardError):
    code = "invariant_violated"

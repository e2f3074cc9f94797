"""Error classes to HTTP: the one table of statuses, and the one JSON shape of an error."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from loraplex.core import (
    AdapterRefused,
    BaseRefused,
    CallerLimitReached,
    ClientError,
    ConfigError,
    ContextTooLong,
    DeadlinePassed,
    EngineDead,
    InvalidRequest,
    LoraplexError,
    ModelNotFound,
    NonFiniteOutput,
    Overloaded,
    ServerError,
)
from loraplex.core import registry_errors as registry
from loraplex.core.host_memory import HostMemoryFull
from loraplex.server.redaction import Redactor


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """HTTP status of an error and the `type` that its body carries."""

    status: int
    type: str


INVALID = ErrorKind(400, "invalid_request_error")
INTERNAL = ErrorKind(500, "server_error")
UNAVAILABLE = ErrorKind(503, "service_unavailable_error")
NOT_FOUND = ErrorKind(404, "NotFoundError")
CONFLICT = ErrorKind(409, "conflict_error")
TOO_MANY = ErrorKind(429, "rate_limit_error")

ERROR_KINDS: Mapping[type[LoraplexError], ErrorKind] = MappingProxyType(
    {
        LoraplexError: INTERNAL,
        ClientError: INVALID,
        InvalidRequest: INVALID,
        ContextTooLong: INVALID,
        ModelNotFound: NOT_FOUND,
        AdapterRefused: INVALID,
        BaseRefused: INTERNAL,
        ConfigError: INTERNAL,
        ServerError: INTERNAL,
        Overloaded: UNAVAILABLE,
        CallerLimitReached: TOO_MANY,
        HostMemoryFull: UNAVAILABLE,
        DeadlinePassed: ErrorKind(504, "timeout_error"),
        EngineDead: UNAVAILABLE,
        NonFiniteOutput: INTERNAL,
        **dict.fromkeys((registry.ArtifactCorrupt, registry.ArtifactMissing, registry.ValidatorFailed), INTERNAL),
        **dict.fromkeys((registry.RegistryUnavailable, registry.StoreUnavailable), UNAVAILABLE),
        **dict.fromkeys((registry.StoreReadOnly, registry.AuditUnavailable), UNAVAILABLE),
        registry.StoreFull: ErrorKind(507, "server_error"),
        registry.Unauthenticated: ErrorKind(401, "authentication_error"),
        registry.PermissionDenied: ErrorKind(403, "permission_error"),
        **dict.fromkeys((registry.TenantNotFound, registry.KeyNotFound, registry.AdapterDeleted), NOT_FOUND),
        **dict.fromkeys((registry.TenantExists, registry.VersionStateError, registry.WrongBase), CONFLICT),
        **dict.fromkeys((registry.AdapterNotVerified, registry.AdapterNotActive), CONFLICT),
        registry.VersionConflict: ErrorKind(412, "conflict_error"),
        registry.RegistryLimitReached: TOO_MANY,
    }
)

HTTP_CODES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request",
        404: "route_not_found",
        405: "method_not_allowed",
        408: "request_timeout",
        413: "request_too_large",
        415: "unsupported_media_type",
        431: "headers_too_large",
    }
)

UNEXPECTED_MESSAGE = "The server met an unexpected error. The request id is in the X-Request-Id header."


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error as the client will see it."""

    kind: ErrorKind
    code: str
    message: str
    param: str | None = None
    reason: str | None = None
    retry_after_s: int | None = None

    def without_keys(self, redactor: Redactor) -> "ErrorReply":
        """The error without keys that the client wrote into what the message quotes."""
        param = None if self.param is None else redactor.text(self.param)
        return replace(self, message=redactor.text(self.message), param=param)

    def body(self) -> dict[str, object]:
        """The JSON object: OpenAI's shape, plus `reason` where a refusal or an overload has one."""
        error: dict[str, object] = {
            "message": self.message,
            "type": self.kind.type,
            "param": self.param,
            "code": self.code,
        }
        if self.reason is not None:
            error["reason"] = self.reason
        return {"error": error}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The HTTP answer."""
        merged = dict(headers or {})
        if self.kind.status == 401:
            merged["WWW-Authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            merged["Retry-After"] = str(self.retry_after_s)
        return JSONResponse(self.body(), status_code=self.kind.status, headers=merged)


def kind_of(error: LoraplexError) -> ErrorKind:
    """Status and type of an error, from its class or the nearest one above it."""
    for cls in type(error).__mro__:
        if issubclass(cls, LoraplexError) and cls in ERROR_KINDS:
            return ERROR_KINDS[cls]
    return INTERNAL


def reply_for(error: Exception) -> ErrorReply:
    """What a client may see of an error. Errors that are not ours say nothing about their cause."""
    if not isinstance(error, LoraplexError):
        return ErrorReply(INTERNAL, LoraplexError.code, UNEXPECTED_MESSAGE)
    return ErrorReply(
        kind=kind_of(error),
        code=error.code,
        message=error.message,
        param=_param_of(error),
        reason=error.reason_code if isinstance(error, AdapterRefused | BaseRefused | Overloaded) else None,
        retry_after_s=_retry_after_of(error),
    )


def _retry_after_of(error: LoraplexError) -> int | None:
    """Whole seconds, of errors that pass."""
    if isinstance(error, Overloaded | registry.StoreUnavailable | registry.RegistryUnavailable):
        return max(1, math.ceil(error.retry_after_s))
    return None


def _param_of(error: LoraplexError) -> str | None:
    if isinstance(error, InvalidRequest):
        return error.param
    return "model" if isinstance(error, ModelNotFound) else None


def http_reply(status: int, message: str) -> ErrorReply:
    """An error that HTTP itself defines: no such route, body too large."""
    return ErrorReply(ErrorKind(status, INVALID.type), HTTP_CODES.get(status, "http_error"), message)


def http_error_reply(request: Request, error: HTTPException) -> ErrorReply:
    """What a client sees of an error of routing or of body limits."""
    message = error.detail
    if error.status_code == 404:
        message = f"There is no route {request.scope['path']!r:.200}."
    elif error.status_code == 405:
        message = f"The method {request.method} is not allowed on this route."
    return http_reply(error.status_code, message)

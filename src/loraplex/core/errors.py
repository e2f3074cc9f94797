"""Every error loraplex raises on purpose.

LoraplexError
├── ClientError                 the caller can mend it
│   ├── InvalidRequest          a field of a request is missing, unknown, of a wrong type or out of range
│   │   └── ContextTooLong      prompt and output do not fit the model's context or the pool
│   ├── ModelNotFound           no such base or adapter name (for this caller)
│   ├── AdapterRefused          an adapter that cannot be served exactly; carries a stable reason code
│   ├── BaseRefused             a base model that cannot be served exactly; carries a stable reason code
│   └── ConfigError             a flag or setting that cannot work
└── ServerError                 the caller did nothing wrong
    ├── Overloaded              something the server has a limit of is used up; try again later
    │   ├── CallerLimitReached  one caller has its share of it; others are served
    │   └── DeadlinePassed      the answer had not ended when its client's deadline came
    ├── EngineDead              the engine stopped; the process must be restarted
    └── NonFiniteOutput         the weights a request asked for produced NaN or infinity; only that request fails
"""

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex.core.request import ServedBy


class LoraplexError(Exception):
    """Base of all errors. `code` is stable and meant for programs; the message is for people."""

    code = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ClientError(LoraplexError):
    code = "client_error"


class InvalidRequest(ClientError):
    """A request field is wrong. `param` names the field, the message names the value and the limit."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(ClientError):
    """The `model` field names nothing this caller may use. The base is never a fallback."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} does not exist.")
        self.model = model
        self.reason_code = RefusalReason.NOT_FOUND.value


class RefusalReason(StrEnum):
    """Why an adapter, a base or a name is refused. The values are stable."""

    CONFIG_MISSING = "CONFIG_MISSING"
    CONFIG_INVALID = "CONFIG_INVALID"
    FIELD_INVALID = "FIELD_INVALID"
    PEFT_TYPE_UNSUPPORTED = "PEFT_TYPE_UNSUPPORTED"
    TASK_TYPE_UNSUPPORTED = "TASK_TYPE_UNSUPPORTED"
    FEATURE_UNSUPPORTED = "FEATURE_UNSUPPORTED"
    WEIGHTS_MISSING = "WEIGHTS_MISSING"
    WEIGHTS_UNSAFE_FORMAT = "WEIGHTS_UNSAFE_FORMAT"
    WEIGHTS_CORRUPT = "WEIGHTS_CORRUPT"
    WEIGHTS_EMPTY = "WEIGHTS_EMPTY"
    KEY_UNMATCHED = "KEY_UNMATCHED"
    KEY_DUPLICATE = "KEY_DUPLICATE"
    PAIR_INCOMPLETE = "PAIR_INCOMPLETE"
    TARGET_NOT_COVERED = "TARGET_NOT_COVERED"
    RANK_MISMATCH = "RANK_MISMATCH"
    RANK_TOO_LARGE = "RANK_TOO_LARGE"
    SHAPE_MISMATCH = "SHAPE_MISMATCH"
    VOCAB_MISMATCH = "VOCAB_MISMATCH"
    DTYPE_UNSUPPORTED = "DTYPE_UNSUPPORTED"
    NONFINITE = "NONFINITE"
    BASE_MISMATCH = "BASE_MISMATCH"
    NAME_INVALID = "NAME_INVALID"
    NAME_CONFLICT = "NAME_CONFLICT"
    NOT_FOUND = "NOT_FOUND"
    PATH_ESCAPE = "PATH_ESCAPE"
    TOO_LARGE = "TOO_LARGE"
    ARCHITECTURE_UNSUPPORTED = "ARCHITECTURE_UNSUPPORTED"


class AdapterRefused(ClientError):
    """An adapter (or its name) is refused. `reason_code` is stable; `subject` is the field, tensor or file at fault."""

    code = "adapter_refused"

    def __init__(self, reason: RefusalReason, message: str, subject: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.reason_code = reason.value
        self.subject = subject


class BaseRefused(ClientError):
    """A base model is refused. `reason_code` is stable; `subject` is the field, tensor or file at fault."""

    code = "base_refused"

    def __init__(self, reason: RefusalReason, message: str, subject: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.reason_code = reason.value
        self.subject = subject


class ConfigError(ClientError):
    """A flag or setting cannot work. The message names the value, the limit and the knob."""

    code = "config_error"


class ServerError(LoraplexError):
    code = "server_error"


class OverloadReason(StrEnum):
    """Why a request cannot be served now. The values are stable."""

    QUEUE_FULL = "QUEUE_FULL"
    QUEUE_TOKENS = "QUEUE_TOKENS"
    ADAPTER_LOAD = "ADAPTER_LOAD"
    DEADLINE = "DEADLINE"
    HOST_MEMORY = "HOST_MEMORY"
    BODIES = "BODIES"
    WORK = "WORK"
    CONNECTIONS = "CONNECTIONS"
    SHARE = "SHARE"
    TENANT_REQUESTS = "TENANT_REQUESTS"
    TENANT_TOKENS = "TENANT_TOKENS"


class Overloaded(ServerError):
    """It cannot be served now. `retry_after_s` is an estimate in seconds; `reason_code` is stable."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float, reason: OverloadReason = OverloadReason.QUEUE_FULL) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.reason_code = reason.value


class CallerLimitReached(Overloaded):
    """One caller has as much at once as a caller may have. The message names the limit."""

    code = "caller_limit"

    def __init__(self, message: str, retry_after_s: float, reason: OverloadReason = OverloadReason.SHARE) -> None:
        super().__init__(message, retry_after_s, reason)


class DeadlinePassed(Overloaded):
    """The request's own deadline (`deadline_s`) came before its answer had ended."""

    code = "deadline_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s, OverloadReason.DEADLINE)


class EngineDead(ServerError):
    code = "engine_dead"


class NonFiniteOutput(ServerError):
    """The weights that served a request produced logits without a finite maximum; `served_by` says which ran."""

    code = "non_finite_output"

    def __init__(self, model: str, served_by: "ServedBy | None" = None) -> None:
        super().__init__(f"The model {model!r} produced NaN or infinite values; the request was stopped.")
        self.model = model
        self.served_by = served_by

"""Value types, ids, limits and errors shared by all rooms. Imports nothing heavy."""

from loraplex.core.base import BaseDescription, BaseSite
from loraplex.core.comparison import AdapterComparison
from loraplex.core.engine_client import EngineClient, EngineStats
from loraplex.core.errors import (
    AdapterRefused,
    BaseRefused,
    CallerLimitReached,
    ClientError,
    ConfigError,
    ContextTooLong,
    EngineDead,
    InvalidRequest,
    LoraplexError,
    ModelNotFound,
    NonFiniteOutput,
    Overloaded,
    OverloadReason,
    RefusalReason,
    ServerError,
)
from loraplex.core.request import (
    AdapterRef,
    ChatMessage,
    FinishReason,
    Request,
    RequestOutput,
    SequenceDelta,
    ServedBy,
    TokenLogprob,
    TopLogprob,
)
from loraplex.core.sampling import SamplingParams
from loraplex.core.types import AdapterDigest, BaseFingerprint, PageId, RequestId, SequenceId

__all__ = [
    "AdapterComparison",
    "AdapterDigest",
    "AdapterRef",
    "AdapterRefused",
    "BaseDescription",
    "BaseFingerprint",
    "BaseRefused",
    "BaseSite",
    "CallerLimitReached",
    "ChatMessage",
    "ClientError",
    "ConfigError",
    "ContextTooLong",
    "EngineClient",
    "EngineDead",
    "EngineStats",
    "FinishReason",
    "InvalidRequest",
    "LoraplexError",
    "ModelNotFound",
    "NonFiniteOutput",
    "OverloadReason",
    "Overloaded",
    "PageId",
    "RefusalReason",
    "Request",
    "RequestId",
    "RequestOutput",
    "SamplingParams",
    "SequenceDelta",
    "SequenceId",
    "ServedBy",
    "ServerError",
    "TokenLogprob",
    "TopLogprob",
]

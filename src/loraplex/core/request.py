"""A request and its answer, as they cross the rooms."""

from dataclasses import dataclass, field
from enum import StrEnum

from loraplex.core.errors import InvalidRequest
from loraplex.core.limits import MAX_DEADLINE_S
from loraplex.core.sampling import SamplingParams
from loraplex.core.types import AdapterDigest, BaseFingerprint, RequestId

MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A name resolved to the exact weights it stood for at that moment."""

    name: str
    version: int
    digest: AdapterDigest

    @property
    def label(self) -> str:
        """`name@version`, for people."""
        return f"{self.name}@{self.version}"


class FinishReason(StrEnum):
    """Why a sequence ended. STOP: end token, stop token or stop string. LENGTH: a length limit. ABORT: cancelled."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Progress:
    """What the engine notes on a request beside its outputs. Any thread may look; the engine's alone writes."""

    has_begun: bool = False  # a step with the prompt, or with what the prefix cache left of it, was planned


@dataclass(frozen=True, slots=True)
class Request:
    """One client request after parsing, authorisation and tokenisation. `adapter` None means the base, by choice.

    `tenant` is whose share it counts to and who may reuse its computed prefix; a request of no tenant shares with none.
    Higher `priority` goes first. `deadline_s`: seconds after arrival by which the answer must have ended. Requests with
    the same `call_id` are the prompts of one call, and count as one where the tenant's share of the queue is judged.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: AdapterRef | None
    tenant: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    call_id: str | None = None
    progress: Progress = field(default_factory=Progress, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"priority is {self.priority}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}.", "priority"
            )
        if self.deadline_s is not None and not 0 < self.deadline_s <= MAX_DEADLINE_S:
            message = f"deadline_s is {self.deadline_s}; it must be above 0 and at most {MAX_DEADLINE_S:.0f} seconds."
            raise InvalidRequest(message, "deadline_s")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural log, from the unmodified logits) of one token and of the most likely ones."""

    token_id: int
    text: str
    logprob: float
    top: tuple["TopLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """What one sequence of a request gained since the last output. `finish_reason` is set exactly once, on the last."""

    index: int  # 0 .. n-1
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that matched, if one did


@dataclass(frozen=True, slots=True)
class ServedBy:
    """Which weights really ran, taken from what the engine executed, not from what was asked."""

    base_name: str
    base_fingerprint: BaseFingerprint
    adapter: AdapterRef | None
    cold: bool = False  # the adapter had to be brought into the pool for this request
    load_s: float = 0.0  # seconds that took

    @property
    def model(self) -> str:
        """The `model` field of an answer."""
        return self.adapter.label if self.adapter else self.base_name

    @property
    def system_fingerprint(self) -> str:
        """`base-<12 hex>` or `base-<12 hex>.lora-<12 hex>`."""
        base = f"base-{self.base_fingerprint[:12]}"
        return f"{base}.lora-{self.adapter.digest[:12]}" if self.adapter else base


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the engine's time for a request went, in seconds: from its arrival to its first step, waiting for its
    adapter included; from there to its first token; from there to its last token so far.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One increment of an answer. `deltas` has at most one entry a sequence; `finished` is true on the last output."""

    request_id: RequestId
    served_by: ServedBy
    deltas: tuple[SequenceDelta, ...]
    finished: bool
    num_prompt_tokens: int
    num_output_tokens: int  # so far, over all sequences of the request
    num_cached_tokens: int = 0  # of the prompt, taken from the prefix cache; the least of its sequences
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    extra: tuple[tuple[str, str], ...] = field(default=())  # further string fields, e.g. name

"""One generated sequence: its tokens, how far it is computed, and the pages it holds."""

from dataclasses import dataclass, field
from enum import Enum

from loraplex.core import AdapterDigest, FinishReason, PageId, Request, RequestId, SamplingParams, SequenceId
from loraplex.pool import CacheSpace, Lease, PrefixNode

UNKNOWN_TOKEN = -1
"""Stands in `token_ids` for a token that a step under way draws."""


class SequenceStatus(Enum):
    """WAITING holds no pages. RUNNING holds pages and a pin on its adapter. FINISHED holds nothing, for good."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class WaitReason(Enum):
    """What a waiting sequence waits for. BUDGET: a seat or tokens of a step. SLOT: its adapter would be one too many.

    RANKS: its adapter would make steps too slow. PAGES: room for its tokens. LOAD: its adapter comes into the pool.
    """

    BUDGET = "budget"
    SLOT = "slot"
    RANKS = "ranks"
    PAGES = "pages"
    LOAD = "load"


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence. Only the scheduler changes it."""

    seq_id: SequenceId
    request_id: RequestId
    params: SamplingParams
    adapter: AdapterDigest | None
    adapter_pages: int
    token_ids: list[int]  # prompt, then output
    prompt_len: int
    max_len: int  # tokens at which it ends by length
    eos_token_ids: frozenset[int]
    arrival_s: float
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    lease: Lease | None = None
    pages: tuple[PageId, ...] = ()  # while it runs, in order: those of its prefix, then of its lease
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_preemptions: int = 0
    blocked_since_s: float | None = None  # since when it is passed over
    tenant: str | None = None
    priority: int = 0
    deadline_at_s: float | None = None
    call_id: str | None = None
    adapter_rank: float = 0.0  # ranks of all projections that weigh as much as the adapter
    space: CacheSpace | None = None  # where its prefix may be shared; None: nowhere
    prefix: list[PrefixNode] = field(default_factory=list)  # its first pages, held by the cache
    num_cached_tokens: int | None = None  # of its prompt at its first start
    wait: WaitReason = WaitReason.BUDGET
    is_cold: bool = False  # its adapter was not in the pool while it waited

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def namespace(self) -> str:
        """KV pages of its own are never shared between different adapters."""
        return f"kv:{self.adapter or 'base'}:{self.seq_id}"


def new_sequence(
    seq_id: SequenceId, request: Request, max_len: int, eos_token_ids: frozenset[int], now: float
) -> Sequence:
    """A sequence of a request as it arrives."""
    params = request.params
    return Sequence(
        seq_id=seq_id,
        request_id=request.request_id,
        params=params,
        adapter=request.adapter.digest if request.adapter else None,
        adapter_pages=0,
        token_ids=list(request.prompt_token_ids),
        prompt_len=len(request.prompt_token_ids),
        max_len=max_len,
        eos_token_ids=frozenset() if params.ignore_eos else eos_token_ids,
        arrival_s=now,
        tenant=request.tenant,
        priority=request.priority,
        deadline_at_s=None if request.deadline_s is None else now + request.deadline_s,
        call_id=request.call_id,
    )


def finish_reason(seq: Sequence, token: int, length: int) -> FinishReason | None:
    """Why a sequence ends with its token number `length`, if it does."""
    if length - seq.prompt_len >= seq.params.min_tokens:
        if token in seq.params.stop_token_ids:
            seq.stop_token_id = token
            return FinishReason.STOP
        if token in seq.eos_token_ids:
            return FinishReason.STOP
    return FinishReason.LENGTH if length >= seq.max_len else None


def age(seq: Sequence) -> tuple[float, int]:
    """Key of the order of arrival."""
    return (seq.arrival_s, seq.seq_id)

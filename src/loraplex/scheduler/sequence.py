"""One generated sequence: its tokens, how far it is computed, and the pages it holds."""

from dataclasses import dataclass
from enum import Enum

from loraplex.core import AdapterDigest, FinishReason, RequestId, SamplingParams, SequenceId
from loraplex.pool import Lease

UNKNOWN_TOKEN = -1
"""Stands in `token_ids` for a token that a step under way draws."""


class SequenceStatus(Enum):
    """WAITING holds no pages. RUNNING holds pages and a pin on its adapter. FINISHED holds nothing, for good."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


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
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_preemptions: int = 0
    blocked_since_s: float | None = None  # since when it waits for an adapter's turn

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def namespace(self) -> str:
        """KV pages are never shared between different adapters."""
        return f"kv:{self.adapter or 'base'}:{self.seq_id}"

"""What one step runs, as a value."""

from dataclasses import dataclass

from loraplex.core import AdapterDigest, FinishReason, PageId, SequenceId
from loraplex.scheduler.cost import StepShape


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, start + num_tokens) of one sequence. `samples`: they reach its end, so a token is drawn."""

    seq_id: SequenceId
    start: int
    num_tokens: int
    samples: bool
    adapter: AdapterDigest | None
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter whose pages must be filled: before the step runs, or beside steps until `Scheduler.adapter_ready`."""

    digest: AdapterDigest
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Chunks are ordered by adapter, base first, so every adapter is one segment of rows."""

    chunks: tuple[ScheduledChunk, ...]
    adapters: tuple[tuple[AdapterDigest, tuple[PageId, ...]], ...]  # distinct, in the order of their segments
    loads: tuple[AdapterLoad, ...]
    num_preempted: int
    sum_ranks: float = 0.0  # of the distinct adapters

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def shape(self) -> StepShape:
        """What the step's time depends on."""
        num_kv_tokens = sum(chunk.start + chunk.num_tokens for chunk in self.chunks)
        return StepShape(self.num_tokens, num_kv_tokens, self.sum_ranks)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step did to one sequence that drew a token."""

    seq_id: SequenceId
    token_id: int
    finish_reason: FinishReason | None

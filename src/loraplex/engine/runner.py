"""What carries out a planned step: `launch` starts it, `StepInFlight.wait` gives what it drew."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraplex.core import AdapterDigest, PageId, SequenceId
from loraplex.engine.batch import BatchBuilder, PageBuffer
from loraplex.engine.host_arena import HostPages
from loraplex.engine.packing import PackedAdapter
from loraplex.kernels import KvBatch
from loraplex.model import Decoder, DeviceBatch, Sampled, SamplingRow, sample
from loraplex.scheduler import Sequence as SequenceState
from loraplex.scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class Step:
    """A step to run. `draws` has a row for each chunk that samples, in their order."""

    plan: StepPlan
    sequences: Mapping[SequenceId, SequenceState]
    packed: Mapping[AdapterDigest, PackedAdapter]
    draws: Sequence[SamplingRow]
    observe: Callable[[Tensor], None] | None = (
        None  # called with the logits [num_draws, vocab] before they are drawn from
    )
    on_layer: Callable[[], None] = lambda: None


class StepInFlight(Protocol):
    """A step that was started."""

    def wait(self) -> list[Sampled]:
        """What it drew, in the order of its draws; returns when the device has got there."""
        ...


class LoadMark(Protocol):
    """A point in the order of copies."""

    @property
    def is_held_up(self) -> bool:
        """Whether the copies begin only after steps that were launched before them."""
        ...

    def is_done(self) -> bool:
        """Whether all copies before it have arrived. Never waits."""
        ...


class Runner(Protocol):
    """Runs steps in the order they are launched.

    Where `overlaps`, a step may be launched while the one before runs, and may use tokens that nobody has seen yet.
    Where `copies_aside`, loads run beside the steps without the host's time, and `copy_s` says how long they take.
    """

    @property
    def overlaps(self) -> bool: ...

    @property
    def copies_aside(self) -> bool: ...

    def load(self, pages: Sequence[PageId], image: HostPages) -> None:
        """Copy page images to an adapter's pages, after the steps launched so far that use them. Never waits."""
        ...

    def load_mark(self) -> LoadMark:
        """Marks the copies so far."""
        ...

    def copy_s(self, num_bytes: int) -> float:
        """Seconds that copies aside of so many bytes take; 0 where the host copies."""
        ...

    def follow(self, mark: LoadMark) -> None:
        """Let every step launched from now on begin after the copies before the mark. Never waits."""
        ...

    def launch(self, step: Step) -> StepInFlight: ...


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step whose draws are known."""

    drawn: list[Sampled]

    def wait(self) -> list[Sampled]:
        return self.drawn


@dataclass(frozen=True, slots=True)
class CopiesInFlight:
    """Copies on a stream of a GPU, up to an event."""

    event: torch.cuda.Event
    is_held_up: bool = False

    @staticmethod
    def on(stream: torch.cuda.Stream, *, is_held_up: bool = False) -> "CopiesInFlight":
        """The copies on a stream so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return CopiesInFlight(event, is_held_up)

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class CopiesDone:
    """A mark of copies that ended when they were called."""

    is_held_up: bool = False

    def is_done(self) -> bool:
        return True


class EagerRunner:
    """Runs a step from start to end in `launch`, on any device."""

    overlaps = False
    copies_aside = False

    def __init__(self, decoder: Decoder, buffer: PageBuffer) -> None:
        self._decoder = decoder
        self._buffer = buffer
        self._builder = BatchBuilder(buffer)

    def load(self, pages: Sequence[PageId], image: HostPages) -> None:
        self._buffer.fill(pages, image)

    def load_mark(self) -> LoadMark:
        device = self._decoder.device
        return CopiesDone() if device.type == "cpu" else CopiesInFlight.on(torch.cuda.current_stream(device))

    def copy_s(self, num_bytes: int) -> float:
        return 0.0

    def follow(self, mark: LoadMark) -> None:
        """Steps run where copies do, one after the other."""

    def launch(self, step: Step) -> StepInFlight:
        batch = self._builder.build(step.plan, step.sequences, step.packed)
        logits = self._decoder.forward(_on_device(batch, self._decoder.device), step.on_layer)
        if step.observe is not None:
            step.observe(logits)
        return StepDone(sample(logits, step.draws))


def _on_device(batch: DeviceBatch, device: torch.device) -> DeviceBatch:
    """The batch as the operations of torch take it. Tables of adapters stay on the host, where they are read."""
    if device.type == "cpu":
        return batch
    kv = batch.kv
    tables = (table.to(device) for table in (kv.page_table, kv.seq_start, kv.row_seq, kv.row_pos))
    logit_rows = None if batch.logit_rows is None else batch.logit_rows.to(device)
    return DeviceBatch(batch.token_ids.to(device), logit_rows, KvBatch(kv.pages, *tables), batch.lora)

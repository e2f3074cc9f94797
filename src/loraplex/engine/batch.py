"""From a plan to the tensors of a step."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.core import AdapterDigest, ConfigError, PageId, SequenceId
from loraplex.engine.host_arena import HostPages
from loraplex.engine.packing import PackedAdapter
from loraplex.kernels import KvBatch, LoraBatch
from loraplex.model import DeviceBatch
from loraplex.pool import PoolGeometry
from loraplex.scheduler import ScheduledChunk, StepPlan
from loraplex.scheduler import Sequence as SequenceState

Placed = tuple[tuple[AdapterDigest, tuple[PageId, ...]], ...]


class PageBuffer:
    """The memory behind the page pool, seen flat and as keys and values. Raises ConfigError if there is too little."""

    def __init__(self, geometry: PoolGeometry, dtype: torch.dtype, device: torch.device) -> None:
        kv = geometry.kv
        self.geometry = geometry
        try:
            self.flat = torch.zeros(geometry.num_pages * geometry.page_elems, dtype=dtype, device=device)
        except (MemoryError, RuntimeError) as error:  # torch's out-of-memory errors are RuntimeErrors
            message = (
                f"The pool of {geometry.num_pages} pages of {geometry.page_bytes} bytes cannot be allocated on "
                f"{device}; lower --kv-pages or --memory."
            )
            raise ConfigError(message) from error
        self.rows = self.flat.view(geometry.num_pages, geometry.page_elems)
        self.kv = self.flat.view(
            geometry.num_pages, kv.num_layers, 2, geometry.page_tokens, kv.num_kv_heads, kv.head_dim
        )

    def fill(self, pages: Sequence[PageId], image: HostPages) -> None:
        """Copy an adapter's page images to its pages: a copy for each run that are neighbours on both sides.

        None of them blocks where the images are pinned and the pages are a GPU's.
        """
        before = 0  # pages of the runs before
        for run in image.runs:
            first = 0
            for end in range(1, len(run) + 1):
                if end == len(run) or pages[before + end] != pages[before + end - 1] + 1:
                    start = pages[before + first]
                    self.rows[start : start + end - first].copy_(run[first:end], non_blocking=True)
                    first = end
            before += len(run)


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


class _MixTables:
    """Chunk tables of one mix of adapters, as kernels take them."""

    __slots__ = ("chunk_a", "chunk_b", "chunk_rank", "chunk_start", "scale")

    def __init__(self, placed: Placed, packed: Mapping[AdapterDigest, PackedAdapter], page_elems: int) -> None:
        adapters = [packed[digest] for digest, _ in placed]
        firsts = np.cumsum([0, *(len(adapter.chunk_rank) for adapter in adapters)])
        offsets = np.concatenate(
            [a.chunk_offsets(pages, page_elems) for a, (_, pages) in zip(adapters, placed, strict=True)], axis=1
        )
        starts = [adapter.chunk_start + first for adapter, first in zip(adapters, firsts, strict=False)]
        self.chunk_start = _tensor(np.stack(starts).astype(np.int32))
        self.chunk_a, self.chunk_b = _tensor(offsets[0]), _tensor(offsets[1])
        self.chunk_rank = _tensor(np.concatenate([adapter.chunk_rank for adapter in adapters]))
        self.scale = _tensor(np.stack([adapter.scale for adapter in adapters]))


class BatchBuilder:
    """Builds device batches. Keeps the tables of the last mix of adapters, which decoding repeats step after step."""

    def __init__(self, buffer: PageBuffer) -> None:
        self._buffer = buffer
        self._mix: tuple[Placed, _MixTables] | None = None

    def build(
        self,
        plan: StepPlan,
        sequences: Mapping[SequenceId, SequenceState],
        packed: Mapping[AdapterDigest, PackedAdapter],
    ) -> DeviceBatch:
        """The rows of a plan in its order; one logits row for each chunk that samples."""
        tokens: list[int] = []
        positions: list[int] = []
        for chunk in plan.chunks:
            stop = chunk.start + chunk.num_tokens
            tokens.extend(sequences[chunk.seq_id].token_ids[chunk.start : stop])
            positions.extend(range(chunk.start, stop))
        counts = np.array([chunk.num_tokens for chunk in plan.chunks])
        ends = np.cumsum(counts)
        samples = np.array([chunk.samples for chunk in plan.chunks])
        return DeviceBatch(
            token_ids=torch.tensor(tokens),
            logit_rows=_tensor(ends[samples] - 1),
            kv=self._kv(plan.chunks, counts, ends, positions),
            lora=self.lora(plan, packed) if plan.adapters else None,
        )

    def _kv(
        self, chunks: Sequence[ScheduledChunk], counts: NDArray[np.int64], ends: NDArray[np.int64], positions: list[int]
    ) -> KvBatch:
        table = np.zeros((len(chunks), max(len(chunk.pages) for chunk in chunks)), dtype=np.int32)
        for i, chunk in enumerate(chunks):
            table[i, : len(chunk.pages)] = chunk.pages
        return KvBatch(
            pages=self._buffer.kv,
            page_table=_tensor(table),
            seq_start=_tensor(np.concatenate(([0], ends)).astype(np.int32)),
            row_seq=_tensor(np.repeat(np.arange(len(chunks), dtype=np.int32), counts)),
            row_pos=torch.tensor(positions, dtype=torch.int32),
        )

    def lora(self, plan: StepPlan, packed: Mapping[AdapterDigest, PackedAdapter]) -> LoraBatch:
        """The adapters of a step; tables on the host."""
        if self._mix is None or self._mix[0] != plan.adapters:
            tables = _MixTables(plan.adapters, packed, self._buffer.geometry.page_elems)
            self._mix = (plan.adapters, tables)
        tables = self._mix[1]
        slots, starts = _segments(plan)
        return LoraBatch(
            pages=self._buffer.flat,
            seg_start=torch.tensor(starts, dtype=torch.int32),
            seg_slot=torch.tensor(slots, dtype=torch.int32),
            chunk_start=tables.chunk_start,
            chunk_a=tables.chunk_a,
            chunk_b=tables.chunk_b,
            chunk_rank=tables.chunk_rank,
            scale=tables.scale,
        )


def _segments(plan: StepPlan) -> tuple[list[int], list[int]]:
    """Slot of each run of rows with one adapter, -1 for the base, and the bounds of the runs."""
    slot_of: dict[AdapterDigest | None, int] = {digest: slot for slot, (digest, _) in enumerate(plan.adapters)}
    slot_of[None] = -1
    slots: list[int] = []
    starts = [0]
    for chunk in plan.chunks:
        slot = slot_of[chunk.adapter]
        if slots and slots[-1] == slot:
            starts[-1] += chunk.num_tokens
        else:
            slots.append(slot)
            starts.append(starts[-1] + chunk.num_tokens)
    return slots, starts

"""Adapters of a step on CUDA: their lists and tables, sent again only when the mix or its rows change.

A graph's step has lists of blocks of few rows (`kernels.gpu.items`). A step that is run launch by launch has tables of
blocks of many rows (`kernels.gpu.blocks`), and such lists for the adapters of few rows: the decoding ones.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.cuda_buckets import choose_programs
from loraplex.kernels import LoraBatch, LoraSite
from loraplex.kernels.gpu import (
    DECODE_ROWS,
    PREFILL_ROWS,
    BoundLora,
    BoundPrefill,
    RowBlocks,
    WorkItems,
    count_blocks,
    plan_blocks,
    plan_items,
    prefill_room,
)

MAX_ITEMS = 4096  # of a list, 256 rows of as many adapters of rank 256
_LEAST_BLOCKS, _LEAST_ENTRIES = 64, 64  # that tables are made for


class DecodeAdapters:
    """Work lists at addresses that stay, so that a graph may read them."""

    def __init__(self, num_sites: int, max_rows: int, align: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = WorkItems.empty(num_sites, MAX_ITEMS, max_rows, pin_memory=pinned, align=align)
        self.items = WorkItems.empty(num_sites, MAX_ITEMS, max_rows, device, align=align)
        self._sent: tuple[object, ...] | None = None
        self._longest = 0

    def send(self, batch: LoraBatch, adapters: object, num_rows: int) -> int:
        """Bring the lists of a step to the device. The longest one's length.

        `adapters` stands for the batch's chunks and offsets.
        """
        mix = (adapters, batch.seg_start.tolist(), batch.seg_slot.tolist())
        if mix != self._sent:
            self._longest = plan_items(batch, num_rows, DECODE_ROWS, self._host)
            self.items.copy_(self._host, self._longest)
            self._sent = mix
        return self._longest


def split_short(batch: LoraBatch) -> tuple[LoraBatch | None, LoraBatch]:
    """Segments of adapters of at most DECODE_ROWS rows, and the others; rows of either have no adapter in the other.

    None for the first where there is none, or more than the lists hold.
    """
    starts, slots = batch.seg_start.numpy(), batch.seg_slot.numpy()
    rows = np.diff(starts)
    is_short = (slots >= 0) & (rows > 0) & (rows <= DECODE_ROWS)
    short = replace(batch, seg_slot=torch.from_numpy(np.where(is_short, slots, -1).astype(np.int32)))
    if not is_short.any() or count_blocks(short, DECODE_ROWS).places > MAX_ITEMS:
        return None, batch
    others = np.where(is_short, -1, slots).astype(np.int32)
    begins = np.ones(len(others), dtype=np.bool_)  # neighbours without an adapter become one segment
    begins[1:] = (others[1:] >= 0) | (others[:-1] >= 0)
    seg_start = np.append(starts[:-1][begins], starts[-1]).astype(np.int32)
    return short, replace(batch, seg_start=torch.from_numpy(seg_start), seg_slot=torch.from_numpy(others[begins]))


def _adapted(batch: LoraBatch) -> frozenset[int]:
    """Sites that any row's adapter has."""
    used = np.unique(batch.seg_slot.numpy()[np.diff(batch.seg_start.numpy()) > 0])
    chunks = np.diff(batch.chunk_start.numpy(), axis=1)[used[used >= 0]]
    return frozenset(np.flatnonzero(chunks.sum(axis=0)).tolist())


class PromptAdapters:
    """What steps with long prompts are run with; tables as large as steps have needed so far.

    `linears`: sites of the fused linears of a layer. `part`: for the lists, as `kernels.gpu.partial_sums` says.
    """

    def __init__(
        self,
        pages: Tensor,
        linears: list[tuple[LoraSite, ...]],
        num_sites: int,
        max_rows: int,
        align: int,
        part: Tensor,
    ) -> None:
        self._pages = pages
        self._linears = linears
        self._num_sites = num_sites
        self._align = align
        self._part = part
        self._short = DecodeAdapters(num_sites, max_rows, align, pages.device)
        self._blocks, self._entries = 0, 0
        self._grow(_LEAST_BLOCKS, _LEAST_ENTRIES)

    def _grow(self, blocks: int, entries: int) -> None:
        self._blocks, self._entries = max(self._blocks, _power_of_2(blocks)), max(self._entries, _power_of_2(entries))
        sizes = self._num_sites, self._blocks, self._entries
        self._host = RowBlocks.empty(*sizes, pin_memory=self._pages.is_cuda, align=self._align)
        self._tables = RowBlocks.empty(*sizes, self._pages.device, align=self._align)
        self._sent: tuple[object, ...] | None = None

    def bind(self, batch: LoraBatch, adapters: object) -> BoundPrefill:
        """Bring the tables of a step to the device. `adapters` stands for the batch's chunks and offsets."""
        short, others = split_short(batch)
        bound = self._bind_blocks(others, adapters)
        return bound if short is None else replace(bound, short=self._bind_lists(short, adapters))

    def _bind_lists(self, batch: LoraBatch, adapters: object) -> BoundLora:
        longest = self._short.send(batch, adapters, int(batch.seg_start[-1]))
        several = count_blocks(batch, DECODE_ROWS).chunks > 1
        programs = choose_programs(longest, several=several)
        return BoundLora(
            self._pages, self._short.items, self._part, DECODE_ROWS, programs, several, adapted=_adapted(batch)
        )

    def _bind_blocks(self, batch: LoraBatch, adapters: object) -> BoundPrefill:
        counts = count_blocks(batch, PREFILL_ROWS)
        if not self._tables.holds(counts.blocks, counts.entries):
            self._grow(counts.blocks, counts.entries)
        mix = (adapters, batch.seg_start.tolist(), batch.seg_slot.tolist())
        if mix != self._sent:
            plan_blocks(batch, PREFILL_ROWS, self._host)
            self._tables.copy_(self._host, counts.entries)
            self._sent = mix
        part_size, v_size = prefill_room(self._linears, counts, PREFILL_ROWS)
        part = torch.empty(part_size, dtype=torch.float32, device=self._pages.device)
        v = torch.empty(v_size, dtype=self._pages.dtype, device=self._pages.device)
        return BoundPrefill(self._pages, self._tables, counts, part, v, PREFILL_ROWS, _adapted(batch))


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()

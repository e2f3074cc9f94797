"""Adapters of a step on CUDA: their lists and tables, sent again only when the mix or its rows change.

A graph's step has lists of blocks of few rows (`kernels.gpu.items`), one that is run launch by launch has tables of
blocks of many rows (`kernels.gpu.blocks`).
"""

import numpy as np
import torch
from torch import Tensor

from loraplex.kernels import LoraBatch, LoraSite
from loraplex.kernels.gpu import (
    DECODE_ROWS,
    PREFILL_ROWS,
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


class PromptAdapters:
    """Tables as large as steps have needed so far. `linears`: sites of the fused linears of a layer."""

    def __init__(self, pages: Tensor, linears: list[tuple[LoraSite, ...]], num_sites: int, align: int) -> None:
        self._pages = pages
        self._linears = linears
        self._num_sites = num_sites
        self._align = align
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
        chunks = np.diff(batch.chunk_start.numpy(), axis=1)
        sites = frozenset(np.flatnonzero(chunks.sum(axis=0)).tolist())
        return BoundPrefill(self._pages, self._tables, counts, part, v, PREFILL_ROWS, sites)


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()

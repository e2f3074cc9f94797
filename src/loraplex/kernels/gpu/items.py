"""A step's work lists, planned on the host: which rows meet which rank chunk, for every site.

A block is up to `block_rows` rows of one adapter; an item is a block and one of its adapter's chunks at a site. Lists
are padded to a fixed length (rank 0: nothing there), so that a launch reads its item at once and a CUDA graph serves
any mix. Cost follows the items that exist.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.types import LoraBatch


@dataclass(frozen=True, slots=True)
class WorkItems:
    """Lists of every site [num_sites, capacity]. Items of a block are neighbours; `chunks` counts them at the first."""

    a: Tensor  # int64: offset of the chunk's A in the pool
    b: Tensor  # int64: offset of its B
    row: Tensor  # int32: first row
    num_rows: Tensor  # int32
    rank: Tensor  # int32; 0 is no item
    chunks: Tensor  # int32: chunks of the block, at its first item, 0 at the others
    scale: Tensor  # float32
    capacity: int
    longest: int  # items of the busiest site
    block_rows: int

    def to(self, device: torch.device) -> "WorkItems":
        """The same lists on a device."""
        tables = (self.a, self.b, self.row, self.num_rows, self.rank, self.chunks, self.scale)
        moved = (table.to(device, non_blocking=True) for table in tables)
        a, b, row, num_rows, rank, chunks, scale = moved
        return WorkItems(a, b, row, num_rows, rank, chunks, scale, self.capacity, self.longest, self.block_rows)


def _blocks(batch: LoraBatch, block_rows: int) -> NDArray[np.int32]:
    """Row blocks in row order [num_blocks, 3]: slot, first row, rows. Rows without an adapter are in none."""
    starts, slots = batch.seg_start.tolist(), batch.seg_slot.tolist()
    blocks = [
        (slot, row, min(block_rows, starts[segment + 1] - row))
        for segment, slot in enumerate(slots)
        if slot >= 0
        for row in range(starts[segment], starts[segment + 1], block_rows)
    ]
    return np.array(blocks, dtype=np.int32).reshape(-1, 3)


def plan_items(batch: LoraBatch, block_rows: int, capacity: int | None = None) -> WorkItems:
    """Lists of a step from tables on the CPU. `capacity` fixes their length; otherwise they are as long as needed."""
    blocks = _blocks(batch, block_rows)
    chunk_start = batch.chunk_start.numpy()
    num_sites = chunk_start.shape[1] - 1
    counts = np.diff(chunk_start, axis=1)[blocks[:, 0]].T  # [num_sites, num_blocks]
    longest = int(counts.sum(axis=1).max()) if counts.size else 0
    size = max(longest if capacity is None else capacity, 1)
    assert longest <= size, f"{longest} work items at a site in lists for {size}"
    # One entry for each item, site by site: its site, its block, its number in the block, its place in the list.
    site, block = (index.repeat(counts.ravel()) for index in np.indices(counts.shape).reshape(2, -1))
    before = np.cumsum(counts.ravel()) - counts.ravel()
    number = np.arange(len(site)) - before.repeat(counts.ravel())
    place = np.arange(len(site)) - (np.cumsum(counts.sum(axis=1)) - counts.sum(axis=1))[site]
    chunk = chunk_start[blocks[block, 0], site] + number

    def table(values: NDArray[np.generic]) -> Tensor:
        padded = np.zeros((num_sites, size), dtype=values.dtype)
        padded[site, place] = values
        return torch.from_numpy(padded)

    return WorkItems(
        a=table(batch.chunk_a.numpy()[chunk]),
        b=table(batch.chunk_b.numpy()[chunk]),
        row=table(blocks[block, 1]),
        num_rows=table(blocks[block, 2]),
        rank=table(batch.chunk_rank.numpy()[chunk]),
        chunks=table(np.where(number == 0, counts[site, block], 0).astype(np.int32)),
        scale=table(batch.scale.numpy()[blocks[block, 0], site]),
        capacity=size,
        longest=longest,
        block_rows=block_rows,
    )

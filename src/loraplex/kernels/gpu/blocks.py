"""A step of many rows, planned on the host: all its rows in blocks of one adapter, and that adapter's chunks once.

The lists of `items` repeat an adapter's chunks for each of its blocks; these tables do not: an adapter of rank 64 on
2048 rows takes 4 entries a site instead of 128.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex.kernels.gpu.items import WORDS, write_entries
from loraplex.kernels.types import LoraBatch


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How large a planned step is."""

    blocks: int
    entries: int  # chunks of all its adapters, each counted at its busiest site
    places: int  # the same for each block of an adapter: chunks of v
    chunks: int  # of the adapter that has most


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Views of one int32 buffer.

    A block: word 0 first row, 1 number of rows, 2 first entry of its adapter, 3 entries (0: no adapter), 4 first place
    of its chunks in v. Entry e of an adapter at a site is its chunk e there, as in `WorkItems`; rank 0 if it lacks it.
    """

    flat: Tensor  # [words] int32
    blocks: Tensor  # [max_blocks, WORDS] int32
    entries: Tensor  # [capacity, num_sites, WORDS] int32
    align: int  # offsets in the pool are multiples of this many elements

    @staticmethod
    def empty(
        num_sites: int,
        max_blocks: int,
        capacity: int,
        device: torch.device | str = "cpu",
        *,
        pin_memory: bool = False,
        align: int = 1,
    ) -> "RowBlocks":
        """Tables of no rows. `align` as in `WorkItems.empty`."""
        start = max_blocks * WORDS
        words = start + capacity * num_sites * WORDS
        flat = torch.zeros(words, dtype=torch.int32, device=device, pin_memory=pin_memory)
        entries = flat[start:].view(capacity, num_sites, WORDS)
        return RowBlocks(flat, flat[:start].view(max_blocks, WORDS), entries, align)

    def holds(self, blocks: int, entries: int) -> bool:
        """Whether a step of so many fits."""
        return blocks <= self.blocks.shape[0] and entries <= self.entries.shape[0]

    def copy_(self, other: "RowBlocks", entries: int) -> None:
        """One copy that does not block, of the blocks and the first `entries` entries."""
        assert self.entries.shape == other.entries.shape, f"{self.entries.shape} from {other.entries.shape}"
        end = self.entries.storage_offset() + entries * self.entries.stride(0)
        self.flat[:end].copy_(other.flat[:end], non_blocking=True)


def count_blocks(batch: LoraBatch, block_rows: int) -> BlockCounts:
    """What `plan_blocks` will need, from tables on the CPU."""
    rows, slots = np.diff(batch.seg_start.numpy()), batch.seg_slot.numpy()
    blocks = -(-rows // block_rows)
    chunks = np.diff(batch.chunk_start.numpy(), axis=1).max(axis=1, initial=0)
    has_slot = (slots >= 0) & (rows > 0)
    used = slots[has_slot]
    return BlockCounts(
        blocks=int(blocks.sum()),
        entries=int(chunks[np.unique(used)].sum()),
        places=int((blocks[has_slot] * chunks[used]).sum()),
        chunks=int(chunks[used].max(initial=0)),
    )


def plan_blocks(batch: LoraBatch, block_rows: int, out: RowBlocks) -> BlockCounts:
    """Fill tables on the host, from tables on the CPU, with blocks of up to `block_rows` rows."""
    counted = count_blocks(batch, block_rows)
    assert out.holds(counted.blocks, counted.entries), f"{counted} in tables for {out.entries.shape[0]} entries"
    starts, slots = batch.seg_start.tolist(), batch.seg_slot.tolist()
    used = sorted({slot for i, slot in enumerate(slots) if slot >= 0 and starts[i + 1] > starts[i]})
    counts = np.diff(batch.chunk_start.numpy(), axis=1)[used]  # [num_used, num_sites]
    longest = counts.max(axis=1, initial=0)
    words = out.entries[: counted.entries].numpy()
    if counted.entries:
        exists = np.empty(words.shape[:2], dtype=np.bool_)
        write_entries(batch, np.array(used, dtype=np.int32), counts, out.align, words, exists)
    first = dict(zip(used, (np.cumsum(longest) - longest).tolist(), strict=True))
    length = dict(zip(used, longest.tolist(), strict=True))
    rows: list[tuple[int, ...]] = []
    place = 0
    for segment, slot in enumerate(slots):
        for row in range(starts[segment], starts[segment + 1], block_rows):
            size, entries = min(block_rows, starts[segment + 1] - row), length.get(slot, 0)
            rows.append((row, size, first.get(slot, 0), entries, place, 0, 0, 0))
            place += entries
    if rows:
        out.blocks[: len(rows)].numpy()[:] = rows
    return counted

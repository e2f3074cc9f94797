"""A step's work lists, planned on the host: which rows meet which rank chunk, for every site, in one flat buffer.

A block is up to `block_rows` rows of one adapter; an item is a block and one of its adapter's chunks. Item i is of one
block at every site, so planning is dense: where that adapter lacks the chunk the entry is empty (rank 0). A site's list
ends after its last entry that is not empty, so a site nobody adapts has none.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.types import LoraBatch

WORDS = 8  # int32 words of an entry
_SLOTS = 64  # whose entries are written at a time
_LINE = 32  # words: the parts of the buffer begin on lines of the cache


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class WorkItems:
    """Views of one int32 buffer: lists of every site, their lengths, and the rows each site's adapters cover.

    An entry: words 0-1 element offset of A in the pool (int64), 2-3 of B, 4 first row, 5 number of rows | rank << 8 |
    chunks of the block at this site << 16 (at the block's first item, 0 at the others), 6 scale (float32), 7 unused.
    """

    flat: Tensor  # [words] int32
    count: Tensor  # [num_sites] int32: length of each site's list
    covered: Tensor  # [num_sites, max_rows] int8: 1 where the row's adapter has a module at the site
    table: Tensor  # [capacity, num_sites, WORDS] int32
    align: int  # offsets in the pool are multiples of this many elements

    @staticmethod
    def empty(
        num_sites: int,
        capacity: int,
        max_rows: int,
        device: torch.device | str = "cpu",
        *,
        pin_memory: bool = False,
        align: int = 1,
    ) -> "WorkItems":
        """Lists of length 0. `align` 8 promises 16-byte loads of weights in 2-byte dtypes; `plan_items` checks it."""
        covered_at = _round_up(num_sites, _LINE)
        row_words = _round_up(max_rows, 16) // 4
        table_at = _round_up(covered_at + num_sites * row_words, _LINE)
        words = table_at + capacity * num_sites * WORDS
        flat = torch.zeros(words, dtype=torch.int32, device=device, pin_memory=pin_memory)
        covered = flat[covered_at : covered_at + num_sites * row_words].view(torch.int8)
        return WorkItems(
            flat=flat,
            count=flat[:num_sites],
            covered=covered.view(num_sites, row_words * 4),
            table=flat[table_at:].view(capacity, num_sites, WORDS),
            align=align,
        )

    @property
    def capacity(self) -> int:
        """The longest list that fits."""
        return self.table.shape[0]

    @property
    def max_rows(self) -> int:
        """Rows a step may have."""
        return self.covered.shape[1]

    def copy_(self, other: "WorkItems", longest: int | None = None) -> None:
        """One copy that does not block, of the lists up to `longest` items; all of them if not given."""
        assert self.table.shape == other.table.shape, f"{self.table.shape} from {other.table.shape}"
        items = self.capacity if longest is None else longest
        end = self.table.storage_offset() + items * self.table.stride(0)
        self.flat[:end].copy_(other.flat[:end], non_blocking=True)


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


def write_entries(
    batch: LoraBatch,
    slots: NDArray[np.int32],
    counts: NDArray[np.int32],
    align: int,
    words: NDArray[np.int32],
    exists: NDArray[np.bool_],
) -> None:
    """Fill the entries of every slot's chunks [num_entries, num_sites, WORDS], rows left 0, and which of them exist.

    counts [num_slots, num_sites]: chunks. A slot has as many entries as its busiest site has chunks.
    """
    longest = counts.max(axis=1)
    if not longest.any():
        return
    of_slot = np.repeat(np.arange(len(slots)), longest)
    first = np.cumsum(longest) - longest
    number = (np.arange(len(of_slot)) - first[of_slot]).astype(np.int32)[:, None]  # the chunk's number at its site
    np.less(number, counts[of_slot], out=exists)
    chunk = batch.chunk_start.numpy().astype(np.intp)[slots[of_slot], :-1] + number
    chunk *= exists
    offsets = words.view(np.int64)
    offsets[..., 0] = batch.chunk_a.numpy()[chunk]
    offsets[..., 1] = batch.chunk_b.numpy()[chunk]
    unaligned = (offsets[..., 0] | offsets[..., 1]) & (align - 1)
    assert not unaligned.any(), f"offsets that are not multiples of {align}"
    packed = batch.chunk_rank.numpy()[chunk]
    packed *= exists
    packed <<= 8
    has_any = longest > 0
    packed[first[has_any]] |= counts[has_any] << 16
    words[..., 4] = 0
    words[..., 5] = packed
    words[..., 6] = batch.scale.numpy().view(np.int32)[slots[of_slot]]


def plan_items(batch: LoraBatch, num_rows: int, block_rows: int, out: WorkItems) -> int:
    """Fill lists on the host for a step of `num_rows` rows, from tables on the CPU. Returns the longest list's length.

    Only that many items of `out.table` are written.
    """
    assert num_rows <= out.max_rows, f"{num_rows} rows in tables for {out.max_rows}"
    count, covered, table = out.count.numpy(), out.covered.numpy(), out.table.numpy()
    blocks = _blocks(batch, block_rows)
    slots, slot_of = np.unique(blocks[:, 0], return_inverse=True)
    chunk_start = batch.chunk_start.numpy()
    counts = np.diff(chunk_start, axis=1)[slots]  # [num_slots, num_sites]
    if not counts.any():
        count[:], covered[:] = 0, 0
        return 0
    # Items in block order: which block, and which of its slot's entries.
    chunks = counts.max(axis=1)
    of_block = chunks[slot_of]
    block = np.repeat(np.arange(len(blocks)), of_block)
    within = np.arange(len(block)) - (np.cumsum(of_block) - of_block)[block]
    entry = within + (np.cumsum(chunks) - chunks)[slot_of][block]
    longest = len(block)
    assert longest <= out.capacity, f"{longest} work items at a site in lists for {out.capacity}"
    same = np.array_equal(entry, np.arange(chunks.sum()))  # a block a slot: the entries are the items
    words = table[:longest] if same else np.empty((chunks.sum(), *table.shape[1:]), dtype=np.int32)
    exists = np.empty(words.shape[:2], dtype=np.bool_)
    ends = np.concatenate(([0], np.cumsum(chunks)))
    for low in range(0, len(slots), _SLOTS):  # what a cache holds at a time
        some = slice(low, low + _SLOTS)
        part = slice(ends[low], ends[min(low + _SLOTS, len(slots))])
        write_entries(batch, slots[some], counts[some], out.align, words[part], exists[part])
    if not same:
        np.take(words, entry, axis=0, out=table[:longest], mode="clip")
        exists = exists[entry]
    table[:longest, :, 4] = blocks[block, 1, None]
    table[:longest, :, 5] |= blocks[block, 2, None]
    last = longest - np.argmax(exists[::-1], axis=0)
    count[:] = np.where(counts.any(axis=0), last, 0)
    # One column a slot and one of zeros, taken by row.
    columns = np.zeros((covered.shape[0], len(slots) + 1), dtype=np.int8)
    columns[:, :-1] = (counts > 0).T
    column = np.full(covered.shape[1], len(slots))
    for slot, (_, row, rows) in zip(slot_of.tolist(), blocks.tolist(), strict=True):
        column[row : row + rows] = slot
    np.take(columns, column, axis=1, out=covered, mode="clip")
    return longest

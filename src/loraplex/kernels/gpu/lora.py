"""Launching shrink and expand: two launches a fused linear, whatever the mix."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from loraplex.kernels.gpu.expand import expand_decode, expand_prefill
from loraplex.kernels.gpu.items import WorkItems, plan_items
from loraplex.kernels.gpu.shrink import shrink_decode, shrink_prefill
from loraplex.kernels.types import LoraBatch, LoraSite

CHUNK = 16  # ranks a chunk has at most: pool.geometry.MAX_CHUNK_RANK
MAX_SITES = 3  # of one fused linear: q, k and v
DECODE_ROWS, PREFILL_ROWS = 16, 64  # rows of a block
PREFILL_FROM = 257  # rows of a step from which blocks are large


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of a fused linear's launches. Sums depend on `block_k` and `loops` alone, never on the mix."""

    block_k: int
    loops: int  # blocks of K that one program sums
    block_n: int
    shrink_warps: int
    expand_warps: int
    pdl: bool = False  # programmatic dependent launch: Hopper and newer

    def splits(self, d_in: int) -> int:
        """Programs that share K."""
        return -(-d_in // (self.block_k * self.loops))


def choose_tiles(d_in: int, block_rows: int) -> Tiles:
    """Tile sizes by shape; found with bench/bench_lora_kernels.py on an H200."""
    if block_rows == DECODE_ROWS:
        block_k = min(512, triton.next_power_of_2(d_in))
        return Tiles(block_k, loops=1, block_n=256, shrink_warps=2, expand_warps=1)
    loops = triton.cdiv(d_in, 128 * 4) if d_in > 512 else 1
    return Tiles(block_k=128, loops=loops, block_n=128, shrink_warps=4, expand_warps=4)


@dataclass(frozen=True, slots=True)
class BoundLora:
    """One step's work lists on the device, with room for the partial sums."""

    pages: Tensor
    items: WorkItems
    part: Tensor  # float32
    num_items: int  # programs along the lists: the longest, or the capacity where a graph is captured


def bind(batch: LoraBatch, num_rows: int, max_splits: int, *, capacity: int | None = None) -> BoundLora:
    """Work lists of a step on the device of its pages; the other tables of `batch` are on the CPU.

    `capacity` (items a site) fixes every size, for capture in a CUDA graph. `max_splits`: the most any linear has.
    """
    block_rows = DECODE_ROWS if num_rows < PREFILL_FROM else PREFILL_ROWS
    items = plan_items(batch, block_rows, capacity)
    device = batch.pages.device
    part = torch.empty(MAX_SITES * items.capacity * max_splits * block_rows * CHUNK, dtype=torch.float32, device=device)
    return BoundLora(batch.pages, items.to(device), part, items.longest if capacity is None else capacity)


def add_lora(y: Tensor, x: Tensor, sites: tuple[LoraSite, ...], bound: BoundLora, tiles: Tiles | None = None) -> None:
    """y[rows, site] += scale * (x A^T) B. Shapes as `Ops.add_lora`; `tiles` overrides the table, for tuning."""
    if not bound.num_items:
        return
    indices = [site.index for site in sites]
    assert len(sites) <= MAX_SITES
    assert indices == list(range(indices[0], indices[0] + len(sites))), "sites of a linear are neighbours"
    chosen = tiles or choose_tiles(sites[0].d_in, bound.items.block_rows)
    _shrink(x, sites, bound, chosen)
    _expand(y, sites, bound, chosen)


def _shrink(x: Tensor, sites: tuple[LoraSite, ...], bound: BoundLora, tiles: Tiles) -> None:
    items, d_in = bound.items, sites[0].d_in
    splits = tiles.splits(d_in)
    is_decode = items.block_rows == DECODE_ROWS
    kernel = shrink_decode if is_decode else shrink_prefill
    kernel[(len(sites) * splits, bound.num_items)](
        x,
        bound.pages,
        bound.part,
        items.a,
        items.row,
        items.num_rows,
        items.rank,
        items.capacity,
        sites[0].index,
        d_in,
        x.stride(0),
        SPLITS=splits,
        BLOCK_K=tiles.block_k,
        ROWS=items.block_rows,
        CHUNK=CHUNK,
        PRECISION="ieee",
        num_warps=tiles.shrink_warps,
        **({"PDL": tiles.pdl, "launch_pdl": tiles.pdl} if is_decode else {"LOOPS": tiles.loops}),
    )


def _expand(y: Tensor, sites: tuple[LoraSite, ...], bound: BoundLora, tiles: Tiles) -> None:
    items = bound.items
    widths = [site.d_out for site in sites] + [0] * (MAX_SITES - len(sites))
    ends = [sum(triton.cdiv(width, tiles.block_n) for width in widths[: i + 1]) for i in range(MAX_SITES)]
    splits = tiles.splits(sites[0].d_in)
    is_decode = items.block_rows == DECODE_ROWS
    kernel = expand_decode if is_decode else expand_prefill
    special = {"SPLITS_PADDED": triton.next_power_of_2(splits), "PDL": tiles.pdl, "launch_pdl": tiles.pdl}
    kernel[(ends[-1], bound.num_items)](
        y,
        bound.part,
        bound.pages,
        items.b,
        items.row,
        items.num_rows,
        items.rank,
        items.chunks,
        items.scale,
        items.capacity,
        sites[0].index,
        y.stride(0),
        ends[0],
        ends[1],
        *widths,
        SPLITS=splits,
        BLOCK_N=tiles.block_n,
        ROWS=items.block_rows,
        CHUNK=CHUNK,
        PRECISION="ieee",
        num_warps=tiles.expand_warps,
        **(special if is_decode else {}),
    )

"""Launching shrink and expand of decoding steps: two launches a fused linear, whatever the mix."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from loraplex.kernels.gpu.expand import expand
from loraplex.kernels.gpu.items import WorkItems
from loraplex.kernels.gpu.shrink import shrink_decode
from loraplex.kernels.types import LoraSite

CHUNK = 16  # ranks a chunk has at most: pool.geometry.MAX_CHUNK_RANK
MAX_SITES = 3  # of one fused linear: q, k and v
DECODE_ROWS, PREFILL_ROWS = 8, 128  # rows of a block: of `WorkItems`, and of `RowBlocks`
GROUPS = 4  # parts of a slice of K that are summed apart, one a warp
RUN = 64  # elements of K a group has next to each other


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of a fused linear's launches. Sums depend on `block_k` and `groups` alone, never on the mix.

    With more than one warp in expand they depend on the size of a block too.
    """

    block_k: int  # slice of K that one program sums
    block_n: int
    groups: int = GROUPS  # parts of a slice that are summed apart, one a warp of shrink
    expand_warps: int = 1
    expand_chunks: int = 1  # whose B is read at once
    shrink_registers: int | None = None  # at most, a thread
    expand_registers: int | None = None
    shrink_pdl: bool = False  # programmatic dependent launch, on what is before in the stream: Hopper and newer
    expand_pdl: bool = False
    pdl_early: bool = True  # the next kernel starts at once, not when this one's programs end

    def splits(self, d_in: int) -> int:
        """Programs that share K."""
        return -(-d_in // self.block_k)


def choose_tiles(d_in: int, width: int = 0, *, pdl: bool = False, several: bool = False) -> Tiles:
    """Tile sizes by d_in and the columns of the fused output; found with bench/bench_lora_kernels.py on an H200.

    `several`: adapters of several chunks of ranks, of which expand then takes two at once. It changes no bit.
    """
    block_k = max(16 * GROUPS, min(1024 if d_in > 8192 else 512, triton.next_power_of_2(d_in)))
    if several:
        return Tiles(block_k, block_n=128, expand_chunks=2, shrink_pdl=pdl, expand_pdl=pdl)
    tiles = Tiles(block_k, block_n=256, shrink_pdl=pdl, expand_pdl=pdl)
    # Fewer registers, more programs at a time: pays for many columns, where the partial sums fit in them.
    return replace(tiles, expand_registers=160) if width > 4096 and tiles.splits(d_in) <= 8 else tiles


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether a device has programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def partial_sums(linears: Iterable[tuple[LoraSite, ...]], capacity: int, block_rows: int) -> int:
    """Elements that `BoundLora.part` needs for fused linears of such sites."""
    per_item = max(len(sites) * choose_tiles(sites[0].d_in).splits(sites[0].d_in) for sites in linears)
    return per_item * capacity * block_rows * CHUNK


@dataclass(frozen=True, slots=True)
class BoundLora:
    """One step's work lists on the device, with room for the partial sums.

    Launches read the tables on the device, so one captured graph serves any mix: `num_programs` programs share a list
    of any length. It is the longest list's length or a little more for speed; no bit of the result depends on it.
    """

    pages: Tensor  # the pool, flat
    items: WorkItems
    part: Tensor  # float32, see `partial_sums`
    block_rows: int  # that the items were planned with: DECODE_ROWS, or 16
    num_programs: int
    several: bool = False  # for speed too: whether adapters have several chunks, as `choose_tiles` asks


def lora_delta(
    delta: Tensor, x: Tensor, sites: tuple[LoraSite, ...], bound: BoundLora, tiles: Tiles | None = None
) -> None:
    """delta[row, site] = scale * (x A^T) B where `bound.items.covered`; the rest is not written.

    x [rows, d_in], delta [rows, width of the fused output], both with contiguous rows. `tiles` overrides the table.
    """
    if not bound.num_programs:
        return
    first = sites[0].index
    assert len(sites) <= MAX_SITES
    assert [site.index for site in sites] == list(range(first, first + len(sites))), "sites of a linear are neighbours"
    assert bound.num_programs <= bound.items.capacity, f"{bound.num_programs} programs, {bound.items.capacity} items"
    width = sum(site.d_out for site in sites)
    chosen = tiles or choose_tiles(sites[0].d_in, width, pdl=has_pdl(delta.device), several=bound.several)
    splits = chosen.splits(sites[0].d_in)
    needed = len(sites) * splits * bound.items.capacity * bound.block_rows * CHUNK
    assert needed <= bound.part.numel(), f"{needed} partial sums in a buffer of {bound.part.numel()}"
    _shrink(x, sites, bound, chosen)
    _expand(delta, sites, bound, chosen)


def _shrink(x: Tensor, sites: tuple[LoraSite, ...], bound: BoundLora, tiles: Tiles) -> None:
    items, d_in = bound.items, sites[0].d_in
    splits = tiles.splits(d_in)
    shrink_decode[(len(sites) * splits, bound.num_programs)](
        x,
        bound.pages,
        bound.part,
        items.table,
        items.table.view(torch.int64),
        items.count,
        items.table.shape[1],
        items.capacity,
        sites[0].index,
        d_in,
        x.stride(0),
        SPLITS=splits,
        BLOCK_K=tiles.block_k,
        GROUPS=tiles.groups,
        RUN=min(RUN, tiles.block_k // tiles.groups),
        ROWS=bound.block_rows,
        CHUNK=CHUNK,
        ALIGN=items.align,
        PRECISION="ieee",
        num_warps=tiles.groups,
        maxnreg=tiles.shrink_registers,
        **_pdl(tiles.shrink_pdl, tiles.expand_pdl and tiles.pdl_early),
    )


def _expand(delta: Tensor, sites: tuple[LoraSite, ...], bound: BoundLora, tiles: Tiles) -> None:
    items, block_n = bound.items, tiles.block_n
    widths = [site.d_out for site in sites] + [0] * (MAX_SITES - len(sites))
    ends = [sum(triton.cdiv(width, block_n) for width in widths[: i + 1]) for i in range(MAX_SITES)]
    splits = tiles.splits(sites[0].d_in)
    expand[(ends[-1], bound.num_programs)](
        delta,
        bound.part,
        bound.pages,
        items.table,
        items.table.view(torch.int64),
        items.table.view(torch.float32),
        items.count,
        items.table.shape[1],
        items.capacity,
        sites[0].index,
        delta.stride(0),
        ends[0],
        ends[1],
        *widths,
        SPLITS=splits,
        SPLITS_PADDED=triton.next_power_of_2(splits),
        BLOCK_N=block_n,
        ROWS=bound.block_rows,
        CHUNK=CHUNK,
        ALIGN=items.align,
        PRECISION="ieee",
        CHUNKS=tiles.expand_chunks,
        num_warps=tiles.expand_warps,
        maxnreg=tiles.expand_registers,
        **_pdl(tiles.expand_pdl, tiles.shrink_pdl and tiles.pdl_early),
    )


def _pdl(waits: bool, signals: bool) -> dict[str, bool]:
    """Launch options: start before the kernel before ends and wait in the program; let the next one start."""
    return {"launch_pdl": waits, "WAITS": waits, "SIGNALS": signals}

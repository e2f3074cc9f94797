"""Launching the kernels of steps of many rows: shrink for a linear, and the operations that expand what they read."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from loraplex.kernels.gpu.blocks import BlockCounts, RowBlocks
from loraplex.kernels.gpu.lora import CHUNK, MAX_SITES, PREFILL_ROWS
from loraplex.kernels.gpu.prefill_kernels import (
    add_expanded,
    rope_and_store_blocks,
    shrink_blocks,
    silu_and_mul_blocks,
    sum_splits,
)
from loraplex.kernels.types import AttentionShape, HeadNorms, LoraDelta, LoraSite, RopeTable

SLICE = 1024  # of K, that one program of shrink sums
_MAX_RANKS = 128  # that one program of shrink takes
_EXPAND_RANKS = 64  # that one product of expand takes


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tile sizes; none changes a bit. Rows are at most those of a block; registers are at most, a thread.

    Warps are at most rows / 16: with more, Triton 3.6 reads beyond its shared memory in narrow products, as
    compute-sanitizer shows for heads of 48.
    """

    shrink_rows: int = 128
    shrink_warps: int = 8
    shrink_k: int = 64  # elements of K at a time
    shrink_stages: int = 3
    add_rows: int = 64
    add_n: int = 128  # columns
    add_warps: int = 4
    add_registers: int | None = None
    silu_rows: int = 128
    silu_n: int = 64
    silu_tiles: int = 4  # of columns, one after the other
    silu_stages: int = 2
    silu_warps: int = 8
    silu_registers: int | None = 128
    rope_rows: int = 64
    rope_heads: int = 2  # that one program rotates
    rope_warps: int = 4
    rope_registers: int | None = None

    def __post_init__(self) -> None:
        for name in ("shrink", "add", "silu", "rope"):
            rows, warps = getattr(self, f"{name}_rows"), getattr(self, f"{name}_warps")
            assert 16 * warps <= rows, f"{name}: {warps} warps for {rows} rows"


TILES = PrefillTiles()  # where an adapter has several chunks of ranks
NARROW_TILES = replace(  # where each has one
    TILES, silu_rows=64, silu_tiles=8, silu_stages=3, silu_warps=4, rope_rows=32, rope_heads=8, rope_warps=2
)


def _tiles_for(delta: LoraDelta, tiles: PrefillTiles | None) -> PrefillTiles:
    bound: BoundPrefill = delta.shrunk
    return tiles or (NARROW_TILES if bound.counts.chunks == 1 else TILES)


def _splits(d_in: int) -> int:
    return -(-d_in // SLICE)


@dataclass(frozen=True, slots=True)
class BoundPrefill:
    """The adapters of one step of many rows, on the device. Its sizes are the host's: such steps are not captured."""

    pages: Tensor  # the pool, flat
    tables: RowBlocks
    counts: BlockCounts
    part: Tensor  # float32, see `room`
    v: Tensor  # of the dtype of `pages`
    block_rows: int = PREFILL_ROWS  # that the blocks were planned with
    adapted: frozenset[int] | None = None  # sites that any of the adapters has; None is all

    def adapts(self, sites: tuple[LoraSite, ...]) -> bool:
        """Whether any row's adapter has one of the sites."""
        return self.counts.places > 0 and (self.adapted is None or any(site.index in self.adapted for site in sites))


def room(linears: Iterable[tuple[LoraSite, ...]], counts: BlockCounts, block_rows: int) -> tuple[int, int]:
    """Elements that `BoundPrefill.part` and `.v` need for fused linears of such sites."""
    sizes = [(len(sites), _splits(sites[0].d_in)) for sites in linears]
    place = counts.places * block_rows * CHUNK
    return max(n * splits for n, splits in sizes) * place, max(n for n, _ in sizes) * place


WARM_CHUNKS = (1, _EXPAND_RANKS // CHUNK, _EXPAND_RANKS // CHUNK + 1)  # of an adapter: each has kernels of its own


def _expand_ranks(bound: BoundPrefill) -> int:
    return CHUNK if bound.counts.chunks == 1 else _EXPAND_RANKS


def shrink(x: Tensor, sites: tuple[LoraSite, ...], bound: BoundPrefill, tiles: PrefillTiles = TILES) -> LoraDelta:
    """v = x A^T of every block and site, valid until the next shrink. x [rows, d_in] with contiguous rows."""
    tables, counts, d_in = bound.tables, bound.counts, sites[0].d_in
    first, splits, rows = sites[0].index, _splits(d_in), bound.block_rows
    assert [site.index for site in sites] == list(range(first, first + len(sites))), "sites of a linear are neighbours"
    part_size, v_size = room([sites], counts, rows)
    assert part_size <= bound.part.numel(), f"{part_size} partial sums in a buffer of {bound.part.numel()}"
    assert v_size <= bound.v.numel(), f"{v_size} elements of v in a buffer of {bound.v.numel()}"
    ranks = min(_MAX_RANKS, triton.next_power_of_2(len(sites) * _expand_ranks(bound)))
    groups = triton.cdiv(len(sites) * counts.chunks * CHUNK, ranks)
    tile = min(rows, tiles.shrink_rows)
    shrink_blocks[(counts.blocks * (rows // tile), splits, groups)](
        x,
        bound.pages,
        bound.part,
        tables.blocks,
        tables.entries,
        tables.entries.view(torch.int64),
        tables.entries.shape[1],
        first,
        counts.places,
        counts.chunks,
        d_in,
        x.stride(0),
        SITES=len(sites),
        ROWS=rows,
        TILE=tile,
        RANKS=ranks,
        CHUNK=CHUNK,
        SLICE=SLICE,
        BLOCK_K=tiles.shrink_k,
        ALIGN=tables.align,
        PRECISION="ieee",
        STAGES=tiles.shrink_stages,
        num_warps=tiles.shrink_warps,
    )
    size = rows * CHUNK
    block = min(size, 512)
    sum_splits[(counts.places * (size // block), len(sites))](
        bound.part, bound.v, counts.places, SPLITS=splits, SIZE=size, BLOCK=block, num_warps=4
    )
    return LoraDelta(bound.v, bound.v[:0], sites, bound)


def _arguments(delta: LoraDelta, tile: int) -> tuple[int, tuple[Tensor | int, ...], dict[str, int | str]]:
    """What every kernel that expands takes for parts of `tile` rows: how many parts, tables, and sizes."""
    bound: BoundPrefill = delta.shrunk
    entries, tile = bound.tables.entries, min(tile, bound.block_rows)
    tables = (
        bound.pages,
        delta.values,
        bound.tables.blocks,
        entries,
        entries.view(torch.int64),
        entries.view(torch.float32),
        entries.shape[1],
        delta.sites[0].index,
        bound.counts.places,
    )
    sizes: dict[str, int | str] = {
        "ROWS": bound.block_rows,
        "TILE": tile,
        "RANKS": _expand_ranks(bound),
        "CHUNK": CHUNK,
        "MORE": bound.counts.chunks * CHUNK > _expand_ranks(bound),
        "ALIGN": bound.tables.align,
        "PRECISION": "ieee",
    }
    return bound.counts.blocks * (bound.block_rows // tile), tables, sizes


def add(y: Tensor, delta: LoraDelta, tiles: PrefillTiles | None = None) -> None:
    """y[row, site] += scale * v B where the row's adapter has the site. y [rows, width of the fused output]."""
    tiles = _tiles_for(delta, tiles)
    parts, tables, sizes = _arguments(delta, tiles.add_rows)
    block_n = tiles.add_n
    widths = [site.d_out for site in delta.sites] + [0] * (MAX_SITES - len(delta.sites))
    ends = [sum(triton.cdiv(width, block_n) for width in widths[: i + 1]) for i in range(MAX_SITES)]
    add_expanded[(ends[-1], parts)](
        y,
        *tables,
        y.stride(0),
        ends[0],
        ends[1],
        *widths,
        **sizes,
        BLOCK_N=block_n,
        num_warps=tiles.add_warps,
        maxnreg=tiles.add_registers,
    )


def silu_and_mul(gate_up: Tensor, delta: LoraDelta, out: Tensor, tiles: PrefillTiles | None = None) -> None:
    """As `Ops.silu_and_mul`, of gate and up plus their scale * v B."""
    tiles = _tiles_for(delta, tiles)
    parts, tables, sizes = _arguments(delta, tiles.silu_rows)
    assert len(delta.sites) == 2
    width, block_n = out.shape[1], tiles.silu_n
    silu_and_mul_blocks[(triton.cdiv(width, block_n * tiles.silu_tiles), parts)](
        gate_up,
        out,
        *tables,
        width,
        **sizes,
        COLS=tiles.silu_tiles,
        BLOCK_N=block_n,
        STAGES=tiles.silu_stages,
        num_warps=tiles.silu_warps,
        maxnreg=tiles.silu_registers,
    )


def rope_and_store(
    qkv: Tensor,
    delta: LoraDelta,
    shape: AttentionShape,
    rope: RopeTable,
    norms: HeadNorms | None,
    keys: Tensor,
    values: Tensor,
    row_page: Tensor,
    row_offset: Tensor,
    row_pos: Tensor,
    tiles: PrefillTiles | None = None,
) -> None:
    """As `glue.rope_and_store`, of q, k and v plus their scale * v B."""
    tiles = _tiles_for(delta, tiles)
    parts, tables, sizes = _arguments(delta, tiles.rope_rows)
    assert len(delta.sites) == 3
    half = shape.head_dim // 2
    groups = triton.cdiv(shape.num_heads, tiles.rope_heads), triton.cdiv(shape.num_kv_heads, tiles.rope_heads)
    rope_and_store_blocks[(groups[0] + 2 * groups[1], parts)](
        qkv,
        keys,
        values,
        row_page,
        row_offset,
        row_pos,
        rope.cosine,
        rope.sine,
        qkv if norms is None else norms.q_weight,
        qkv if norms is None else norms.k_weight,
        0.0 if norms is None else norms.eps,
        *tables,
        groups[0],
        groups[0] + groups[1],
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
        qkv.stride(0),
        keys.stride(0),
        keys.stride(1),
        half,
        HAS_NORM=norms is not None,
        HEADS=tiles.rope_heads,
        HALF=max(16, triton.next_power_of_2(half)),
        **sizes,
        num_warps=tiles.rope_warps,
        maxnreg=tiles.rope_registers,
    )

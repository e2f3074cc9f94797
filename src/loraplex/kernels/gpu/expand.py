"""Expand: y += scale * v B for every block of rows and tile of columns, v being the sum of shrink's partial sums.

B lies transposed, [rank, d_out], so its rows are read in order. Partial sums and chunks are added in a fixed order, y
is rounded once. A program owns one tile of one site's columns and one block of rows.
"""

import triton
import triton.language as tl


@triton.jit
def _locate(tile, tiles0, tiles1, width0, width1, width2, BLOCK_N: tl.constexpr):
    """Site of a tile among the linear's, its columns, where they begin in the fused output, the tile's first column."""
    site = (tile >= tiles0).to(tl.int32) + (tile >= tiles1).to(tl.int32)
    width = tl.where(site == 0, width0, tl.where(site == 1, width1, width2))
    offset = tl.where(site == 0, 0, tl.where(site == 1, width0, width0 + width1))
    col = (tile - tl.where(site == 0, 0, tl.where(site == 1, tiles0, tiles1))) * BLOCK_N
    return site, width, offset, col


@triton.jit
def _add_to(out, acc, factor, mask):
    """out += factor * acc where the mask holds, rounded once."""
    old = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, (old + factor * acc).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _lone_row(
    v_at,
    b,  # [CHUNK, BLOCK_N], the first chunk's tile
    b_tile,  # places of such a tile in a chunk that begins at the pool's start
    next_b,  # offset and rank of the second chunk, and those after it
    next_rank,
    chunks,
    is_col,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """v B of one row, unscaled [BLOCK_N]."""
    ranks = tl.arange(0, CHUNK)
    splits = tl.arange(0, SPLITS_PADDED)
    v_tile = v_at + splits[:, None] * (ROWS * CHUNK) + ranks[None, :]
    is_split = (splits < SPLITS)[:, None]
    v = tl.sum(tl.load(v_tile, mask=is_split, other=0.0), axis=0)
    acc = tl.sum(b.to(tl.float32) * v[:, None], axis=0)
    for chunk in range(1, chunks):
        is_rank = (ranks < tl.load(next_rank + chunk - 1))[:, None] & is_col[None, :]
        b = tl.load(b_tile + tl.load(next_b + chunk - 1), mask=is_rank, other=0.0)
        v = tl.sum(tl.load(v_tile + chunk * (SPLITS * ROWS * CHUNK), mask=is_split, other=0.0), axis=0)
        acc += tl.sum(b.to(tl.float32) * v[:, None], axis=0)
    return acc


@triton.jit
def _sum_splits(v_rows, is_row, SPLITS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """v of one chunk [ROWS, CHUNK], its partial sums added in order."""
    v = tl.zeros((ROWS, CHUNK), tl.float32)
    for split in tl.static_range(SPLITS):
        v += tl.load(v_rows + split * (ROWS * CHUNK), mask=is_row, other=0.0)
    return v


@triton.jit
def _several_rows(
    v_at,
    b,  # [CHUNK, BLOCK_N], the first chunk's tile
    b_tile,  # places of such a tile in a chunk that begins at the pool's start
    next_b,  # offset and rank of the second chunk, and those after it
    next_rank,
    chunks,
    is_row,
    is_col,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """v B of a block of rows, unscaled [ROWS, BLOCK_N]."""
    ranks = tl.arange(0, CHUNK)
    v_rows = v_at + tl.arange(0, ROWS)[:, None] * CHUNK + ranks[None, :]
    v = _sum_splits(v_rows, is_row, SPLITS, ROWS, CHUNK)
    total = tl.dot(v.to(b.dtype), b, input_precision=PRECISION)
    for chunk in range(1, chunks):
        is_rank = (ranks < tl.load(next_rank + chunk - 1))[:, None] & is_col[None, :]
        b = tl.load(b_tile + tl.load(next_b + chunk - 1), mask=is_rank, other=0.0)
        v = _sum_splits(v_rows + chunk * (SPLITS * ROWS * CHUNK), is_row, SPLITS, ROWS, CHUNK)
        total = tl.dot(v.to(b.dtype), b, total, input_precision=PRECISION)
    return total


@triton.jit
def expand_decode(
    y,  # [rows, width of the fused output], row stride stride_y
    part,  # [sites, items, SPLITS, ROWS, CHUNK] float32
    pages,  # the pool, flat
    item_b,  # the lists of WorkItems, [num_sites, capacity]
    item_row,
    item_rows,
    item_rank,
    item_chunks,
    item_scale,
    capacity,
    first_site,
    stride_y,
    tiles0,  # tiles of the first site, and of the first two
    tiles1,
    width0,  # columns of each site; 0 where there is none
    width1,
    width2,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A lone row is multiplied and summed in float32, several go through the matrix units. Bound by reading B.

    With PDL the program starts while shrink still runs and reads its first chunk of B meanwhile.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    site, width, offset, col = _locate(tl.program_id(0), tiles0, tiles1, width0, width1, width2, BLOCK_N)
    first = (first_site + site) * capacity + tl.program_id(1)
    chunks = tl.load(item_chunks + first)
    rank = tl.load(item_rank + first)
    row0 = tl.load(item_row + first)
    num_rows = tl.load(item_rows + first)
    factor = tl.load(item_scale + first)
    ranks = tl.arange(0, CHUNK)
    cols = col + tl.arange(0, BLOCK_N)
    is_col = cols < width
    b_tile = pages + ranks.to(tl.int64)[:, None] * width + cols[None, :]
    is_first = (ranks < tl.where(chunks > 0, rank, 0))[:, None] & is_col[None, :]
    b = tl.load(b_tile + tl.load(item_b + first), mask=is_first, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if chunks > 0:
        v_at = part + (site * capacity + tl.program_id(1)) * (SPLITS * ROWS * CHUNK)
        next_b, next_rank = item_b + first + 1, item_rank + first + 1
        if num_rows == 1:
            acc = _lone_row(v_at, b, b_tile, next_b, next_rank, chunks, is_col, SPLITS, SPLITS_PADDED, ROWS, CHUNK)
            _add_to(y + row0.to(tl.int64) * stride_y + offset + cols, acc, factor, is_col)
        else:
            is_row = (tl.arange(0, ROWS) < num_rows)[:, None]
            total = _several_rows(
                v_at, b, b_tile, next_b, next_rank, chunks, is_row, is_col, SPLITS, ROWS, CHUNK, PRECISION
            )
            rows = (row0 + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            _add_to(y + rows * stride_y + offset + cols[None, :], total, factor, is_row & is_col[None, :])


@triton.jit
def expand_prefill(
    y,
    part,  # [sites, items, SPLITS, ROWS, CHUNK] float32
    pages,
    item_b,
    item_row,
    item_rows,
    item_rank,
    item_chunks,
    item_scale,
    capacity,
    first_site,
    stride_y,
    tiles0,
    tiles1,
    width0,
    width1,
    width2,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Many rows: tiles of rows through the matrix units."""
    site, width, offset, col = _locate(tl.program_id(0), tiles0, tiles1, width0, width1, width2, BLOCK_N)
    first = (first_site + site) * capacity + tl.program_id(1)
    chunks = tl.load(item_chunks + first)
    if chunks > 0:
        rows = tl.arange(0, ROWS)
        ranks = tl.arange(0, CHUNK)
        cols = col + tl.arange(0, BLOCK_N)
        is_row = rows < tl.load(item_rows + first)
        is_col = cols < width
        v_at = part + (site * capacity + tl.program_id(1)) * (SPLITS * ROWS * CHUNK)
        v_tile = v_at + rows[:, None] * CHUNK + ranks[None, :]
        acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for chunk in range(chunks):
            is_rank = ranks < tl.load(item_rank + first + chunk)
            b_rows = pages + tl.load(item_b + first + chunk) + ranks.to(tl.int64)[:, None] * width
            b = tl.load(b_rows + cols[None, :], mask=is_rank[:, None] & is_col[None, :], other=0.0)
            v = tl.zeros((ROWS, CHUNK), tl.float32)
            for split in tl.static_range(SPLITS):
                v += tl.load(v_tile + (chunk * SPLITS + split) * (ROWS * CHUNK))
            acc = tl.dot(v.to(b.dtype), b, acc, input_precision=PRECISION)
        out = y + (tl.load(item_row + first) + rows).to(tl.int64)[:, None] * stride_y + offset + cols[None, :]
        _add_to(out, acc, tl.load(item_scale + first), is_row[:, None] & is_col[None, :])

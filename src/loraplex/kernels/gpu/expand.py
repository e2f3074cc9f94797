"""Expand: delta = scale * v B for every work item, v being the sum of shrink's partial sums.

B lies transposed, [rank, d_out], so its rows are read in order. It is the first operand of the product, v^T the second:
columns of B fill the matrix units whatever the number of rows, and a row's sums are the same beside any others. Partial
sums and chunks are added in a fixed order, delta is rounded once. A program owns one tile of one site's columns and
takes every num_programs-th item of the site's list.
"""

import triton
import triton.language as tl

from loraplex.kernels.gpu.shrink import read_item


@triton.jit
def locate(tile, tiles0, tiles1, width0, width1, width2, block_n):
    """Site of a tile among the linear's, its columns, where they begin in the fused output, the tile's first column."""
    site = (tile >= tiles0).to(tl.int32) + (tile >= tiles1).to(tl.int32)
    width = tl.where(site == 0, width0, tl.where(site == 1, width1, width2))
    offset = tl.where(site == 0, 0, tl.where(site == 1, width0, width0 + width1))
    col = (tile - tl.where(site == 0, 0, tl.where(site == 1, tiles0, tiles1))) * block_n
    return site, width, offset, col


@triton.jit
def _read_b(b_item, rank, cols, width, CHUNK: tl.constexpr):
    """A tile of B [CHUNK, BLOCK_N], zeros beyond the rank and the site's columns."""
    ranks = tl.arange(0, CHUNK)
    places = b_item + ranks.to(tl.int64)[:, None] * width + cols[None, :]
    return tl.load(places, mask=(ranks < rank)[:, None] & (cols < width)[None, :], other=0.0)


@triton.jit
def _read_v(
    part, index, num_rows, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """v^T of an item [CHUNK, ROWS], zeros beyond its rows. A thread holds all partial sums that it adds, in order."""
    splits = tl.arange(0, SPLITS_PADDED)[:, None]
    elems = tl.arange(0, ROWS * CHUNK)[None, :]
    places = part + index.to(tl.int64) * (SPLITS * ROWS * CHUNK) + splits * (ROWS * CHUNK) + elems
    v = tl.load(places, mask=(splits < SPLITS) & (elems // CHUNK < num_rows), other=0.0)
    return tl.trans(tl.reshape(tl.sum(v, axis=0), (ROWS, CHUNK)))


@triton.jit
def _store_delta(delta, value, row0, num_rows, cols, width, stride_delta):
    """value [BLOCK_N, rows] to delta[row0 + row, cols], rounded once."""
    rows = tl.arange(0, value.shape[1])
    places = delta + (row0 + rows).to(tl.int64)[None, :] * stride_delta + cols[:, None]
    mask = (rows < num_rows)[None, :] & (cols < width)[:, None]
    tl.store(places, value.to(delta.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_sites", "capacity", "first_site", "tiles0", "tiles1"])
def expand(
    delta,  # [rows, width of the fused output], row stride stride_delta
    part,  # [sites, items, SPLITS, ROWS, CHUNK] float32
    pages,  # the pool, flat
    table,  # WorkItems.table, as int32, int64 and float32
    table64,
    table_float,
    count,
    num_sites,
    capacity,
    first_site,
    stride_delta,
    tiles0,  # tiles of the first site, and of the first two
    tiles1,
    width0,  # columns of each site; 0 where there is none
    width1,
    width2,
    CHUNKS: tl.constexpr,  # 1 or 2: whose B is read at once
    SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr, WAITS: tl.constexpr, SIGNALS: tl.constexpr,
):  # fmt: skip
    """With WAITS the program starts while shrink still runs and reads its first B meanwhile."""
    if SIGNALS:
        tl.extra.cuda.gdc_launch_dependents()
    site, width, offset, col = locate(tl.program_id(0), tiles0, tiles1, width0, width1, width2, BLOCK_N)
    cols = col + tl.arange(0, BLOCK_N)
    item = tl.program_id(1)
    at = item * num_sites + first_site + site
    row0, packed, b_at = read_item(table, table64, at, True, 1, ALIGN)  # whether or not the list is as long
    scale = tl.load(table_float + at * 8 + 6)
    length = tl.load(count + first_site + site)
    # The entry is tested with the length, so that both are read at once: its words are never negative.
    while (item < length) & (packed >= 0) & (b_at >= 0):
        num_rows, rank, chunks = packed & 0xFF, (packed >> 8) & 0xFF, packed >> 16
        total = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for chunk in tl.range(0, chunks, CHUNKS, num_stages=1):
            b = _read_b(pages + b_at, rank, cols, width, CHUNK)
            if CHUNKS == 2:
                _, packed, b_at = read_item(table, table64, at + (chunk + 1) * num_sites, chunk + 1 < chunks, 1, ALIGN)
                second = _read_b(pages + b_at, (packed >> 8) & 0xFF, cols, width, CHUNK)
            if WAITS:
                tl.extra.cuda.gdc_wait()
            v = _read_v(part, site * capacity + item + chunk, num_rows, SPLITS, SPLITS_PADDED, ROWS, CHUNK)
            total = tl.dot(tl.trans(b), v.to(b.dtype), total, input_precision=PRECISION)
            if CHUNKS == 2:
                rows = tl.where(chunk + 1 < chunks, num_rows, 0)
                v = _read_v(part, site * capacity + item + chunk + 1, rows, SPLITS, SPLITS_PADDED, ROWS, CHUNK)
                total = tl.dot(tl.trans(second), v.to(b.dtype), total, input_precision=PRECISION)
            left = chunk + CHUNKS
            _, packed, b_at = read_item(table, table64, at + left * num_sites, left < chunks, 1, ALIGN)
            rank = (packed >> 8) & 0xFF
        if chunks > 0:
            _store_delta(delta + offset, total * scale, row0, num_rows, cols, width, stride_delta)
        item += tl.num_programs(1)
        at = item * num_sites + first_site + site
        row0, packed, b_at = read_item(table, table64, at, item < length, 1, ALIGN)
        scale = tl.load(table_float + at * 8 + 6, mask=item < length, other=0.0)
    if WAITS:
        tl.extra.cuda.gdc_wait()

"""Shrink: v = x A^T for every work item, as split-K partial sums.

A program owns one site, one slice of K and one item. Partial sums are written, never added to: no zero fill, no
atomics, and the order of every sum depends on shapes only. BGMV and SGMV of Punica (arXiv 2310.18547, section 4) over
paged chunks.
"""

import triton
import triton.language as tl


@triton.jit
def shrink_decode(
    x,  # [rows, d_in], row stride stride_x
    pages,  # the pool, flat
    part,  # [sites, items, SPLITS, ROWS, CHUNK] float32
    item_a,  # the lists of WorkItems, [num_sites, capacity]
    item_row,
    item_rows,
    item_rank,
    capacity,
    first_site,
    d_in,
    stride_x,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One slice of K a program. A lone row is multiplied and summed in float32, several go through the matrix units.

    With PDL (programmatic dependent launch) the program starts while the kernel before it still runs and reads A
    meanwhile. x and part it touches after the wait, which every program passes, so that completion stays transitive.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    site = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    at = (first_site + site) * capacity + tl.program_id(1)
    rank = tl.load(item_rank + at)
    row0 = tl.load(item_row + at)
    num_rows = tl.load(item_rows + at)
    ranks = tl.arange(0, CHUNK)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    is_k = k < d_in
    a_tile = pages + tl.load(item_a + at) + ranks.to(tl.int64)[:, None] * d_in + k[None, :]
    a = tl.load(a_tile, mask=(ranks < rank)[:, None] & is_k[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if rank > 0:
        out = part + ((site * capacity + tl.program_id(1)) * SPLITS + split) * (ROWS * CHUNK)
        if num_rows == 1:
            lone = tl.load(x + row0.to(tl.int64) * stride_x + k, mask=is_k, other=0.0).to(tl.float32)
            tl.store(out + ranks, tl.sum(a.to(tl.float32) * lone[None, :], axis=1))
        else:
            rows = tl.arange(0, ROWS)
            is_row = rows < num_rows
            x_tile = x + (row0 + rows).to(tl.int64)[None, :] * stride_x + k[:, None]
            tile = tl.load(x_tile, mask=is_row[None, :] & is_k[:, None], other=0.0)
            v = tl.dot(a, tile, input_precision=PRECISION)
            tl.store(out + rows[None, :] * CHUNK + ranks[:, None], v, mask=is_row[None, :])


@triton.jit
def shrink_prefill(
    x,
    pages,
    part,  # [sites, items, SPLITS, ROWS, CHUNK] float32
    item_a,
    item_row,
    item_rows,
    item_rank,
    capacity,
    first_site,
    d_in,
    stride_x,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOOPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Many rows: tiles of rows through the matrix units."""
    site = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    at = (first_site + site) * capacity + tl.program_id(1)
    rank = tl.load(item_rank + at)
    if rank > 0:
        rows = tl.arange(0, ROWS)
        ranks = tl.arange(0, CHUNK)
        is_row = rows < tl.load(item_rows + at)
        a_rows = pages + tl.load(item_a + at) + ranks.to(tl.int64)[:, None] * d_in
        x_rows = x + (tl.load(item_row + at) + rows).to(tl.int64)[None, :] * stride_x
        acc = tl.zeros((CHUNK, ROWS), tl.float32)
        for loop in range(LOOPS):
            k = (split * LOOPS + loop) * BLOCK_K + tl.arange(0, BLOCK_K)
            is_k = k < d_in
            a = tl.load(a_rows + k[None, :], mask=(ranks < rank)[:, None] & is_k[None, :], other=0.0)
            xs = tl.load(x_rows + k[:, None], mask=is_row[None, :] & is_k[:, None], other=0.0)
            acc = tl.dot(a, xs, acc, input_precision=PRECISION)
        out = part + ((site * capacity + tl.program_id(1)) * SPLITS + split) * (ROWS * CHUNK)
        tl.store(out + rows[None, :] * CHUNK + ranks[:, None], acc)

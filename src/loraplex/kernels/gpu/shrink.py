"""Shrink: v = x A^T for every work item, as split-K partial sums.

A program owns one site and one slice of K, and takes every num_programs-th item of the site's list. A slice is cut into
runs of RUN elements dealt to GROUPS groups, one a warp; a group sums its runs in order through the matrix units, then
the groups are summed. Partial sums are written, never added to: no zero fill, no atomics, and the order of every sum
depends on d_in only. BGMV and SGMV of Punica (arXiv 2310.18547, section 4) over paged chunks.
"""

import triton
import triton.language as tl


@triton.jit
def read_item(table, table64, at, exists, WORD64: tl.constexpr, ALIGN: tl.constexpr):
    """Entry `at`: first row, packed word (rows, rank << 8, chunks << 16), offset in the pool (A: WORD64 0, B: 1)."""
    row0 = tl.load(table + at * 8 + 4, mask=exists, other=0)
    packed = tl.load(table + at * 8 + 5, mask=exists, other=0)
    offset = tl.load(table64 + at * 4 + WORD64, mask=exists, other=0)
    # Written so that the compiler knows the alignment also inside loops.
    return row0, packed, offset // ALIGN * ALIGN


@triton.jit
def _slice_of_k(split, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr):
    """Elements of K in a slice [GROUPS, BLOCK_K / GROUPS], runs dealt to the groups in turn."""
    j = tl.arange(0, BLOCK_K // GROUPS)
    return (j // RUN * (GROUPS * RUN) + j % RUN)[None, :] + tl.arange(0, GROUPS)[:, None] * RUN + split * BLOCK_K


@triton.jit
def _read_a(a_item, rank, k, is_k, d_in, CHUNK: tl.constexpr):
    """A at elements k [groups, elements] of K: [groups, CHUNK, elements], zeros beyond the rank and K."""
    ranks = tl.arange(0, CHUNK)
    places = a_item + ranks.to(tl.int64)[None, :, None] * d_in + k[:, None, :]
    return tl.load(places, mask=(ranks < rank)[None, :, None] & is_k[:, None, :], other=0.0)


@triton.jit
def _read_x(x, row0, num_rows, k, is_k, stride_x, ROWS: tl.constexpr):
    """x of an item's rows at elements k [groups, elements]: [groups, elements, ROWS], zeros beyond its rows and K."""
    rows = tl.arange(0, ROWS)
    places = x + (row0 + rows).to(tl.int64)[None, None, :] * stride_x + k[:, :, None]
    return tl.load(places, mask=(rows < num_rows)[None, None, :] & is_k[:, :, None], other=0.0)


@triton.jit
def _store_partial(part, index, v, num_rows, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Groups' sums v [groups, CHUNK, ROWS], added up, to the partial sums' place `index`."""
    rows = tl.arange(0, ROWS)[None, :]
    out = part + index.to(tl.int64) * (ROWS * CHUNK) + rows * CHUNK + tl.arange(0, CHUNK)[:, None]
    tl.store(out, tl.sum(v, axis=0), mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_sites", "capacity", "first_site"])
def shrink_decode(
    x,  # [rows, d_in], row stride stride_x
    pages,  # the pool, flat
    part,  # [sites, items, SPLITS, ROWS, CHUNK] float32
    table,  # WorkItems.table, as int32 and as int64
    table64,
    count,
    num_sites,
    capacity,
    first_site,
    d_in,
    stride_x,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # the slice
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    WAITS: tl.constexpr,
    SIGNALS: tl.constexpr,
):
    """A whole slice at once, so that all its bytes are under way together.

    WAITS, SIGNALS: programmatic dependent launch. The program starts while the kernel before it still runs and reads
    its first A meanwhile; x and part it touches after the wait, which every program passes.
    """
    if SIGNALS:
        tl.extra.cuda.gdc_launch_dependents()
    site = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    item = tl.program_id(1)
    at = item * num_sites + first_site + site
    row0, packed, offset = read_item(table, table64, at, True, 0, ALIGN)  # whether or not the list is as long
    length = tl.load(count + first_site + site)
    k = _slice_of_k(split, BLOCK_K, GROUPS, RUN)
    is_k = k < d_in
    # The entry is tested with the length, so that both are read at once: its words are never negative.
    while (item < length) & (packed >= 0) & (offset >= 0):
        num_rows, rank = packed & 0xFF, (packed >> 8) & 0xFF
        a = _read_a(pages + offset, rank, k, is_k, d_in, CHUNK)
        if WAITS:
            tl.extra.cuda.gdc_wait()
        if rank > 0:
            v = tl.dot(a, _read_x(x, row0, num_rows, k, is_k, stride_x, ROWS), input_precision=PRECISION)
            _store_partial(part, (site * capacity + item) * SPLITS + split, v, num_rows, ROWS, CHUNK)
        item += tl.num_programs(1)
        row0, packed, offset = read_item(table, table64, item * num_sites + first_site + site, item < length, 0, ALIGN)
    if WAITS:
        tl.extra.cuda.gdc_wait()

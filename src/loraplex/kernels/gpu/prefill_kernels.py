"""Adapters in steps of many rows, over `RowBlocks`: v = x A^T once for a linear, and v B where its output is read.

Shrink reads x once for all sites of a linear and up to RANKS ranks, whose rows of A are gathered by pointer. Partial
sums over K are stored and then added in order, so v depends on the row and d_in only. What expand would write and the
next operation would read again, that operation computes for its tile, from v and a tile of B, on the matrix units. The
sum is rounded once, where the reference (`kernels/reference.py`) rounds it; rows without an adapter keep the base's bits.
"""

import triton
import triton.language as tl

from loraplex.kernels.gpu.expand import locate
from loraplex.kernels.gpu.glue import normed


@triton.jit
def _read_block(blocks, block):
    """First row, number of rows, first entry, number of entries and first place in v."""
    at = blocks + block * 8
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _read_entries(entries, entries64, at, has, WORD64: tl.constexpr, ALIGN: tl.constexpr):
    """Ranks of entries `at`, 0 where not `has`, and offsets in the pool (A: WORD64 0, B: 1)."""
    packed = tl.load(entries + at * 8 + 5, mask=has, other=0)
    offset = tl.load(entries64 + at * 4 + WORD64, mask=has, other=0)
    return (packed >> 8) & 0xFF, offset // ALIGN * ALIGN


@triton.jit(do_not_specialize=["num_sites", "first_site", "num_places", "chunks"])
def shrink_blocks(
    x,  # [rows, d_in], row stride stride_x
    pages,  # the pool, flat
    part,  # [splits, SITES, num_places, ROWS, CHUNK] float32
    blocks,  # RowBlocks.blocks
    entries,  # RowBlocks.entries, as int32 and as int64
    entries64,
    num_sites,
    first_site,
    num_places,
    chunks,  # that a block has at most
    d_in,
    stride_x,
    SITES: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (blocks, splits, groups): a group is RANKS / CHUNK of the SITES * chunks chunks, site after site."""
    row0, num_rows, first, count, place = _read_block(blocks, tl.program_id(0))
    split = tl.program_id(1)
    ranks = tl.arange(0, RANKS)
    number = tl.program_id(2) * (RANKS // CHUNK) + ranks // CHUNK
    site, chunk = number // chunks, number % chunks
    has = (site < SITES) & (chunk < count)
    at = (first + chunk) * num_sites + first_site + site
    rank, offset = _read_entries(entries, entries64, at, has, 0, ALIGN)
    if tl.max(rank, axis=0) > 0:
        is_rank = ranks % CHUNK < rank
        a_rows = pages + (offset + (ranks % CHUNK).to(tl.int64) * d_in)
        rows = tl.arange(0, ROWS)
        is_row = rows < num_rows
        x_rows = x + (row0 + rows).to(tl.int64) * stride_x
        v = tl.zeros((ROWS, RANKS), tl.float32)
        for start in tl.range(split * SLICE, tl.minimum(split * SLICE + SLICE, d_in), BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            is_k = k < d_in
            xs = tl.load(x_rows[:, None] + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
            a = tl.load(a_rows[:, None] + k[None, :], mask=is_rank[:, None] & is_k[None, :], other=0.0)
            v = tl.dot(xs, tl.trans(a), v, input_precision=PRECISION)
        piece = (split * SITES + site).to(tl.int64) * num_places + place + chunk
        out = part + (piece[None, :] * ROWS + rows[:, None]) * CHUNK + (ranks % CHUNK)[None, :]
        tl.store(out, v, mask=is_row[:, None] & has[None, :])


@triton.jit(do_not_specialize=["num_places"])
def sum_splits(
    part,  # [SPLITS, sites, num_places, SIZE] float32
    v,  # [sites, num_places, SIZE], rounded to its dtype
    num_places,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_places * SIZE / BLOCK, sites). Splits are added in order; what no row or rank wrote stays undefined."""
    site = tl.program_id(1).to(tl.int64)
    at = site * num_places * SIZE + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stride = num_places.to(tl.int64) * tl.num_programs(1) * SIZE
    total = tl.load(part + at)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part + split * stride + at)
    tl.store(v + at, total.to(v.dtype.element_ty))


@triton.jit
def _expand(
    pages,
    v,  # of the linear's site: [num_places, ROWS, CHUNK]
    entries,
    entries64,
    entries_float,
    num_sites,
    site,  # among all of the model
    first,
    count,
    place,
    num_rows,
    cols,  # of the site [BLOCK_N]
    is_col,
    width,  # columns of the site
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """scale * v B of a block [ROWS, BLOCK_N] float32; -0, which changes no number, where no adapter has the site."""
    own = first * num_sites + site
    rows = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    highest = count * 0
    for start in tl.range(0, count * CHUNK, RANKS, num_stages=1):
        ranks = start + tl.arange(0, RANKS)
        chunk, within = ranks // CHUNK, ranks % CHUNK
        rank, offset = _read_entries(entries, entries64, own + chunk * num_sites, chunk < count, 1, ALIGN)
        is_rank = within < rank
        b_rows = pages + (offset + within.to(tl.int64) * width)
        b = tl.load(b_rows[:, None] + cols[None, :], mask=is_rank[:, None] & is_col[None, :], other=0.0)
        v_ranks = v + ((place + chunk).to(tl.int64) * (ROWS * CHUNK) + within)
        left_mask = (rows < num_rows)[:, None] & is_rank[None, :]
        left = tl.load(v_ranks[None, :] + (rows * CHUNK)[:, None], mask=left_mask, other=0.0)
        total = tl.dot(left, b, total, input_precision=PRECISION)
        highest = tl.maximum(highest, tl.max(rank, axis=0))
    scale = tl.load(entries_float + own * 8 + 6, mask=count > 0, other=0.0)
    return tl.where(highest > 0, total * scale, -0.0)


@triton.jit
def _with_delta(value, delta):
    """value + delta, rounded to the dtype of `value`; float32."""
    return (value.to(tl.float32) + delta).to(value.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_sites", "first_site", "num_places", "tiles0", "tiles1"])
def add_expanded(
    y,  # [rows, width of the fused output], row stride stride_y
    pages,
    v,  # [sites, num_places, ROWS, CHUNK]
    blocks,
    entries,
    entries64,
    entries_float,
    num_sites,
    first_site,
    num_places,
    stride_y,
    tiles0,  # tiles of the first site, and of the first two
    tiles1,
    width0,  # columns of each site; 0 where there is none
    width1,
    width2,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y += scale * v B, in place. Grid (tiles of columns, blocks)."""
    row0, num_rows, first, count, place = _read_block(blocks, tl.program_id(1))
    if count > 0:
        site, width, out0, col = locate(tl.program_id(0), tiles0, tiles1, width0, width1, width2, BLOCK_N)
        cols = col + tl.arange(0, BLOCK_N)
        rows = tl.arange(0, ROWS)
        own = y + (row0 + rows).to(tl.int64)[:, None] * stride_y + (out0 + cols)[None, :]
        mask = (rows < num_rows)[:, None] & (cols < width)[None, :]
        value = tl.load(own, mask=mask, other=0.0)
        v_site = v + (site * num_places).to(tl.int64) * (ROWS * CHUNK)
        tables = pages, v_site, entries, entries64, entries_float, num_sites, first_site + site
        delta = _expand(
            *tables, first, count, place, num_rows, cols, cols < width, width,
            ROWS, RANKS, CHUNK, BLOCK_N, ALIGN, PRECISION,
        )  # fmt: skip
        tl.store(own, _with_delta(value, delta).to(value.dtype), mask=mask)


@triton.jit(do_not_specialize=["num_sites", "first_site", "num_places"])
def silu_and_mul_blocks(
    gate_up,  # [rows, 2 * width], contiguous
    out,  # [rows, width], contiguous
    pages,
    v,  # [2 sites, num_places, ROWS, CHUNK]: of gate and up
    blocks,
    entries,
    entries64,
    entries_float,
    num_sites,
    first_site,
    num_places,
    width,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles of columns, blocks)."""
    row0, num_rows, first, count, place = _read_block(blocks, tl.program_id(1))
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col = cols < width
    rows = tl.arange(0, ROWS)
    row = (row0 + rows).to(tl.int64)[:, None]
    own = gate_up + row * (2 * width) + cols[None, :]
    mask = (rows < num_rows)[:, None] & is_col[None, :]
    gate, up = tl.load(own, mask=mask, other=0.0), tl.load(own + width, mask=mask, other=0.0)
    v_up = v + num_places.to(tl.int64) * (ROWS * CHUNK)
    tables = entries, entries64, entries_float, num_sites
    block = first, count, place, num_rows, cols, is_col, width, ROWS, RANKS, CHUNK, BLOCK_N, ALIGN, PRECISION
    g = _with_delta(gate, _expand(pages, v, *tables, first_site, *block))
    u = _with_delta(up, _expand(pages, v_up, *tables, first_site + 1, *block))
    result = g * tl.sigmoid(g) * u
    tl.store(out + row * width + cols[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_sites", "first_site", "num_places"])
def rope_and_store_blocks(
    qkv,  # [rows, heads * 2 * half], row stride stride_qkv
    keys,  # a layer's keys: page stride stride_page, token stride stride_token
    values,  # a layer's values, likewise
    row_page,  # [rows] int32; -1 stores nothing
    row_offset,  # [rows] int32
    row_pos,  # [rows] int32
    cosine,  # [positions, half] float32
    sine,
    q_weight,  # [2 * half]
    k_weight,
    eps,
    pages,
    v,  # [3 sites, num_places, ROWS, CHUNK]: of q, k and v
    blocks,
    entries,
    entries64,
    entries_float,
    num_sites,
    first_site,
    num_places,
    num_heads,
    num_kv_heads,
    stride_qkv,
    stride_page,
    stride_token,
    half,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (groups of HEADS heads, blocks)."""
    row0, num_rows, first, count, place = _read_block(blocks, tl.program_id(1))
    rows, dims = tl.arange(0, ROWS), tl.arange(0, HALF)
    is_row, is_dim = rows < num_rows, dims < half
    mask = is_row[:, None] & is_dim[None, :]
    row = (row0 + rows).to(tl.int64)
    position = tl.load(row_pos + row, mask=is_row, other=0).to(tl.int64)[:, None] * half + dims[None, :]
    c, s = tl.load(cosine + position, mask=mask, other=0.0), tl.load(sine + position, mask=mask, other=0.0)
    page = tl.load(row_page + row, mask=is_row, other=-1).to(tl.int64)
    cell = page * stride_page + tl.load(row_offset + row, mask=is_row, other=0) * stride_token
    stored = mask & (page >= 0)[:, None]
    first_head = tl.program_id(0) * HEADS
    for head in tl.range(first_head, tl.minimum(first_head + HEADS, num_heads + 2 * num_kv_heads), num_stages=1):
        site = (head >= num_heads).to(tl.int32) + (head >= num_heads + num_kv_heads).to(tl.int32)
        within = head - tl.where(site == 0, 0, num_heads) - tl.where(site == 2, num_kv_heads, 0)
        width = tl.where(site == 0, num_heads, num_kv_heads) * (2 * half)
        own = qkv + row[:, None] * stride_qkv + (head * (2 * half) + dims)[None, :]
        a, b = tl.load(own, mask=mask, other=0.0), tl.load(own + half, mask=mask, other=0.0)
        v_site = v + (site * num_places).to(tl.int64) * (ROWS * CHUNK)
        tables = pages, v_site, entries, entries64, entries_float, num_sites, first_site + site
        block = first, count, place, num_rows
        cols = within * (2 * half) + dims
        sizes = is_dim, width, ROWS, RANKS, CHUNK, HALF, ALIGN, PRECISION
        wide_a = _with_delta(a, _expand(*tables, *block, cols, *sizes))
        wide_b = _with_delta(b, _expand(*tables, *block, cols + half, *sizes))
        x, y = wide_a, wide_b
        if HAS_NORM:
            weights = tl.where(site == 0, q_weight, k_weight) + dims
            w0, w1 = tl.load(weights, mask=is_dim, other=0.0), tl.load(weights + half, mask=is_dim, other=0.0)
            x, y = normed(wide_a, wide_b, w0[None, :].to(tl.float32), w1[None, :].to(tl.float32), 2 * half, eps)
        turned, turned_too = x * c - y * s, y * c + x * s
        if site == 0:
            tl.store(own, turned.to(a.dtype), mask=mask)
            tl.store(own + half, turned_too.to(a.dtype), mask=mask)
        else:
            at = tl.where(site == 1, keys, values) + cell[:, None] + cols[None, :]
            tl.store(at, tl.where(site == 1, turned, wide_a).to(a.dtype), mask=stored)
            tl.store(at + half, tl.where(site == 1, turned_too, wide_b).to(a.dtype), mask=stored)

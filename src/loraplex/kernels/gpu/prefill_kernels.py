"""Adapters in steps of many rows, over `RowBlocks`: v = x A^T once for a linear, and v B where its output is read.

Shrink reads x once for all sites of a linear and up to RANKS ranks, whose rows of A are gathered by pointer. Partial
sums over K are stored and then added in order, so v depends on the row and d_in only. What expand would write and the
next operation would read again, that operation computes for its tile, from v and a tile of B, on the matrix units; a
norm, which needs whole rows, finds it added in place. The sum is rounded once, where the reference rounds it
(`kernels/reference.py`); rows without an adapter keep the base's bits. What a row gets does not depend on the rows
beside it, but is not to the bit what decoding gives it: K is cut into other slices, and other instructions multiply.
"""

import triton
import triton.language as tl

from loraplex.kernels.gpu.expand import locate
from loraplex.kernels.gpu.glue import normed


@triton.jit
def _read_part(blocks, program, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Which TILE rows of a block of up to ROWS a program has: the first one's place in the block and in the step, how
    many there are, and the block's first entry, number of entries (0 where there are no rows) and first place in v."""
    at = blocks + program // (ROWS // TILE) * 8
    skipped = program % (ROWS // TILE) * TILE
    num_rows = tl.load(at + 1) - skipped
    count = tl.where(num_rows > 0, tl.load(at + 3), 0)
    return skipped, tl.load(at) + skipped, num_rows, tl.load(at + 2), count, tl.load(at + 4)


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
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (parts, splits, groups): a group is RANKS / CHUNK of the SITES * chunks chunks, site after site."""
    skipped, row0, num_rows, first, count, place = _read_part(blocks, tl.program_id(0), ROWS, TILE)
    split = tl.program_id(1)
    ranks = tl.arange(0, RANKS)
    number = tl.program_id(2) * (RANKS // CHUNK) + ranks // CHUNK
    site, chunk = number // chunks, number % chunks
    has = (site < SITES) & (chunk < count)
    at = (first + chunk) * num_sites + first_site + site
    rank, offset = _read_entries(entries, entries64, at, has, 0, ALIGN)
    if count > 0:
        is_rank = ranks % CHUNK < rank
        a_rows = pages + (offset + (ranks % CHUNK).to(tl.int64) * d_in)
        rows = tl.arange(0, TILE)
        is_row = rows < num_rows
        x_rows = x + (row0 + rows).to(tl.int64) * stride_x
        v = tl.zeros((TILE, RANKS), tl.float32)
        for start in tl.range(split * SLICE, tl.minimum(split * SLICE + SLICE, d_in), BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            is_k = k < d_in
            xs = tl.load(x_rows[:, None] + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
            a = tl.load(a_rows[:, None] + k[None, :], mask=is_rank[:, None] & is_k[None, :], other=0.0)
            v = tl.dot(xs, tl.trans(a), v, input_precision=PRECISION)
        piece = (split * SITES + site).to(tl.int64) * num_places + place + chunk
        out = part + (piece[None, :] * ROWS + (skipped + rows)[:, None]) * CHUNK + (ranks % CHUNK)[None, :]
        tl.store(out, v, mask=is_row[:, None] & has[None, :])


@triton.jit(do_not_specialize=["num_places"])
def sum_splits(
    part,  # [SPLITS, sites, num_places, SIZE] float32
    v,  # [sites, num_places, SIZE], rounded to its dtype
    num_places,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # divides SIZE
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
def _entry(entries, entries_float, own, count):
    """What a block's products are multiplied by at a site, from its first entry: the scale; -1 where no adapter has the
    site, as the products are 0 there and -0 changes no number."""
    chunks_here = tl.load(entries + own * 8 + 5, mask=count > 0, other=0) >> 16
    scale = tl.load(entries_float + own * 8 + 6, mask=count > 0, other=0.0)
    return tl.where(chunks_here > 0, scale, -1.0)


@triton.jit
def _operands(
    pages,
    v,  # of the part's first row at the site, in [chunks, ROWS, CHUNK]
    entries,
    entries64,
    num_sites,
    own,  # the block's first entry at the site
    count,
    width,  # columns of the site
    start,  # the first rank
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """RANKS ranks of a block at a site: v [TILE, RANKS], where their rows of B begin, and which ranks there are."""
    ranks = start + tl.arange(0, RANKS)
    chunk, within = ranks // CHUNK, ranks % CHUNK
    rank, offset = _read_entries(entries, entries64, own + chunk * num_sites, chunk < count, 1, ALIGN)
    v_at = v + (chunk * (ROWS * CHUNK) + within)[None, :] + (tl.arange(0, TILE) * CHUNK)[:, None]
    # Rows beyond the block's are never stored; ranks beyond a chunk's are zeros.
    left = tl.load(v_at, mask=(chunk < count)[None, :], other=0.0)
    return left, pages + (offset + within.to(tl.int64) * width), within < rank


@triton.jit
def _times_b(total, left, b_rows, is_rank, cols, is_col, PRECISION: tl.constexpr):
    """total + v B at columns `cols` of the site [BLOCK_N]."""
    b = tl.load(b_rows[:, None] + cols[None, :], mask=is_rank[:, None] & is_col[None, :], other=0.0)
    return tl.dot(left, b, total, input_precision=PRECISION)


@triton.jit
def _times_more_b(
    total,
    pages,
    v,
    entries,
    entries64,
    num_sites,
    own,
    count,
    cols,
    is_col,
    width,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total + v B of the ranks behind the first RANKS. Arguments: `_operands`, `_times_b`."""
    for start in tl.range(RANKS, count * CHUNK, RANKS, num_stages=1):
        left, b_rows, is_rank = _operands(
            pages, v, entries, entries64, num_sites, own, count, width, start, ROWS, TILE, RANKS, CHUNK, ALIGN
        )
        total = _times_b(total, left, b_rows, is_rank, cols, is_col, PRECISION)
    return total


@triton.jit
def _v_of(v, site, num_places, place, skipped, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """v of a part's first row at the linear's site `site`."""
    return v + (site * num_places + place).to(tl.int64) * (ROWS * CHUNK) + skipped * CHUNK


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
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y += scale * v B, in place. Grid (tiles of columns, parts)."""
    skipped, row0, num_rows, first, count, place = _read_part(blocks, tl.program_id(1), ROWS, TILE)
    if count > 0:
        site, width, out0, col = locate(tl.program_id(0), tiles0, tiles1, width0, width1, width2, BLOCK_N)
        cols = col + tl.arange(0, BLOCK_N)
        rows = tl.arange(0, TILE)
        own = y + (row0 + rows).to(tl.int64)[:, None] * stride_y + (out0 + cols)[None, :]
        mask = (rows < num_rows)[:, None] & (cols < width)[None, :]
        value = tl.load(own, mask=mask, other=0.0)
        v_block, entry = _v_of(v, site, num_places, place, skipped, ROWS, CHUNK), first * num_sites + first_site + site
        left, b_rows, is_rank = _operands(
            pages, v_block, entries, entries64, num_sites, entry, count, width, 0, ROWS, TILE, RANKS, CHUNK, ALIGN
        )
        total = _times_b(tl.zeros((TILE, BLOCK_N), tl.float32), left, b_rows, is_rank, cols, cols < width, PRECISION)
        if MORE:
            total = _times_more_b(
                total, pages, v_block, entries, entries64, num_sites, entry, count, cols, cols < width, width,
                ROWS, TILE, RANKS, CHUNK, ALIGN, PRECISION
            )  # fmt: skip
        delta = total * _entry(entries, entries_float, entry, count)
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
    ROWS: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr, MORE: tl.constexpr,
    COLS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (groups of COLS tiles of columns, parts). v of a part is read once, unless there are MORE ranks."""
    skipped, row0, num_rows, first, count, place = _read_part(blocks, tl.program_id(1), ROWS, TILE)
    rows = tl.arange(0, TILE)
    is_row = rows < num_rows
    row = (row0 + rows).to(tl.int64)[:, None]
    v_gate = _v_of(v, 0, num_places, place, skipped, ROWS, CHUNK)
    v_up = _v_of(v, 1, num_places, place, skipped, ROWS, CHUNK)
    entry = first * num_sites + first_site
    left_gate, b_gate, has_gate = _operands(
        pages, v_gate, entries, entries64, num_sites, entry, count, width, 0, ROWS, TILE, RANKS, CHUNK, ALIGN
    )
    left_up, b_up, has_up = _operands(
        pages, v_up, entries, entries64, num_sites, entry + 1, count, width, 0, ROWS, TILE, RANKS, CHUNK, ALIGN
    )
    factor_gate = _entry(entries, entries_float, entry, count)
    factor_up = _entry(entries, entries_float, entry + 1, count)
    for tile in tl.range(tl.program_id(0) * COLS, tl.program_id(0) * COLS + COLS, num_stages=STAGES):
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_col = cols < width
        own = gate_up + row * (2 * width) + cols[None, :]
        mask = is_row[:, None] & is_col[None, :]
        gate, up = tl.load(own, mask=mask, other=0.0), tl.load(own + width, mask=mask, other=0.0)
        zero = tl.zeros((TILE, BLOCK_N), tl.float32)
        g = _times_b(zero, left_gate, b_gate, has_gate, cols, is_col, PRECISION)
        u = _times_b(zero, left_up, b_up, has_up, cols, is_col, PRECISION)
        if MORE:
            g = _times_more_b(
                g, pages, v_gate, entries, entries64, num_sites, entry, count, cols, is_col, width,
                ROWS, TILE, RANKS, CHUNK, ALIGN, PRECISION
            )  # fmt: skip
            u = _times_more_b(
                u, pages, v_up, entries, entries64, num_sites, entry + 1, count, cols, is_col, width,
                ROWS, TILE, RANKS, CHUNK, ALIGN, PRECISION
            )  # fmt: skip
        g, u = _with_delta(gate, g * factor_gate), _with_delta(up, u * factor_up)
        result = g * tl.sigmoid(g) * u
        tl.store(out + row * width + cols[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _delta_half(
    left, b_rows, is_rank, factor, pages, v, entries, entries64, num_sites, entry, count, cols, is_dim, width,
    ROWS: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr, MORE: tl.constexpr,
    HALF: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """scale * v B at half a head [TILE, HALF] float32. Arguments: `_operands`, `_times_b`."""
    total = _times_b(tl.zeros((TILE, HALF), tl.float32), left, b_rows, is_rank, cols, is_dim, PRECISION)
    if MORE:
        total = _times_more_b(
            total, pages, v, entries, entries64, num_sites, entry, count, cols, is_dim, width,
            ROWS, TILE, RANKS, CHUNK, ALIGN, PRECISION
        )  # fmt: skip
    return total * factor


@triton.jit
def _read_angles(cosine, sine, row_pos, row, is_row, dims, half, mask):
    """cos and sin of rows [TILE, HALF], zeros where not `mask`."""
    position = tl.load(row_pos + row, mask=is_row, other=0).to(tl.int64)[:, None] * half + dims[None, :]
    return tl.load(cosine + position, mask=mask, other=0.0), tl.load(sine + position, mask=mask, other=0.0)


@triton.jit
def _read_cells(row_page, row_offset, row, is_row, stride_page, stride_token):
    """Where rows are stored from the pages' start, and whether they are [TILE]."""
    page = tl.load(row_page + row, mask=is_row, other=-1).to(tl.int64)
    return page * stride_page + tl.load(row_offset + row, mask=is_row, other=0) * stride_token, page >= 0


@triton.jit
def _rotate(a, b, c, s, q_weight, k_weight, site, dims, half, eps, HAS_NORM: tl.constexpr):
    """Heads of a site by halves [TILE, HALF], normalised and rotated."""
    x, y = a, b
    if HAS_NORM:
        weights, is_dim = tl.where(site == 0, q_weight, k_weight) + dims, dims < half
        w0, w1 = tl.load(weights, mask=is_dim, other=0.0), tl.load(weights + half, mask=is_dim, other=0.0)
        x, y = normed(a, b, w0[None, :].to(tl.float32), w1[None, :].to(tl.float32), 2 * half, eps)
    return x * c - y * s, y * c + x * s


@triton.jit
def _store_halves(at, first, second, half, mask):
    tl.store(at, first.to(at.dtype.element_ty), mask=mask)
    tl.store(at + half, second.to(at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_sites", "first_site", "num_places", "tiles0", "tiles1"])
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
    entries, entries64, entries_float, num_sites, first_site, num_places,
    tiles0,  # groups of heads of q, and of q and k
    tiles1,
    width0,  # columns of q, and of k
    width1,
    stride_qkv, stride_page, stride_token, half,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    RANKS: tl.constexpr, CHUNK: tl.constexpr, MORE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (groups of HEADS heads of a site, parts). v of a part is read once, unless there are MORE ranks."""
    skipped, row0, num_rows, first, count, place = _read_part(blocks, tl.program_id(1), ROWS, TILE)
    site, width, offset, col = locate(tl.program_id(0), tiles0, tiles1, width0, width1, width1, HEADS * 2 * half)
    rows, dims = tl.arange(0, TILE), tl.arange(0, HALF)
    is_row, is_dim, row = rows < num_rows, dims < half, (row0 + rows).to(tl.int64)
    mask = is_row[:, None] & is_dim[None, :]
    v_block = _v_of(v, site, num_places, place, skipped, ROWS, CHUNK)
    entry = first * num_sites + first_site + site
    left, b_rows, is_rank = _operands(
        pages, v_block, entries, entries64, num_sites, entry, count, width, 0, ROWS, TILE, RANKS, CHUNK, ALIGN
    )
    factor = _entry(entries, entries_float, entry, count)
    c, s = _read_angles(cosine, sine, row_pos, row, is_row, dims, half, mask)
    cell, has_cell = _read_cells(row_page, row_offset, row, is_row, stride_page, stride_token)
    for first_col in tl.range(col, tl.minimum(col + HEADS * 2 * half, width), 2 * half, num_stages=1):
        cols = first_col + dims
        own = qkv + row[:, None] * stride_qkv + (offset + cols)[None, :]
        a, b = tl.load(own, mask=mask, other=0.0), tl.load(own + half, mask=mask, other=0.0)
        delta_a = _delta_half(
            left, b_rows, is_rank, factor, pages, v_block, entries, entries64, num_sites, entry, count,
            cols, is_dim, width, ROWS, TILE, RANKS, CHUNK, MORE, HALF, ALIGN, PRECISION
        )  # fmt: skip
        delta_b = _delta_half(
            left, b_rows, is_rank, factor, pages, v_block, entries, entries64, num_sites, entry, count,
            cols + half, is_dim, width, ROWS, TILE, RANKS, CHUNK, MORE, HALF, ALIGN, PRECISION
        )  # fmt: skip
        a, b = _with_delta(a, delta_a), _with_delta(b, delta_b)
        turned, turned_too = _rotate(a, b, c, s, q_weight, k_weight, site, dims, half, eps, HAS_NORM)
        if site == 0:
            _store_halves(own, turned, turned_too, half, mask)
        else:
            at, is_key = tl.where(site == 1, keys, values) + cell[:, None] + cols[None, :], site == 1
            first_half, other_half = tl.where(is_key, turned, a), tl.where(is_key, turned_too, b)
            _store_halves(at, first_half, other_half, half, mask & has_cell[:, None])

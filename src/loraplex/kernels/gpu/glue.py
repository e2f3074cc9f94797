"""The operations between the linears, in Triton. Each adds what adapters left (`LoraDelta`) to what it reads anyway.

Where a row has no adapter at a site, `covered` is 0, what stands in the delta does not matter, and the row keeps the
base's bits. Sums are kept in float32 and rounded where the reference (`kernels/reference.py`) rounds.
"""

import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.types import AttentionShape, HeadNorms, LoraDelta, RopeTable

_HEADS = 8  # heads one program rotates
_BLOCK = 1024


@triton.jit
def _with_delta(value, delta, covered, mask):
    """value + delta where `covered`, rounded to the dtype of `value`; float32. `delta` and `value` are of one shape.

    The delta is read whether it counts or not, so that nothing waits for `covered`.
    """
    added, wide = tl.load(delta, mask=mask, other=0.0).to(tl.float32), value.to(tl.float32)
    return tl.where(covered != 0, (wide + added).to(value.dtype).to(tl.float32), wide)


@triton.jit
def _add_rms_norm(
    residual,  # [rows, width]
    update,  # [rows, width]
    delta,  # [rows, width]
    covered,  # [rows] int8, of the site
    weight,  # [width]
    out,  # [num_out, width]
    rows,  # [num_out] int32: the row each output is of
    width,
    eps,
    HAS_UPDATE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64) if HAS_ROWS else index
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    place = row * width + cols
    total = tl.load(residual + place, mask=mask, other=0.0)
    if HAS_UPDATE:
        added = tl.load(update + place, mask=mask, other=0.0)
        wide = added.to(tl.float32)
        if HAS_DELTA:
            wide = _with_delta(added, delta + place, tl.load(covered + row), mask)
        total = (total.to(tl.float32) + wide).to(total.dtype)
        if not HAS_ROWS:
            tl.store(residual + place, total, mask=mask)
    value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normed = value * scale * tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + index * width + cols, normed.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    residual: Tensor,
    update: Tensor | None,
    delta: LoraDelta | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    rows: Tensor | None = None,
) -> None:
    """As `Ops.add_rms_norm`. With `rows` [num_out], only those rows are normed and `residual` keeps its values."""
    width = residual.shape[1]
    block = triton.next_power_of_2(width)
    _add_rms_norm[(out.shape[0],)](
        residual,
        residual if update is None else update,
        residual if delta is None else delta.values,
        residual if delta is None else delta.covered[delta.sites[0].index],
        weight,
        out,
        residual if rows is None else rows,
        width,
        eps,
        HAS_UPDATE=update is not None,
        HAS_DELTA=delta is not None,
        HAS_ROWS=rows is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )


@triton.jit
def normed(first, second, first_weight, second_weight, width, eps):
    """RMS norm of heads given by halves [heads, half]."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / width + eps)[:, None]
    return first * scale * first_weight, second * scale * second_weight


@triton.jit
def _load_halves(own, added, covered, half, mask, HAS_DELTA: tl.constexpr):
    """Both halves of heads [heads, half] float32, with their delta where `covered` [heads] says so."""
    first, second = tl.load(own, mask=mask, other=0.0), tl.load(own + half, mask=mask, other=0.0)
    if HAS_DELTA:
        has = tl.load(covered)[:, None]
        a, b = _with_delta(first, added, has, mask), _with_delta(second, added + half, has, mask)
    else:
        a, b = first.to(tl.float32), second.to(tl.float32)
    return a, b


@triton.jit
def _store_halves(at, first, second, half, mask):
    tl.store(at, first, mask=mask)
    tl.store(at + half, second, mask=mask)


@triton.jit
def _rope_and_store(
    qkv,  # [rows, heads * 2 * half], row stride stride_qkv
    delta,  # [rows, ...], row stride stride_delta
    covered,  # [3 sites, stride_covered] int8: of q, k and v
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
    num_heads,
    num_kv_heads,
    stride_qkv,
    stride_delta,
    stride_covered,
    stride_page,
    stride_token,
    half,
    HAS_DELTA: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    is_key, is_value = heads >= num_heads, heads >= num_heads + num_kv_heads
    mask = (heads < num_heads + 2 * num_kv_heads)[:, None] & (dims < half)[None, :]
    place = heads[:, None] * (2 * half) + dims[None, :]
    own = qkv + row * stride_qkv + place
    added = delta + row * stride_delta + place
    has = covered + (is_key.to(tl.int32) + is_value.to(tl.int32)) * stride_covered + row
    a, b = _load_halves(own, added, has, half, mask, HAS_DELTA)
    x, y = a, b
    if HAS_NORM:
        weights = tl.where(is_key[:, None], k_weight + dims[None, :], q_weight + dims[None, :])
        w0, w1 = tl.load(weights, mask=mask, other=0.0), tl.load(weights + half, mask=mask, other=0.0)
        x, y = normed(a, b, w0.to(tl.float32), w1.to(tl.float32), 2 * half, eps)
    position = tl.load(row_pos + row).to(tl.int64) * half + dims
    c = tl.load(cosine + position, mask=dims < half, other=0.0)[None, :]
    s = tl.load(sine + position, mask=dims < half, other=0.0)[None, :]
    turned, turned_too = x * c - y * s, y * c + x * s
    is_query = mask & (heads < num_heads)[:, None]
    dtype = qkv.dtype.element_ty
    _store_halves(own, turned.to(dtype), turned_too.to(dtype), half, is_query)
    page = tl.load(row_page + row).to(tl.int64)
    cell = page * stride_page + tl.load(row_offset + row) * stride_token
    stored = mask & (page + tl.zeros((HEADS,), tl.int64) >= 0)[:, None]
    key_at = keys + cell + place - num_heads * (2 * half)
    _store_halves(key_at, turned.to(dtype), turned_too.to(dtype), half, stored & (is_key & (is_value == 0))[:, None])
    value_at = values + cell + place - (num_heads + num_kv_heads) * (2 * half)
    _store_halves(value_at, a.to(dtype), b.to(dtype), half, stored & is_value[:, None])


def rope_and_store(
    qkv: Tensor,
    delta: LoraDelta | None,
    shape: AttentionShape,
    rope: RopeTable,
    norms: HeadNorms | None,
    keys: Tensor,
    values: Tensor,
    row_page: Tensor,
    row_offset: Tensor,
    row_pos: Tensor,
) -> None:
    """As `Ops.rope_and_store`. keys and values are a layer's views of the pool [pages, page_tokens, kv_heads, dim]."""
    half = shape.head_dim // 2
    covered = qkv if delta is None else delta.covered[delta.sites[0].index :]
    all_heads = shape.num_heads + 2 * shape.num_kv_heads
    _rope_and_store[(qkv.shape[0], triton.cdiv(all_heads, _HEADS))](
        qkv,
        qkv if delta is None else delta.values,
        covered,
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
        shape.num_heads,
        shape.num_kv_heads,
        qkv.stride(0),
        0 if delta is None else delta.values.stride(0),
        covered.stride(0),
        keys.stride(0),
        keys.stride(1),
        half,
        HAS_DELTA=delta is not None,
        HAS_NORM=norms is not None,
        HEADS=_HEADS,
        HALF=triton.next_power_of_2(half),
        num_warps=2,
    )


@triton.jit
def _silu_and_mul(
    gate_up,  # [rows, 2 * width], contiguous
    delta,  # [rows, 2 * width], contiguous
    covered,  # [2 sites, stride_covered] int8: of gate and up
    out,  # [rows, width], contiguous
    width,
    stride_covered,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    place = row * 2 * width + cols
    gate, up = tl.load(gate_up + place, mask=mask, other=0.0), tl.load(gate_up + place + width, mask=mask, other=0.0)
    if HAS_DELTA:
        g = _with_delta(gate, delta + place, tl.load(covered + row), mask)
        u = _with_delta(up, delta + place + width, tl.load(covered + stride_covered + row), mask)
    else:
        g, u = gate.to(tl.float32), up.to(tl.float32)
    result = g * tl.sigmoid(g) * u
    tl.store(out + row * width + cols, result.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor, delta: LoraDelta | None, out: Tensor) -> None:
    """As `Ops.silu_and_mul`."""
    width = out.shape[1]
    covered = gate_up if delta is None else delta.covered[delta.sites[0].index :]
    _silu_and_mul[(out.shape[0], triton.cdiv(width, _BLOCK))](
        gate_up,
        gate_up if delta is None else delta.values,
        covered,
        out,
        width,
        covered.stride(0),
        HAS_DELTA=delta is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _embed(token_ids, table, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(table + tl.load(token_ids + row) * width + cols, mask=cols < width, other=0.0)
    tl.store(out + row * width + cols, found.to(out.dtype.element_ty), mask=cols < width)


def embed(token_ids: Tensor, table: Tensor, out: Tensor) -> None:
    """As `Ops.embed`."""
    width = table.shape[1]
    _embed[(out.shape[0], triton.cdiv(width, _BLOCK))](token_ids, table, out, width, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _pause(anything):
    pass


def pause(anything: Tensor) -> None:
    """A launch that does nothing. What follows in its stream starts a moment later than what was launched beside it.

    A dense product whose programs fill a processor each, and come in clusters, starts late where small programs have
    taken their places first; started first, it leaves them the processors that it does not need.
    """
    _pause[(1,)](anything, num_warps=1)


@triton.jit
def _resolve_tokens(
    tokens,  # [rows] int32, as the host knows them
    source,  # [rows] int32: place among the last step's draws, -1 where the host knew the token
    drawn,  # int64: the last step's draws
    out,  # [rows] int64
    num_rows,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    place = tl.load(source + rows, mask=mask, other=-1)
    known = tl.load(tokens + rows, mask=mask, other=0).to(tl.int64)
    token = tl.load(drawn + place, mask=mask & (place >= 0), other=0)
    tl.store(out + rows, tl.where(place >= 0, token, known), mask=mask)


def resolve_tokens(tokens: Tensor, source: Tensor, drawn: Tensor, out: Tensor) -> None:
    """out [rows] int64 = tokens [rows], or drawn[source] where source [rows] is not negative."""
    num_rows = tokens.shape[0]
    _resolve_tokens[(triton.cdiv(num_rows, 128),)](tokens, source, drawn, out, num_rows, BLOCK=128, num_warps=1)

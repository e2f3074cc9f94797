"""Attention of steps of few rows a sequence, over the page pool: FlashDecoding (Dao et al., 2023) in Triton.

Every row is on its own: the keys it attends to are cut every SPLIT_TOKENS; a program attends to one piece with the
query heads of one key head. A row of one piece is done then, the pieces of longer ones are merged. Where the cuts lie
depends on the row's place in its sequence alone, so its bits do not depend on what shares the step.

The matrix units take GROUP heads at once. Where a key head has fewer, neighbouring rows of a sequence that are cut
alike fill them: they share the reads, and none sees a token beyond itself.
"""

from collections.abc import Iterable

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.types import GPU_MAX_GROUP, AttentionShape

SPLIT_TOKENS = 256
_WORDS = 8  # int32 words of a piece
_BLOCK = 64  # tokens at a time


@triton.jit
def _attend(q, keys, values, pages, first, last, ends, stride_page, stride_token, scale,
            DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
            STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Softmax-weighted values of tokens [first, end), unnormalised [GROUP, DIM], largest score and sum of weights.

    q [GROUP, DIM]; ends [GROUP], after `first` and at most `last`; keys and values at a key head; scores are exponents
    of two.
    """
    dims = tl.arange(0, DIM)
    best = tl.full((GROUP,), float("-inf"), tl.float32)
    mass = tl.zeros((GROUP,), tl.float32)
    total = tl.zeros((GROUP, DIM), tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        tokens = start + tl.arange(0, BLOCK)
        is_token = tokens < last
        page = tl.load(pages + tokens // PAGE_TOKENS, mask=is_token, other=0).to(tl.int64)
        cell = page * stride_page + (tokens % PAGE_TOKENS) * stride_token
        k = tl.load(keys + cell[None, :] + dims[:, None], mask=is_token[None, :], other=0.0)
        v = tl.load(values + cell[:, None] + dims[None, :], mask=is_token[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = tl.where(tokens[None, :] < ends[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        mass = mass * shrink + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
        best = higher
    return total, best, mass


@triton.jit
def _attend_decode(
    q,  # [rows, heads, DIM], row stride stride_q
    keys,  # a layer's keys: page stride stride_page, token stride stride_token
    values,
    pages,  # [all pages] int32
    pieces,  # [count, 8] int32, see `_Pieces`
    count,  # [1] int32
    out,  # [rows, heads, DIM], contiguous
    part,  # [parts, heads, DIM] float32
    part_sums,  # [parts, heads, 2] float32: largest score, sum of weights
    stride_q,
    stride_page,
    stride_token,
    scale,
    heads,
    group,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    lanes, dims = tl.arange(0, GROUP), tl.arange(0, DIM)
    member = lanes // group
    head = kv_head * group + lanes % group
    place = head[:, None] * DIM + dims[None, :]
    for index in range(tl.program_id(1), tl.load(count), tl.num_programs(1)):
        piece = pieces + index * 8
        row = tl.load(piece).to(tl.int64) + member
        first, last = tl.load(piece + 2), tl.load(piece + 3)
        is_lane = member < tl.load(piece + 5)
        ends = tl.where(is_lane, tl.minimum(last, tl.load(piece + 6) + member), last)
        query = tl.load(q + row[:, None] * stride_q + place, mask=is_lane[:, None], other=0.0)
        total, best, mass = _attend(
            query, keys + kv_head * DIM, values + kv_head * DIM, pages + tl.load(piece + 1), first, last, ends,
            stride_page, stride_token, scale, DIM, PAGE_TOKENS, BLOCK, GROUP, STAGES, PRECISION,
        )  # fmt: skip
        slot = tl.load(piece + 4)
        if slot < 0:
            result = (total / mass[:, None]).to(out.dtype.element_ty)
            tl.store(out + row[:, None] * (heads * DIM) + place, result, mask=is_lane[:, None])
        else:
            at = (slot + member * tl.load(piece + 7)).to(tl.int64) * heads
            tl.store(part + at[:, None] * DIM + place, total, mask=is_lane[:, None])
            tl.store(part_sums + (at + head) * 2, best, mask=is_lane)
            tl.store(part_sums + (at + head) * 2 + 1, mass, mask=is_lane)


@triton.jit
def _merge(
    out,
    part,
    part_sums,
    merges,  # [rows, 2] int32: first part of a row and how many; 0 or 1 is nothing to merge
    heads,
    DIM: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, number = tl.load(merges + row * 2).to(tl.int64), tl.load(merges + row * 2 + 1)
    dims = tl.arange(0, DIM)
    if number > 1:
        best = float("-inf")
        for i in range(number):
            best = tl.maximum(best, tl.load(part_sums + ((first + i) * heads + head) * 2))
        mass = 0.0
        total = tl.zeros((DIM,), tl.float32)
        for i in range(number):
            at = (first + i) * heads + head
            weight = tl.exp2(tl.load(part_sums + at * 2) - best)
            mass += weight * tl.load(part_sums + at * 2 + 1)
            total += weight * tl.load(part + at * DIM + dims)
        tl.store(out + (row * heads + head) * DIM + dims, (total / mass).to(out.dtype.element_ty))


class _Pieces:
    """Pieces of the rows' contexts as layers of one window see them, on both sides.

    A piece: row, where its pages begin, first and last token, place among the parts or -1, how many rows share it (that
    one and those after it, each with a token more), tokens of the first of them, pieces of each.
    """

    def __init__(self, window: int, pack: int, max_rows: int, capacity: int, device: torch.device) -> None:
        """`pack`: most rows that may share a piece."""
        self._window = window
        self._pack = pack if not window else 1  # within a window every row has another first token
        pinned = device.type == "cuda"
        words = 8 + 2 * max_rows + capacity * _WORDS
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._max_rows, self._capacity = max_rows, capacity
        self.count = self._device[:1]
        self.merges = self._device[8 : 8 + 2 * max_rows]
        self.pieces = self._device[8 + 2 * max_rows :]

    def plan(self, starts: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        """For each row where its pages begin and how many tokens it attends to. Sends in one copy."""
        host, rows = self._host.numpy(), len(lengths)
        first = np.maximum(0, lengths - self._window) if self._window else np.zeros_like(lengths)
        cut = first // SPLIT_TOKENS  # cuts lie at multiples of SPLIT_TOKENS
        number = -(-lengths // SPLIT_TOKENS) - cut
        parts = np.where(number > 1, number, 0)
        first_part = np.cumsum(parts) - parts
        leads = np.flatnonzero(self._leads(starts, lengths, number))
        members = np.diff(np.append(leads, rows))
        begins = np.cumsum(number[leads]) - number[leads]
        of_lead = np.repeat(np.arange(len(leads)), number[leads])
        row, index = leads[of_lead], np.arange(len(of_lead)) - begins[of_lead]
        most = max(len(row), int(parts.sum()))
        assert most <= self._capacity, f"{most} pieces of contexts in tables for {self._capacity}"
        pieces = host[8 + 2 * self._max_rows :][: len(row) * _WORDS].reshape(-1, _WORDS)
        pieces[:, 0], pieces[:, 1] = row, starts[row]
        pieces[:, 2] = np.maximum(first[row], (index + cut[row]) * SPLIT_TOKENS)
        pieces[:, 3] = np.minimum(lengths[row] + members[of_lead] - 1, (index + cut[row] + 1) * SPLIT_TOKENS)
        pieces[:, 4] = np.where(parts[row] > 0, first_part[row] + index, -1)
        pieces[:, 5], pieces[:, 6], pieces[:, 7] = members[of_lead], lengths[row], number[row]
        merges = host[8 : 8 + 2 * rows].reshape(-1, 2)
        merges[:, 0], merges[:, 1] = first_part, parts
        host[0] = len(row)
        end = 8 + 2 * self._max_rows + len(row) * _WORDS
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def _leads(
        self, starts: NDArray[np.int32], lengths: NDArray[np.int64], number: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Rows that do not share the pieces of the row before."""
        follows = np.zeros(len(lengths), dtype=np.bool_)
        follows[1:] = (np.diff(starts) == 0) & (np.diff(lengths) == 1) & (np.diff(number) == 0)
        if self._pack == 1 or not follows.any():
            return np.ones(len(lengths), dtype=np.bool_)
        places = np.arange(len(lengths))
        run = places - np.maximum.accumulate(np.where(follows, 0, places))  # place among its like
        leads: NDArray[np.bool_] = run % self._pack == 0
        return leads


class DecodeAttention:
    """Attention of a step, row by row. `plan` it before each; addresses stay, for graphs."""

    def __init__(
        self,
        shapes: Iterable[AttentionShape],
        pages: Tensor,
        page_tokens: int,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        """`pages`: the device's page lists; max_tokens: that all rows of a step attend to together."""
        by_window = {shape.window: shape for shape in shapes}
        shape = next(iter(by_window.values()))
        self._pages = pages
        self._page_tokens = page_tokens
        capacity = max_rows + max_tokens // SPLIT_TOKENS + 1
        device = pages.device
        pack = GPU_MAX_GROUP // (shape.num_heads // shape.num_kv_heads)
        self._pieces = {window: _Pieces(window, pack, max_rows, capacity, device) for window in by_window}
        heads = capacity * shape.num_heads
        self._part = torch.empty(heads * shape.head_dim, dtype=torch.float32, device=device)
        self._part_sums = torch.empty(heads * 2, dtype=torch.float32, device=device)

    def plan(self, starts: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        """Cut what each row of a step attends to; does not wait for the device.

        starts [rows]: where its sequence begins in the page lists; lengths [rows]: tokens up to and with itself.
        """
        for pieces in self._pieces.values():
            pieces.plan(starts, lengths)

    def run(self, q: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape, out: Tensor) -> None:
        """q and out [rows, heads, dim], out whole; keys and values [pages, page_tokens, kv_heads, dim], strided."""
        rows, pieces = q.shape[0], self._pieces[shape.window]
        group = shape.num_heads // shape.num_kv_heads
        assert group <= GPU_MAX_GROUP, f"{group} query heads a key head, at most {GPU_MAX_GROUP}"
        _attend_decode[(shape.num_kv_heads, max(rows, 64))](
            q, keys, values, self._pages, pieces.pieces, pieces.count, out, self._part, self._part_sums,
            q.stride(0), keys.stride(0), keys.stride(1), shape.scale * 1.4426950408889634, shape.num_heads, group,
            DIM=shape.head_dim, PAGE_TOKENS=self._page_tokens, BLOCK=_BLOCK, GROUP=GPU_MAX_GROUP, STAGES=2,
            PRECISION="ieee", num_warps=4,
        )  # fmt: skip
        _merge[(rows, shape.num_heads)](
            out, self._part, self._part_sums, pieces.merges, shape.num_heads, DIM=shape.head_dim, num_warps=1
        )

"""Decode attention in Triton against float64: in the interpreter on the CPU, compiled on a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from loraplex.kernels import AttentionShape, KvBatch
from loraplex.kernels.gpu import decode_attention
from loraplex.kernels.gpu.decode_attention import DecodeAttention

from .cases import make_kv_batch
from .test_ops import exact_attention, fill_pages, randn

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# bfloat16 products are wrong in the interpreter.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, **({torch.bfloat16: 1.6e-2} if HAS_GPU else {})}
SHAPES = {
    "grouped": (8, 2, 64, 0, 16),
    "alone": (4, 4, 64, 0, 16),
    "one key head": (16, 1, 64, 0, 16),
    "window": (4, 2, 64, 40, 16),
    "window of one": (4, 2, 64, 1, 16),
    "wide heads": (4, 2, 128, 0, 32),
}
LENGTHS = [1, 16, 17, 300, 133, 70]


def attend(
    kv: KvBatch,
    lengths: list[int],
    qkv: torch.Tensor,
    shape: AttentionShape,
    page_tokens: int,
    rows: list[tuple[int, int]] | None = None,
) -> torch.Tensor:
    """`rows`: the sequence of each and tokens up to it; without, one a sequence, its last."""
    rows = list(enumerate(lengths)) if rows is None else rows
    used = [-(-length // page_tokens) for length in lengths]
    pages = torch.cat([kv.page_table[i, :count] for i, count in enumerate(used)]).to(DEVICE)
    attention = DecodeAttention([shape], pages, page_tokens, len(rows) + 2, sum(length for _, length in rows) + 999)
    first_page = np.cumsum([0, *used])[[seq for seq, _ in rows]].astype(np.int32)
    attention.plan(first_page, np.array([length for _, length in rows]))
    out = torch.full((len(rows), shape.num_heads, shape.head_dim), float("nan"), dtype=qkv.dtype, device=DEVICE)
    on_device = kv.pages.to(DEVICE)
    q = qkv.to(DEVICE).view(len(rows), -1, shape.head_dim)[:, : shape.num_heads]
    attention.run(q, on_device[:, 1, 0], on_device[:, 1, 1], shape, out)
    return out.cpu()


@pytest.mark.parametrize("split", [32, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_attends_to_its_own_tokens(
    name: str, dtype: torch.dtype, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "SPLIT_TOKENS", split)
    heads, kv_heads, dim, window, page_tokens = SHAPES[name]
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5, window)
    rows = len(LENGTHS)
    kv = make_kv_batch(
        dtype, layers=3, kv_heads=kv_heads, head_dim=dim, page_tokens=page_tokens, lengths=LENGTHS, new_rows=[1] * rows
    )
    keys, values = fill_pages(kv, LENGTHS, layer=1)
    qkv = randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    got = attend(kv, LENGTHS, qkv, shape, page_tokens)
    for row, length in enumerate(LENGTHS):
        exact = exact_attention(qkv[row, : heads * dim].view(heads, dim), keys[row], values[row], length - 1, window)
        assert float((got[row].double() - exact).abs().max()) <= TOLERANCE[dtype] * float(exact.abs().max()) * 2


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_has_the_same_bits_beside_any_others(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "SPLIT_TOKENS", 64)
    shape = AttentionShape(8, 2, 64, 0.125, 0)
    rows = len(LENGTHS)
    kv = make_kv_batch(dtype, layers=3, kv_heads=2, head_dim=64, page_tokens=16, lengths=LENGTHS, new_rows=[1] * rows)
    fill_pages(kv, LENGTHS, layer=1)
    qkv = randn(rows, 12 * 64, dtype=dtype)
    together = attend(kv, LENGTHS, qkv, shape, 16)
    for row, length in enumerate(LENGTHS):
        one = replace(kv, page_table=kv.page_table[row : row + 1])
        assert torch.equal(attend(one, [length], qkv[row : row + 1], shape, 16)[0], together[row])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"), [(1, 1, 0), (2, 2, 0), (4, 2, 0), (4, 1, 0), (4, 1, 40), (8, 1, 0)]
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_of_a_prompt_attend_up_to_themselves(
    dtype: torch.dtype, heads: int, kv_heads: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of several rows beside single ones; a row has the bits that it has as the last of its sequence."""
    monkeypatch.setattr(decode_attention, "SPLIT_TOKENS", 64)
    shape, width = AttentionShape(heads, kv_heads, 64, 0.125, window), (heads + 2 * kv_heads) * 64
    kv = make_kv_batch(
        dtype, layers=3, kv_heads=kv_heads, head_dim=64, page_tokens=16, lengths=LENGTHS, new_rows=[1] * 6
    )
    keys, values = fill_pages(kv, LENGTHS, layer=1)
    rows = [(0, 1), *((3, length) for length in range(290, 301)), *((4, length) for length in range(1, 34)), (5, 70)]
    qkv = randn(len(rows), width, dtype=dtype)
    got = attend(kv, LENGTHS, qkv, shape, 16, rows)
    for i, (seq, length) in enumerate(rows):
        q = qkv[i, : heads * 64].view(heads, 64)
        exact = exact_attention(q, keys[seq], values[seq], length - 1, window)
        assert float((got[i].double() - exact).abs().max()) <= TOLERANCE[dtype] * float(exact.abs().max()) * 2
        one = replace(kv, page_table=kv.page_table[seq : seq + 1])
        assert torch.equal(attend(one, [length], qkv[i : i + 1], shape, 16)[0], got[i])


def test_more_pieces_than_there_is_room_for_are_refused() -> None:
    pages = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    attention = DecodeAttention([AttentionShape(2, 1, 64, 0.1, 0)], pages, 16, 2, 256)
    with pytest.raises(AssertionError, match="7 pieces of contexts in tables for 4"):
        attention.plan(np.zeros(1, dtype=np.int32), np.array([1600]))

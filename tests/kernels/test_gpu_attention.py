"""Decode attention in Triton against float64: in the interpreter on the CPU, compiled on a GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from loraplex.kernels import AttentionShape, KvBatch
from loraplex.kernels.gpu import decode_attention
from loraplex.kernels.gpu.decode_attention import DecodeAttention
from loraplex.kernels.gpu.ops import KvPages

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


def attend(kv: KvBatch, lengths: list[int], qkv: torch.Tensor, shape: AttentionShape, page_tokens: int) -> torch.Tensor:
    used = [-(-length // page_tokens) for length in lengths]
    starts = torch.tensor([0, *torch.tensor(used).cumsum(0).tolist()], dtype=torch.int32)
    last = [length - (count - 1) * page_tokens for length, count in zip(lengths, used, strict=True)]
    pages = torch.cat([kv.page_table[i, :count] for i, count in enumerate(used)]).to(DEVICE)
    attention = DecodeAttention([shape], pages, page_tokens, len(lengths) + 2, sum(lengths) + 999)
    attention.plan(KvPages(starts, torch.tensor(last, dtype=torch.int32), pages))
    out = torch.full((len(lengths), shape.num_heads, shape.head_dim), float("nan"), dtype=qkv.dtype, device=DEVICE)
    on_device = kv.pages.to(DEVICE)
    q = qkv.to(DEVICE).view(len(lengths), -1, shape.head_dim)[:, : shape.num_heads]
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


def test_more_pieces_than_there_is_room_for_are_refused() -> None:
    pages = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    attention = DecodeAttention([AttentionShape(2, 1, 64, 0.1, 0)], pages, 16, 2, 256)
    starts = torch.tensor([0, 100], dtype=torch.int32)
    with pytest.raises(AssertionError, match="7 pieces of sequences in tables for 4"):
        attention.plan(KvPages(starts, torch.tensor([16], dtype=torch.int32), pages))

"""The Triton operations between linears against those of torch: in the interpreter on the CPU, compiled on a GPU."""

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from loraplex.kernels import AttentionShape, HeadNorms, KvBatch, LoraDelta, LoraSite, RopeTable, TorchOps
from loraplex.kernels.gpu import glue

from .cases import make_kv_batch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MAX_ROWS = 16
REFERENCE = TorchOps()


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = TOLERANCE[wanted.dtype]
    return torch.allclose(got.cpu().float(), wanted.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@dataclass
class Added:
    """A linear's output, what adapters left for it, and both as the reference takes them: already added."""

    y: torch.Tensor
    delta: LoraDelta
    total: torch.Tensor


def make_added(rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> Added:
    """Some rows lack some sites; there the delta holds NaN, which nothing may read."""
    offsets = [sum(widths[:i]) for i in range(len(widths))]
    sites = tuple(
        LoraSite(i + 2, 8, width, offset) for i, (width, offset) in enumerate(zip(widths, offsets, strict=True))
    )
    covered = (torch.rand(len(widths) + 3, MAX_ROWS, generator=torch.Generator().manual_seed(3)) > 0.4).to(torch.int8)
    y, values = randn(rows, sum(widths), dtype=dtype, seed=1), randn(rows, sum(widths), dtype=dtype, seed=2)
    total = y.clone()
    for site in sites:
        cols = slice(site.out_offset, site.out_offset + site.d_out)
        for row in range(rows):
            if covered[site.index, row]:
                total[row, cols] = (y[row, cols].float() + values[row, cols].float()).to(dtype)
            else:
                values[row, cols] = float("nan")
    return Added(y.to(DEVICE), LoraDelta(values.to(DEVICE), covered.to(DEVICE), sites), total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 100, 1536])
def test_silu_and_mul(width: int, dtype: torch.dtype) -> None:
    added = make_added(5, (width, width), dtype)
    for delta, source in ((added.delta, added.total), (None, added.y.cpu())):
        got, wanted = torch.empty(5, width, dtype=dtype, device=DEVICE), torch.empty(5, width, dtype=dtype)
        glue.silu_and_mul(added.y, delta, got)
        REFERENCE.silu_and_mul(source, wanted)
        assert close(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 100, 1536])
def test_add_rms_norm(width: int, dtype: torch.dtype) -> None:
    added = make_added(5, (width,), dtype)
    weight, start = randn(width, dtype=dtype, seed=4), randn(5, width, dtype=dtype, seed=5)
    updates = ((added.y, added.delta, added.total), (added.y, None, added.y.cpu()), (None, None, None))
    for update, delta, source in updates:
        residual, wanted_residual = start.to(DEVICE).clone(), start.clone()
        got, wanted = torch.empty_like(residual), torch.empty_like(start)
        glue.add_rms_norm(residual, update, delta, weight.to(DEVICE), 1e-5, got)
        REFERENCE.add_rms_norm(wanted_residual, source, weight, 1e-5, wanted)
        assert close(residual, wanted_residual)
        assert close(got, wanted)


def test_norm_of_some_rows_leaves_the_residual() -> None:
    added = make_added(5, (40,), torch.float32)
    weight, residual = randn(40, dtype=torch.float32, seed=4), randn(5, 40, dtype=torch.float32, seed=5)
    on_device, wanted = residual.to(DEVICE).clone(), torch.empty(3, 40)
    rows = torch.tensor([4, 0, 3], dtype=torch.int32)
    got = torch.empty(3, 40, device=DEVICE)
    glue.add_rms_norm(on_device, added.y, added.delta, weight.to(DEVICE), 1e-5, got, rows.to(DEVICE))
    REFERENCE.final_norm(residual, added.total, rows.long(), weight, 1e-5, wanted)
    assert close(got, wanted)
    assert torch.equal(on_device.cpu(), residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (9, 3, 48), (3, 1, 16)])
def test_rope_and_store(heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5, 0)
    kv = make_kv_batch(
        dtype, layers=2, kv_heads=kv_heads, head_dim=dim, page_tokens=16, lengths=[5, 40, 18], new_rows=[3, 1, 3]
    )
    theirs = replace(kv, pages=kv.pages.clone())
    rope = RopeTable(randn(64, dim // 2, dtype=torch.float32, seed=6), randn(64, dim // 2, dtype=torch.float32, seed=7))
    weights = [randn(dim, dtype=dtype, seed=seed) for seed in (8, 9)]
    norms = HeadNorms(weights[0], weights[1], 1e-5) if normed else None
    added = make_added(7, (heads * dim, kv_heads * dim, kv_heads * dim), dtype)
    for delta, source in ((added.delta, added.total), (None, added.y.cpu())):
        wanted, got = source.clone(), added.y.clone()
        REFERENCE.rope_and_store(wanted, 1, shape, rope, norms, theirs)
        pages = _rope_on_device(got, delta, shape, rope, norms, kv)
        assert close(got[:, : heads * dim], wanted[:, : heads * dim])
        assert close(pages, theirs.pages)


def _rope_on_device(
    qkv: torch.Tensor,
    delta: LoraDelta | None,
    shape: AttentionShape,
    rope: RopeTable,
    norms: HeadNorms | None,
    kv: KvBatch,
) -> torch.Tensor:
    """Run it on a copy of the pages, and return them."""
    pages = kv.pages.to(DEVICE).clone()
    page = kv.page_table[kv.row_seq.long(), kv.row_pos.long() // 16].int()
    if norms is not None:
        norms = HeadNorms(norms.q_weight.to(DEVICE), norms.k_weight.to(DEVICE), norms.eps)
    where = [values.to(DEVICE) for values in (page, (kv.row_pos % 16).int(), kv.row_pos)]
    rope = rope.to(torch.device(DEVICE))
    glue.rope_and_store(qkv, delta, shape, rope, norms, pages[:, 1, 0], pages[:, 1, 1], *where)
    return pages


def test_row_without_a_page_stores_nothing() -> None:
    shape = AttentionShape(2, 1, 16, 0.25, 0)
    pages = torch.full((2, 1, 2, 16, 1, 16), float("nan"), device=DEVICE)
    zeros = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    rope = RopeTable(torch.ones(4, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE))
    qkv = torch.ones(2, 64, device=DEVICE)
    glue.rope_and_store(qkv, None, shape, rope, None, pages[:, 0, 0], pages[:, 0, 1], zeros - 1, zeros, zeros)
    assert pages.isnan().all()


def test_tokens_come_from_the_host_or_the_last_step() -> None:
    tokens, source = torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([-1, 1, -1], dtype=torch.int32)
    out = torch.full((6,), -9, device=DEVICE)
    glue.resolve_tokens(tokens.to(DEVICE), source.to(DEVICE), torch.tensor([9, 10], device=DEVICE), out)
    assert out.tolist() == [5, 10, 7, -9, -9, -9]

"""The kernels of steps of many rows against the row loop and torch: in Triton's interpreter, compiled on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from loraplex.kernels import AttentionShape, HeadNorms, KvBatch, LoraDelta, RopeTable, TorchOps
from loraplex.kernels.gpu import PREFILL_ROWS, BoundPrefill, RowBlocks, count_blocks, glue, plan_blocks, prefill

from .cases import LoraCase, assert_close, make_kv_batch, make_lora_case
from .test_gpu_glue import randn
from .test_gpu_lora import DEVICE, HAS_GPU, NAN, aligned, alone, covered, needs_gpu
from .test_lora import CASES

# bfloat16 products are wrong in the interpreter. On a GPU these kernels run in two-byte dtypes only.
DTYPES = [torch.float16, torch.bfloat16] if HAS_GPU else [torch.float32, torch.float16]
EXACT = DTYPES[0]
ROWS = [64, 128] if HAS_GPU else [16, 128]
NAMES = [name for name in CASES if HAS_GPU or name not in ("wide outputs", "rank above 256")]
NEAR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
REFERENCE = TorchOps()
SMALL = {"ranks": [[16, 8, 4], [3, 0, 16], [5, 7, 5]], "slots": [0, -1, 1, 2], "rows": [3, 2, 18, 2]}
MIXED = {"ranks": [[16, 8, 4], [33, 0, 20], [5, 70, 5]], "slots": [0, -1, 1, 2], "rows": [3, 2, 18, 2]}


def bind(case: LoraCase, block_rows: int = PREFILL_ROWS, *, align: int = 1) -> BoundPrefill:
    """Tables of a case on the device, NaN where sums will be, and what is not in the tables -1."""
    counts = count_blocks(case.lora, block_rows)
    sizes = case.lora.chunk_start.shape[1] - 1, counts.blocks + 3, counts.entries + 2
    host, tables = RowBlocks.empty(*sizes, align=align), RowBlocks.empty(*sizes, DEVICE, align=align)
    assert plan_blocks(case.lora, block_rows, host) == counts
    tables.flat.fill_(-1)
    tables.copy_(host, counts.entries)
    part_size, v_size = prefill.room([case.sites], counts, block_rows)
    part = torch.full((part_size,), NAN, device=DEVICE)
    v = torch.full((v_size,), NAN, dtype=case.x.dtype, device=DEVICE)
    return BoundPrefill(case.lora.pages.to(DEVICE), tables, counts, part, v, block_rows)


def shrink(case: LoraCase, block_rows: int = PREFILL_ROWS, *, align: int = 1) -> LoraDelta:
    return prefill.shrink(case.x.to(DEVICE), case.sites, bind(case, block_rows, align=align))


def run(case: LoraCase, block_rows: int = PREFILL_ROWS, *, align: int = 1) -> torch.Tensor:
    """y with what adapters add."""
    y = case.y.to(DEVICE).clone()
    prefill.add(y, shrink(case, block_rows, align=align))
    return y.cpu()


def total(case: LoraCase) -> torch.Tensor:
    """The same by the row loop, rounded once."""
    return case.exact().to(case.y.dtype)


def assert_total(got: torch.Tensor, case: LoraCase) -> None:
    mask = covered(case)
    assert torch.equal(got[~mask], case.y[~mask])
    assert_close(got, case.exact(), torch.float32 if got.dtype is torch.float32 else torch.bfloat16)


# ---------------------------------------------------------------------- shrink and expand
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_rows", ROWS)
def test_sum_equals_the_row_loop(name: str, dtype: torch.dtype, block_rows: int) -> None:
    case = make_lora_case(dtype, **CASES[name])
    if count_blocks(case.lora, block_rows).places:
        assert_total(run(case, block_rows), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_inputs_are_split(dtype: torch.dtype) -> None:
    case = make_lora_case(
        dtype, d_in=2 * prefill.SLICE + 40, d_outs=(30, 8), ranks=[[16, 20], [3, 0]], slots=[0, 1], rows=[3, 2]
    )
    assert_total(run(case), case)


@pytest.mark.parametrize("rank", [1, 2, 7, 15, 16, 17, 32, 63, 64, 65, 128, 255, 256])
def test_every_rank(rank: int) -> None:
    case = make_lora_case(EXACT, ranks=[[rank, 0, rank], [4, 4, 4]], slots=[0, 1], rows=[2, 1])
    assert_total(run(case), case)


@pytest.mark.parametrize("rows", [1, 64, 65, 127, 128, 129])
def test_blocks_of_every_length(rows: int) -> None:
    case = make_lora_case(EXACT, d_in=40, d_outs=(24,), ranks=[[4], [9]], slots=[1, -1, 0], rows=[rows, 2, 1])
    assert_total(run(case), case)


def test_aligned_offsets_change_no_bit() -> None:
    case = make_lora_case(
        DTYPES[-1], d_in=128, d_outs=(64, 32, 96), ranks=[[4, 20, 16], [8, 8, 0]], slots=[0, 1], rows=[2, 9]
    )
    assert torch.equal(run(aligned(case), align=8), run(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", [SMALL, MIXED] if HAS_GPU else [SMALL], ids=str)
def test_a_row_has_the_same_bits_beside_any_others(mix: dict[str, Any], dtype: torch.dtype) -> None:
    """In the mix of several chunks a row's products are larger than alone: the same on a GPU, but not for numpy."""
    case = make_lora_case(dtype, **mix)
    together = run(case)
    for row in (0, 2, 3, 5, 22, 24):
        one = alone(case, row)
        got = run(one)[0] if count_blocks(one.lora, PREFILL_ROWS).places else one.y[0]
        assert torch.equal(got, together[row]), row


# ---------------------------------------------------------------------- operations that expand
def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """v is rounded, so errors follow the largest value."""
    error = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert error <= NEAR[got.dtype]


def without_adapter(case: LoraCase) -> torch.Tensor:
    """Rows [rows] that no adapter touches."""
    return ~covered(case).any(dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 100])
def test_silu_and_mul(width: int, dtype: torch.dtype) -> None:
    ranks = [[16, 8], [33, 0], [0, 70]]
    case = make_lora_case(dtype, d_outs=(width, width), ranks=ranks, slots=[0, -1, 1, 2], rows=[3, 2, 65, 2])
    rows = case.y.shape[0]
    y = case.y.to(DEVICE)
    got, plain = (torch.full((rows, width), NAN, dtype=dtype, device=DEVICE) for _ in range(2))
    prefill.silu_and_mul(y, shrink(case), got)
    wanted = torch.empty(rows, width, dtype=dtype)
    REFERENCE.silu_and_mul(total(case), wanted)
    assert_near(got.cpu(), wanted)
    glue.silu_and_mul(y, None, plain)
    base = without_adapter(case)
    assert torch.equal(got.cpu()[base], plain.cpu()[base])


def _rope_case(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[LoraCase, KvBatch]:
    outs = (heads * dim, kv_heads * dim, kv_heads * dim)
    case = make_lora_case(dtype, d_outs=outs, **MIXED)
    kv = make_kv_batch(
        dtype, layers=2, kv_heads=kv_heads, head_dim=dim, page_tokens=16, lengths=[5, 40, 18], new_rows=[3, 19, 3]
    )
    return case, kv


def _rope(
    qkv: torch.Tensor,
    delta: LoraDelta | None,
    shape: AttentionShape,
    rope: RopeTable,
    norms: HeadNorms | None,
    kv: KvBatch,
    tiles: prefill.PrefillTiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv and pages after it, on the CPU."""
    pages, qkv = kv.pages.to(DEVICE).clone(), qkv.to(DEVICE).clone()
    page = kv.page_table[kv.row_seq.long(), kv.row_pos.long() // 16].int()
    if norms is not None:
        norms = HeadNorms(norms.q_weight.to(DEVICE), norms.k_weight.to(DEVICE), norms.eps)
    where = [values.to(DEVICE) for values in (page, (kv.row_pos % 16).int(), kv.row_pos)]
    rope = rope.to(torch.device(DEVICE))
    if delta is None:
        glue.rope_and_store(qkv, None, shape, rope, norms, pages[:, 1, 0], pages[:, 1, 1], *where)
    else:
        prefill.rope_and_store(qkv, delta, shape, rope, norms, pages[:, 1, 0], pages[:, 1, 1], *where, tiles)
    return qkv.cpu(), pages.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (9, 3, 48), (3, 1, 16)])
def test_rope_and_store(heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5, 0)
    case, kv = _rope_case(heads, kv_heads, dim, dtype)
    rope = RopeTable(randn(64, dim // 2, dtype=torch.float32, seed=6), randn(64, dim // 2, dtype=torch.float32, seed=7))
    weights = [randn(dim, dtype=dtype, seed=seed) for seed in (8, 9)]
    norms = HeadNorms(weights[0], weights[1], 1e-5) if normed else None
    got, pages = _rope(case.y, shrink(case), shape, rope, norms, kv)
    wanted, theirs = total(case), replace(kv, pages=kv.pages.clone())
    REFERENCE.rope_and_store(wanted, 1, shape, rope, norms, theirs)
    q_width, mask = heads * dim, theirs.pages.isnan()
    assert_near(got[:, :q_width], wanted[:, :q_width])
    assert torch.equal(pages.isnan(), mask)
    assert_near(pages[~mask], theirs.pages[~mask])
    plain, plain_pages = _rope(case.y, None, shape, rope, norms, kv)
    base = without_adapter(case)
    assert torch.equal(got[base, :q_width], plain[base, :q_width])
    at = kv.page_table[kv.row_seq.long(), kv.row_pos.long() // 16].long()[base], kv.row_pos.long()[base] % 16
    assert torch.equal(pages[at[0], 1, :, at[1]], plain_pages[at[0], 1, :, at[1]])


def same_inputs(case: LoraCase, x: torch.Tensor) -> LoraCase:
    """The case with inputs that do not follow from how many weights were drawn before."""
    y = randn(*case.y.shape, dtype=case.y.dtype, seed=2)
    return replace(case, x=x, y=y, lora=replace(case.lora, scale=torch.full_like(case.lora.scale, 2.0)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tiles_and_deeper_neighbours_change_no_bit_of_what_expands(dtype: torch.dtype) -> None:
    """A row of one chunk alone runs with narrow tiles and products of 16 ranks, beside a deep adapter with others."""
    heads, kv_heads, dim, width = 8, 2, 128, 1024
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5, 0)
    rope = RopeTable(randn(64, dim // 2, dtype=torch.float32, seed=6), randn(64, dim // 2, dtype=torch.float32, seed=7))
    outs = (heads * dim, kv_heads * dim, kv_heads * dim)
    for ranks in ([16, 8, 4], [16, 16, 16]):
        seen = []
        for deep in (7, 64, 128):
            sizes = {"d_in": 2048, "ranks": [ranks, [deep] * 3], "slots": [0, 1], "rows": [3, 20]}
            x = randn(23, 2048, dtype=dtype, seed=1)
            case = aligned(make_lora_case(dtype, d_outs=outs, **sizes))
            case = same_inputs(case, x)
            kv = make_kv_batch(
                dtype, layers=2, kv_heads=kv_heads, head_dim=dim, page_tokens=16, lengths=[5, 40], new_rows=[3, 20]
            )
            for tiles in (None, prefill.TILES, prefill.NARROW_TILES):
                qkv, _ = _rope(case.y, shrink(case, align=8), shape, rope, None, kv, tiles)
                two = sizes | {"ranks": [ranks[:2], [deep] * 2]}
                pair = aligned(make_lora_case(dtype, d_outs=(width, width), **two))
                pair = same_inputs(pair, x)
                out = torch.empty(23, width, dtype=dtype, device=DEVICE)
                prefill.silu_and_mul(pair.y.to(DEVICE), shrink(pair, align=8), out, tiles)
                seen.append((qkv[:3, : heads * dim], out[:3].cpu()))
        for qkv, out in seen[1:]:
            assert torch.equal(qkv, seen[0][0])
            assert torch.equal(out, seen[0][1])


def test_row_without_a_page_stores_nothing() -> None:
    case = make_lora_case(EXACT, d_outs=(32, 16, 16), ranks=[[4, 4, 4]], slots=[0], rows=[2])
    shape = AttentionShape(2, 1, 16, 0.25, 0)
    pages = torch.full((2, 1, 2, 16, 1, 16), NAN, dtype=EXACT, device=DEVICE)
    zeros = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    rope = RopeTable(torch.ones(4, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE))
    where = (pages[:, 0, 0], pages[:, 0, 1], zeros - 1, zeros, zeros)
    prefill.rope_and_store(case.y.to(DEVICE), shrink(case), shape, rope, None, *where)
    assert pages.isnan().all()


def test_negative_zero_keeps_its_sign_where_no_adapter_is() -> None:
    case = make_lora_case(EXACT, d_outs=(16, 16), ranks=[[4, 0]], slots=[0, -1], rows=[1, 1])
    y = torch.full_like(case.y, -0.0).to(DEVICE)
    prefill.add(y, shrink(case))
    assert torch.signbit(y[1]).all()
    assert torch.signbit(y[0, 16:]).all()


# ---------------------------------------------------------------------- tables
def test_blocks_cover_all_rows_and_entries_are_of_adapters() -> None:
    ranks = [[0, 40, 3], [0, 0, 16], [0, 0, 0]]
    case = make_lora_case(torch.float32, ranks=ranks, slots=[1, 0, -1, 2, 1], rows=[1, 17, 2, 1, 1])
    counts = count_blocks(case.lora, 16)
    assert (counts.blocks, counts.entries, counts.places, counts.chunks) == (6, 4, 8, 3)
    tables = RowBlocks.empty(6, 6, 4)
    plan_blocks(case.lora, 16, tables)
    assert tables.blocks[:, :5].tolist() == [
        [0, 1, 3, 1, 0],
        [1, 16, 0, 3, 1],
        [17, 1, 0, 3, 4],
        [18, 2, 0, 0, 7],
        [20, 1, 4, 0, 7],
        [21, 1, 3, 1, 7],
    ]
    packed = tables.entries[:, 2:5, 5]
    assert (packed >> 8 & 0xFF).T.tolist() == [[0] * 4, [16, 16, 8, 0], [3, 0, 0, 16]]
    assert (packed >> 16).T.tolist() == [[0] * 4, [3, 0, 0, 0], [1, 0, 0, 1]]


def test_what_does_not_fit_is_refused() -> None:
    case = make_lora_case(torch.float32, ranks=[[40, 40, 40]], slots=[0], rows=[1])
    with pytest.raises(AssertionError, match="in tables for 2 entries"):
        plan_blocks(case.lora, 16, RowBlocks.empty(6, 4, 2))
    with pytest.raises(AssertionError, match="offsets that are not multiples of 8"):
        plan_blocks(case.lora, 16, RowBlocks.empty(6, 4, 8, align=8))
    bound = bind(case)
    with pytest.raises(AssertionError, match="partial sums in a buffer of 3"):
        prefill.shrink(case.x, case.sites, replace(bound, part=bound.part[:3]))
    with pytest.raises(AssertionError, match="elements of v in a buffer of 3"):
        prefill.shrink(case.x, case.sites, replace(bound, v=bound.v[:3]))


# ---------------------------------------------------------------------- sizes of a model
@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_at_a_model_s_sizes(dtype: torch.dtype) -> None:
    ranks = [[16, 16, 16], [64, 64, 64], [40, 3, 200], [16, 16, 16]]
    case = aligned(
        make_lora_case(
            dtype, d_in=4096, d_outs=(1024, 512, 512), ranks=ranks, slots=[0, -1, 1, 2, 3], rows=[1, 70, 130, 5, 128]
        )
    )
    want = run(case, align=8)
    assert_total(want, case)
    for row in (0, 1, 71, 140, 200, 203, 206, 269, 333):
        one = alone(case, row)
        got = run(one, align=8)[0] if count_blocks(one.lora, PREFILL_ROWS).places else one.y[0]
        assert torch.equal(got, want[row]), row

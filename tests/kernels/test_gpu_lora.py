"""The LoRA kernels against the specification's row loop: in Triton's interpreter on the CPU, compiled on a GPU."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from loraplex.kernels.gpu import (
    DECODE_ROWS,
    BoundLora,
    WorkItems,
    choose_tiles,
    lora_delta,
    partial_sums,
    plan_items,
)

from .cases import LoraCase, assert_close, make_lora_case
from .test_lora import CASES

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# bfloat16 products are wrong in the interpreter, and long inputs slow.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
NAMES = [name for name in CASES if HAS_GPU or name not in ("long segments", "wide outputs", "rank above 256")]
OTHER_ROWS = 16  # another size of block than DECODE_ROWS
NAN = float("nan")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


def plan(case: LoraCase, block_rows: int, *, capacity: int = 96, align: int = 1) -> tuple[WorkItems, int]:
    num_sites = case.lora.chunk_start.shape[1] - 1
    items = WorkItems.empty(num_sites, capacity, max_rows=128, align=align)
    return items, plan_items(case.lora, case.x.shape[0], block_rows, items)


def bind(
    case: LoraCase, block_rows: int = DECODE_ROWS, num_programs: int | None = None, *, align: int = 1
) -> BoundLora:
    host, longest = plan(case, block_rows, align=align)
    items = WorkItems.empty(host.table.shape[1], host.capacity, 128, DEVICE, align=align)
    items.table[longest:] = -1  # what is not in a list must not be read
    items.copy_(host, longest)
    part = torch.full((partial_sums([case.sites], host.capacity, block_rows),), NAN, device=DEVICE)
    return BoundLora(case.lora.pages.to(DEVICE), items, part, block_rows, num_programs or longest)


def run(
    case: LoraCase,
    block_rows: int = DECODE_ROWS,
    num_programs: int | None = None,
    *,
    pdl: bool = False,
    align: int = 1,
    several: bool = False,
) -> torch.Tensor:
    """delta [rows, width], NaN where nothing was written."""
    tiles = replace(choose_tiles(case.sites[0].d_in, several=several), shrink_pdl=pdl, expand_pdl=pdl)
    delta = torch.full_like(case.y, NAN, device=DEVICE)
    bound = bind(case, block_rows, num_programs, align=align)
    lora_delta(delta, case.x.to(DEVICE), case.sites, bound, tiles)
    return delta.cpu()


def covered(case: LoraCase) -> torch.Tensor:
    """Where a row's adapter has a module, by the list of adapters [rows, width]."""
    mask = torch.zeros(case.y.shape, dtype=torch.bool)
    starts = case.lora.seg_start.tolist()
    for segment, slot in enumerate(case.lora.seg_slot.tolist()):
        for site in case.sites:
            if (slot, site.index) in case.a:
                rows = slice(starts[segment], starts[segment + 1])
                mask[rows, site.out_offset : site.out_offset + site.d_out] = True
    return mask


def alone(case: LoraCase, row: int) -> LoraCase:
    """One row of a case and its adapter, nothing else."""
    segment = int(torch.searchsorted(case.lora.seg_start, row, right=True)) - 1
    starts, slots = torch.tensor([0, 1], dtype=torch.int32), case.lora.seg_slot[segment : segment + 1]
    lora = replace(case.lora, seg_start=starts, seg_slot=slots)
    return replace(case, x=case.x[row : row + 1], y=case.y[row : row + 1], lora=lora)


def aligned(case: LoraCase) -> LoraCase:
    """The same adapters at multiples of 8 elements, in a pool of NaN."""
    lora = case.lora
    sites = {site.index: site for site in case.sites}
    new_a, new_b, cursor = lora.chunk_a.clone(), lora.chunk_b.clone(), 16
    pages = torch.full((2 * len(lora.pages),), NAN, dtype=lora.pages.dtype)
    for slot, starts in enumerate(lora.chunk_start.tolist()):
        for index, site in sites.items():
            for chunk in range(starts[index], starts[index + 1]):
                for offsets, width in ((new_a, site.d_in), (new_b, site.d_out)):
                    size = int(lora.chunk_rank[chunk]) * width
                    pages[cursor : cursor + size] = lora.pages[offsets[chunk] : offsets[chunk] + size]
                    offsets[chunk] = cursor
                    cursor += -(-size // 8) * 8 + 8
        assert slot < len(lora.scale)
    return replace(case, lora=replace(lora, pages=pages, chunk_a=new_a, chunk_b=new_b))


def assert_delta(got: torch.Tensor, case: LoraCase, dtype: torch.dtype) -> None:
    """Right where an adapter is, untouched where there is none, and nothing read that was NaN."""
    mask = covered(case)
    assert torch.equal(torch.isnan(got), ~mask)
    exact = case.exact() - case.y.double()
    if mask.any():
        assert_close(torch.where(mask, got.double(), 0.0), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_rows", [DECODE_ROWS, OTHER_ROWS])
def test_delta_equals_the_row_loop(name: str, dtype: torch.dtype, block_rows: int) -> None:
    case = make_lora_case(dtype, **CASES[name])
    assert_delta(run(case, block_rows), case, torch.bfloat16 if dtype is not torch.float32 else dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_rows", [DECODE_ROWS, OTHER_ROWS])
def test_long_inputs_are_split(dtype: torch.dtype, block_rows: int) -> None:
    case = make_lora_case(dtype, d_in=1200, d_outs=(300, 8), ranks=[[16, 20], [3, 0]], slots=[0, 1], rows=[3, 2])
    assert_delta(run(case, block_rows), case, torch.bfloat16 if dtype is not torch.float32 else dtype)


@pytest.mark.parametrize("rank", [1, 2, 7, 8, 15, 16, 17, 32, 64, 128, 255, 256])
def test_every_rank(rank: int) -> None:
    case = make_lora_case(torch.float32, ranks=[[rank, 0, rank], [4, 4, 4]], slots=[0, 1], rows=[2, 1])
    assert_delta(run(case), case, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [[16, 20, 4], [33, 16, 0], [64, 5, 48], [256, 17, 32]])
def test_two_chunks_at_once_change_no_bit(ranks: list[int], dtype: torch.dtype) -> None:
    case = make_lora_case(dtype, d_outs=(300, 24, 140), ranks=[ranks, [4, 4, 4]], slots=[0, -1, 1], rows=[9, 1, 2])
    got = run(case, several=True)
    assert_delta(got, case, torch.bfloat16 if dtype is not torch.float32 else dtype)
    assert torch.equal(got.nan_to_num(7.0), run(case).nan_to_num(7.0))


@pytest.mark.parametrize("align", [1, 8])
def test_aligned_offsets_change_no_bit(align: int) -> None:
    case = make_lora_case(
        torch.float16, d_in=128, d_outs=(64, 32, 96), ranks=[[4, 20, 16], [8, 8, 0]], slots=[0, 1], rows=[2, 9]
    )
    assert torch.equal(run(aligned(case), align=align).nan_to_num(7.0), run(case).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d_in", [72, 640])
def test_a_row_has_the_same_bits_beside_any_others(d_in: int, dtype: torch.dtype) -> None:
    ranks = [[16, 8, 4], [33, 16, 2], [5, 5, 5]]
    case = make_lora_case(dtype, d_in=d_in, ranks=ranks, slots=[0, 1, -1, 2], rows=[1, 11, 2, 3])
    together = run(case)
    for row in (0, 1, 8, 11, 14, 16):
        for num_programs in (1, 3):
            got = run(alone(case, row), num_programs=num_programs)[0]
            assert torch.equal(got.nan_to_num(7.0), together[row].nan_to_num(7.0)), (row, num_programs)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_any_size_give_the_same_bits(dtype: torch.dtype) -> None:
    ranks = [[16, 8, 4], [33, 16, 2]]
    case = make_lora_case(dtype, d_in=600, ranks=ranks, slots=[0, -1, 1], rows=[1, 1, 19])
    assert torch.equal(run(case, OTHER_ROWS).nan_to_num(7.0), run(case).nan_to_num(7.0))


@pytest.mark.parametrize("num_programs", [1, 2, 5, 96])
def test_any_number_of_programs_gives_the_same_bits(num_programs: int) -> None:
    case = make_lora_case(torch.float32, ranks=[[4, 20, 0], [8, 8, 8]], slots=[0, -1, 1], rows=[9, 1, 1])
    for block_rows in (DECODE_ROWS, OTHER_ROWS):
        got = run(case, block_rows, num_programs)
        assert torch.equal(got.nan_to_num(7.0), run(case, block_rows).nan_to_num(7.0))


def test_items_follow_what_exists() -> None:
    case = make_lora_case(torch.float32, ranks=[[0, 40, 3], [0, 0, 16]], slots=[1, 0, -1], rows=[1, 17, 2])
    items, longest = plan(case, 16)
    first = case.sites[0].index
    assert longest == 7  # a block of one chunk, two blocks of three
    assert items.count.tolist() == [0, 0, 0, 7, 5, 0]
    packed = items.table[:longest, first : first + 3, 5]
    assert (packed >> 8 & 0xFF).T.tolist() == [[0] * 7, [0, 16, 16, 8, 16, 16, 8], [16, 3, 0, 0, 3, 0, 0]]
    assert (packed >> 16).T.tolist() == [[0] * 7, [0, 3, 0, 0, 3, 0, 0], [1, 1, 0, 0, 1, 0, 0]]
    assert (packed & 0xFF)[:, 2].tolist() == [1, 16, 16, 16, 1, 1, 1]
    assert items.table[:longest, first, 4].tolist() == [0, 1, 1, 1, 17, 17, 17]


@pytest.mark.parametrize("name", CASES)
def test_covered_says_which_rows_have_a_module(name: str) -> None:
    case = make_lora_case(torch.float32, **CASES[name])
    items, _ = plan(case, DECODE_ROWS, capacity=200)
    items.covered[:] = 1
    plan_items(case.lora, case.x.shape[0], DECODE_ROWS, items)
    mask = covered(case)
    for site in case.sites:
        rows = items.covered[site.index]
        assert rows[: len(mask)].tolist() == mask[:, site.out_offset].int().tolist()
        assert not rows[len(mask) :].any()


def test_what_does_not_fit_is_refused() -> None:
    case = make_lora_case(torch.float32, ranks=[[40, 40, 40]], slots=[0], rows=[1])
    with pytest.raises(AssertionError, match="3 work items at a site in lists for 2"):
        plan(case, 16, capacity=2)
    with pytest.raises(AssertionError, match="1 rows in tables for 0"):
        plan_items(case.lora, 1, 16, WorkItems.empty(6, 4, max_rows=0))
    with pytest.raises(AssertionError, match="offsets that are not multiples of 8"):
        plan(case, 16, align=8)
    bound = bind(case)
    with pytest.raises(AssertionError, match="partial sums in a buffer of 3"):
        lora_delta(case.y, case.x, case.sites, replace(bound, part=bound.part[:3]))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_dependent_launch_changes_no_bit(name: str) -> None:
    case = make_lora_case(torch.bfloat16, **CASES[name])
    assert torch.equal(run(case, pdl=True).nan_to_num(7.0), run(case).nan_to_num(7.0))
    assert torch.equal(run(case, pdl=True, several=True).nan_to_num(7.0), run(case).nan_to_num(7.0))


def _large(slots: Sequence[int], rows: Sequence[int]) -> LoraCase:
    ranks = [[16, 16], [8, 16], [40, 3]]
    case = make_lora_case(
        torch.bfloat16, d_in=4096, d_outs=(1024, 512), ranks=ranks, slots=list(slots), rows=list(rows)
    )
    return aligned(case)


@pytest.mark.gpu
@needs_gpu
def test_bits_at_a_model_s_sizes() -> None:
    case = _large([0, 1, 2], [1, 70, 5])
    want = run(case, align=8)
    assert_delta(want, case, torch.bfloat16)
    assert torch.equal(run(case, OTHER_ROWS, align=8), want)
    assert torch.equal(run(case, align=8, several=True), want)
    for row in (0, 1, 70, 73):
        assert torch.equal(run(alone(case, row), align=8)[0], want[row])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_one_graph_serves_changing_mixes(pdl: bool) -> None:
    more = [0, 1, 2, 3], [1, 1, 1, 1]
    mixes = [more, ([-1, 2], [2, 2]), ([3], [4]), ([-1], [4]), ([1, 0], [3, 1]), ([0, -1, 3], [1, 1, 2]), more]
    ranks = [[4, 4, 4], [16, 0, 16], [33, 8, 1], [0, 64, 5]]
    cases = [make_lora_case(torch.bfloat16, ranks=ranks, slots=slots, rows=rows) for slots, rows in mixes]
    live = bind(cases[0], num_programs=2)
    x, delta = cases[0].x.clone().to(DEVICE), torch.empty_like(cases[0].y, device=DEVICE)
    tiles = replace(choose_tiles(cases[0].sites[0].d_in), shrink_pdl=pdl, expand_pdl=pdl)
    lora_delta(delta, x, cases[0].sites, live, tiles)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            lora_delta(delta, x, cases[0].sites, live, tiles)
    for case in cases:
        host, longest = plan(case, DECODE_ROWS)
        live.items.copy_(host, longest)
        x.copy_(case.x)
        delta.fill_(NAN)
        live.part.fill_(NAN)
        graph.replay()
        assert_delta(delta.cpu(), case, torch.bfloat16)

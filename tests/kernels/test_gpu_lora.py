"""The Triton kernels against the specification's row loop: in Triton's interpreter on the CPU, compiled on a GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from loraplex.kernels.gpu import add_lora, bind, lora, plan_items

from .cases import LoraCase, assert_close, make_lora_case
from .test_lora import CASES

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# bfloat16 products are wrong in the interpreter, and long inputs slow.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
NAMES = [name for name in CASES if HAS_GPU or name not in ("long segments", "wide outputs")]


def run(case: LoraCase, *, capacity: int | None = None, pdl: bool = False) -> torch.Tensor:
    batch = replace(case.lora, pages=case.lora.pages.to(DEVICE))
    y, x = case.y.clone().to(DEVICE), case.x.to(DEVICE)
    bound = bind(batch, y.shape[0], max_splits=8, capacity=capacity)
    tiles = replace(lora.choose_tiles(case.sites[0].d_in, bound.items.block_rows), pdl=pdl)
    add_lora(y, x, case.sites, bound, tiles)
    return y.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blocks", ["decode", "prefill"])
def test_add_lora_equals_the_row_loop(
    name: str, dtype: torch.dtype, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "PREFILL_FROM", 1 if blocks == "prefill" else 10**6)
    case = make_lora_case(dtype, **CASES[name])
    got = run(case)
    assert_close(got, case.exact(), torch.bfloat16 if dtype is not torch.float32 else dtype)
    untouched = case.exact() == case.y.double()
    assert torch.equal(got[untouched], case.y[untouched])


def test_fixed_capacity_changes_no_bit() -> None:
    case = make_lora_case(torch.float32, ranks=[[4, 20, 0], [8, 8, 8]], slots=[0, -1, 1], rows=[2, 1, 1])
    assert torch.equal(run(case, capacity=9), run(case))


def test_a_lone_row_does_not_depend_on_other_adapters() -> None:
    case = make_lora_case(torch.float32, ranks=[[16, 8, 4], [33, 64, 2], [5, 5, 5]], slots=[0, 1, 2], rows=[1, 1, 3])
    together = run(case)
    for row in (0, 1):
        alone = replace(case, x=case.x[row : row + 1], y=case.y[row : row + 1])
        starts, slots = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([row], dtype=torch.int32)
        alone.lora = replace(case.lora, seg_start=starts, seg_slot=slots)
        assert torch.equal(run(alone)[0], together[row])


def test_items_follow_what_exists() -> None:
    case = make_lora_case(torch.float32, ranks=[[0, 40, 3], [0, 0, 16]], slots=[1, 0, -1], rows=[1, 33, 2])
    items = plan_items(case.lora, block_rows=16)
    first = case.sites[0].index
    ranks = items.rank[first : first + 3]
    assert [int((row > 0).sum()) for row in ranks] == [0, 9, 4]  # 3 blocks by 3 chunks; 3 blocks and 1
    assert items.longest == 9
    assert items.chunks[first + 1].tolist() == [3, 0, 0, 3, 0, 0, 3, 0, 0]
    assert items.num_rows[first + 2, :4].tolist() == [1, 16, 16, 1]


def test_lists_too_short_for_a_mix_are_refused() -> None:
    case = make_lora_case(torch.float32, ranks=[[40, 40, 40]], slots=[0], rows=[1])
    with pytest.raises(AssertionError, match="3 work items at a site in lists for 2"):
        plan_items(case.lora, block_rows=16, capacity=2)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_dependent_launch_changes_no_bit(name: str) -> None:
    case = make_lora_case(torch.bfloat16, **CASES[name])
    assert torch.equal(run(case, pdl=True), run(case))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_one_graph_serves_changing_mixes() -> None:
    mixes = [([0, 1, 2, 3], [1, 1, 1, 1]), ([-1, 2], [2, 2]), ([3], [4]), ([-1], [4]), ([1, 0], [3, 1])]
    ranks = [[4, 4, 4], [16, 0, 16], [33, 8, 1], [0, 64, 5]]
    cases = [make_lora_case(torch.bfloat16, ranks=ranks, slots=slots, rows=rows) for slots, rows in mixes]
    pages = cases[0].lora.pages.to(DEVICE)
    bounds = [bind(replace(case.lora, pages=pages), 4, max_splits=8, capacity=16) for case in cases]
    x, y = cases[0].x.clone().to(DEVICE), cases[0].y.clone().to(DEVICE)
    add_lora(y, x, cases[0].sites, bounds[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_lora(y, x, cases[0].sites, bounds[0])
    live = bounds[0].items
    for case, bound in zip(cases, bounds, strict=True):
        for name in ("a", "b", "row", "num_rows", "rank", "chunks", "scale"):
            getattr(live, name).copy_(getattr(bound.items, name))
        x.copy_(case.x)
        y.copy_(case.y)
        graph.replay()
        assert_close(y.cpu(), case.exact(), torch.bfloat16)

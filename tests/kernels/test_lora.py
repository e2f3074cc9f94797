"""add_lora against the specification's row loop."""

from dataclasses import replace

import pytest
import torch

from loraplex.kernels import Ops

from .cases import LoraCase, assert_close, make_lora_case
from .conftest import native_ops

CASES = {
    "one row an adapter, mixed ranks": {
        "ranks": [[4, 4, 4], [8, 8, 8], [16, 16, 16], [33, 33, 33], [1, 1, 1]],
        "slots": [0, 1, 2, 3, 4],
        "rows": [1] * 5,
    },
    "base rows first": {"ranks": [[16, 16, 16]], "slots": [-1, 0], "rows": [3, 2]},
    "base rows between": {"ranks": [[5, 5, 5], [7, 7, 7]], "slots": [0, -1, 1], "rows": [4, 1, 2]},
    "missing sites": {"ranks": [[8, 0, 8], [0, 16, 0], [0, 0, 0]], "slots": [0, 1, 2], "rows": [2, 2, 2]},
    "different ranks inside one adapter": {"ranks": [[3, 64, 17]], "slots": [0], "rows": [5]},
    "empty segment": {"ranks": [[8, 8, 8], [8, 8, 8]], "slots": [0, 1, 0], "rows": [2, 0, 3]},
    "long segments": {"ranks": [[16, 16, 16], [40, 40, 40]], "slots": [0, 1], "rows": [37, 65]},
    "rank above 256": {"ranks": [[257, 4, 0]], "slots": [0], "rows": [2]},
    "odd sizes": {"d_in": 33, "d_outs": (17, 1, 50), "ranks": [[9, 2, 31]], "slots": [0], "rows": [6]},
    "wide outputs": {
        "d_in": 576,
        "d_outs": (1536, 1536),
        "ranks": [[16, 8], [64, 64]],
        "slots": [0, 1],
        "rows": [1, 9],
    },
    "small chunks": {"ranks": [[10, 10, 10]], "slots": [0], "rows": [3], "chunk_rank": 3},
    "slots out of order": {"ranks": [[4, 4, 4], [6, 6, 6], [8, 8, 8]], "slots": [2, 0], "rows": [1, 1]},
}


def run(ops: Ops, case: LoraCase) -> torch.Tensor:
    y = case.y.clone()
    ops.add_lora(y, case.x, case.sites, ops.bind_lora(case.lora))
    return y


@pytest.mark.parametrize("name", CASES)
def test_add_lora_equals_the_row_loop(name: str, ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = ops_and_dtype
    case = make_lora_case(dtype, **CASES[name])
    assert_close(run(ops, case), case.exact(), dtype)


@pytest.mark.parametrize("name", CASES)
def test_rows_and_sites_without_adapter_keep_their_bits(name: str, ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = ops_and_dtype
    case = make_lora_case(dtype, **CASES[name])
    touched = case.exact() != case.y.double()
    assert torch.equal(run(ops, case)[~touched], case.y[~touched])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    ops = native_ops()
    case = make_lora_case(torch.bfloat16, ranks=[[16, 8, 4], [33, 64, 2]], slots=[0, 1], rows=[37, 6])
    together = run(ops, case)
    for row, slot in ((0, 0), (5, 0), (36, 0), (37, 1), (42, 1)):
        seg = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([slot], dtype=torch.int32)
        alone = replace(case, x=case.x[row : row + 1], y=case.y[row : row + 1])
        alone.lora = replace(case.lora, seg_start=seg[0], seg_slot=seg[1])
        assert torch.equal(run(ops, alone)[0], together[row])


def test_non_finite_weights_stay_in_their_own_rows(ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = ops_and_dtype
    case = make_lora_case(dtype, ranks=[[8, 8, 8], [8, 8, 8]], slots=[0, 1], rows=[3, 3])
    clean = run(ops, case)
    first = int(case.lora.chunk_a[case.lora.chunk_start[1, 2]])
    case.lora.pages[first] = float("inf")
    poisoned = run(ops, case)
    assert torch.equal(poisoned[:3], clean[:3])
    assert not torch.isfinite(poisoned[3:]).all()

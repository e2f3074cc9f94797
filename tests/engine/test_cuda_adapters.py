"""Tables of steps of many rows: sent when the mix or its rows change, and grown when a step needs more."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from loraplex.engine.cuda_adapters import PromptAdapters
from loraplex.kernels.gpu import PREFILL_ROWS
from tests.kernels.cases import LoraCase, make_lora_case

RANKS = [[16, 8, 4], [33, 0, 20], [5, 7, 5]]
MANY = PREFILL_ROWS * 200


def make_adapters(case: LoraCase) -> PromptAdapters:
    return PromptAdapters(case.lora.pages, [case.sites], case.lora.chunk_start.shape[1] - 1, align=1)


def make_case(slots: list[int], rows: list[int], **settings: Any) -> LoraCase:
    return make_lora_case(torch.float32, **{"ranks": RANKS, **settings}, slots=slots, rows=rows)


def test_tables_are_sent_when_the_step_is_another() -> None:
    case = make_case([0, -1, 1], [20, 3, PREFILL_ROWS + 36])
    adapters = make_adapters(case)
    bound = adapters.bind(case.lora, "mix")
    assert (bound.counts.blocks, bound.counts.entries, bound.counts.places) == (4, 4, 7)
    assert bound.tables.blocks[:4, :2].tolist() == [[0, 20], [20, 3], [23, PREFILL_ROWS], [23 + PREFILL_ROWS, 36]]
    bound.tables.flat.zero_()
    assert not adapters.bind(case.lora, "mix").tables.flat.any()
    assert adapters.bind(case.lora, "other places in the pool").tables.flat.any()
    bound.tables.flat.zero_()
    other = make_case([0, -1, 1], [21, 2, PREFILL_ROWS + 36])
    assert adapters.bind(other.lora, "mix").tables.blocks[:2, :2].tolist() == [[0, 21], [21, 2]]


def test_tables_grow() -> None:
    case = make_case([0, -1, 1], [20, 3, 100])
    adapters = make_adapters(case)
    few = adapters.bind(case.lora, "mix")
    long = make_case([2, 1], [50, MANY])
    bound = adapters.bind(long.lora, "mix")
    assert bound.counts.blocks == 201
    assert bound.tables.blocks.shape[0] >= 201
    assert bound.part.numel() > few.part.numel()
    deep = make_case([0], [40], ranks=[[16 * 70, 3, 0]])
    tables = adapters.bind(deep.lora, "deep").tables
    assert tables.holds(201, 70)
    assert adapters.bind(long.lora, "mix").tables is tables

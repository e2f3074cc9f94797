"""What adapters of a step on CUDA are sent as: lists for few rows, tables for many; again when the step is another."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from loraplex.engine.cuda_adapters import MAX_ITEMS, PromptAdapters, split_short
from loraplex.kernels.gpu import DECODE_ROWS, PREFILL_ROWS, partial_sums
from tests.kernels.cases import LoraCase, make_lora_case

RANKS = [[16, 8, 4], [33, 0, 20], [5, 7, 5]]
MANY = PREFILL_ROWS * 200


def make_adapters(case: LoraCase) -> PromptAdapters:
    num_sites, part = case.lora.chunk_start.shape[1] - 1, torch.zeros(partial_sums([case.sites], 64, DECODE_ROWS))
    return PromptAdapters(case.lora.pages, [case.sites], num_sites, MANY + 100, 1, part)


def make_case(slots: list[int], rows: list[int], **settings: Any) -> LoraCase:
    return make_lora_case(torch.float32, **{"ranks": RANKS, **settings}, slots=slots, rows=rows)


def test_tables_are_sent_when_the_step_is_another() -> None:
    case = make_case([0, -1, 1], [20, 3, PREFILL_ROWS + 36])
    adapters = make_adapters(case)
    bound = adapters.bind(case.lora, "mix")
    assert bound.short is None
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


def test_adapters_of_few_rows_have_lists_and_no_blocks() -> None:
    case = make_case([-1, 0, 1, 2, 0, -1, 1], [4, 1, DECODE_ROWS, 0, 1, 2, DECODE_ROWS + 1])
    short, others = split_short(case.lora)
    assert short is not None
    assert short.seg_slot.tolist() == [-1, 0, 1, -1, 0, -1, -1]
    before = 4 + 1 + DECODE_ROWS
    assert others.seg_slot.tolist() == [-1, 2, -1, 1]
    assert others.seg_start.tolist() == [0, before, before, before + 3, before + 3 + DECODE_ROWS + 1]
    bound = make_adapters(case).bind(case.lora, "mix")
    assert bound.short is not None
    assert bound.short.several
    assert bound.tables.blocks[:3, :2].tolist() == [[0, before], [before, 3], [before + 3, DECODE_ROWS + 1]]


def test_sites_are_those_of_the_adapters_that_have_rows() -> None:
    ranks = [[16, 0, 4], [0, 8, 0], [5, 7, 5]]
    case = make_case([0, 1, 2], [1, 30, 0], ranks=ranks)
    bound = make_adapters(case).bind(case.lora, "mix")
    first, second, third = (site.index for site in case.sites)
    assert bound.adapted == {second}
    assert bound.short is not None
    assert bound.short.adapted == {first, third}
    assert bound.adapts(case.sites)
    assert not bound.short.adapts(case.sites[1:2])


def test_steps_without_few_rows_or_with_too_many_are_not_split() -> None:
    case = make_case([0, -1], [DECODE_ROWS + 1, 7])
    assert split_short(case.lora) == (None, case.lora)
    deep = make_case([0], [1], ranks=[[16 * (MAX_ITEMS + 1), 0, 0]], d_in=8, d_outs=(8, 8, 8))
    assert split_short(deep.lora) == (None, deep.lora)
    fits = make_case([0], [1], ranks=[[16 * 3, 0, 0]])
    short, others = split_short(fits.lora)
    assert short is not None
    assert others == replace(fits.lora, seg_start=others.seg_start, seg_slot=others.seg_slot)
    assert others.seg_slot.tolist() == [-1]

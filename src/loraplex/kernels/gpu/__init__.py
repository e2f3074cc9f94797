"""Gathered LoRA in Triton: shrink and expand over blocks of rows and rank chunks that lie anywhere in the page pool."""

from loraplex.kernels.gpu.blocks import BlockCounts, RowBlocks, count_blocks, plan_blocks
from loraplex.kernels.gpu.items import WorkItems, plan_items
from loraplex.kernels.gpu.lora import (
    DECODE_ROWS,
    PREFILL_ROWS,
    BoundLora,
    Tiles,
    choose_tiles,
    lora_delta,
    partial_sums,
)
from loraplex.kernels.gpu.prefill import WARM_CHUNKS, BoundPrefill
from loraplex.kernels.gpu.prefill import room as prefill_room

__all__ = [
    "DECODE_ROWS",
    "PREFILL_ROWS",
    "WARM_CHUNKS",
    "BlockCounts",
    "BoundLora",
    "BoundPrefill",
    "RowBlocks",
    "Tiles",
    "WorkItems",
    "choose_tiles",
    "count_blocks",
    "lora_delta",
    "partial_sums",
    "plan_blocks",
    "plan_items",
    "prefill_room",
]

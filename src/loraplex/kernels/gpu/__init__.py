"""Gathered LoRA in Triton: shrink and expand over blocks of rows and rank chunks that lie anywhere in the page pool."""

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

__all__ = [
    "DECODE_ROWS",
    "PREFILL_ROWS",
    "BoundLora",
    "Tiles",
    "WorkItems",
    "choose_tiles",
    "lora_delta",
    "partial_sums",
    "plan_items",
]

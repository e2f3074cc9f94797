"""Gathered LoRA in Triton: shrink and expand over blocks of rows and rank chunks that lie anywhere in the page pool."""

from loraplex.kernels.gpu.items import WorkItems, plan_items
from loraplex.kernels.gpu.lora import BoundLora, Tiles, add_lora, bind

__all__ = ["BoundLora", "Tiles", "WorkItems", "add_lora", "bind", "plan_items"]

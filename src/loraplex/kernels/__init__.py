"""Gathered LoRA and the other operations of a decoder. Knows tensors only."""

from loraplex.kernels.ops import GeluOps, Ops
from loraplex.kernels.reference import TorchOps
from loraplex.kernels.select import OpsChoice, choose_ops
from loraplex.kernels.types import (
    AttentionShape,
    HeadNorms,
    KvBatch,
    Linear,
    LoraBatch,
    LoraDelta,
    LoraSite,
    RopeTable,
)

__all__ = [
    "AttentionShape",
    "GeluOps",
    "HeadNorms",
    "KvBatch",
    "Linear",
    "LoraBatch",
    "LoraDelta",
    "LoraSite",
    "Ops",
    "OpsChoice",
    "RopeTable",
    "TorchOps",
    "choose_ops",
]

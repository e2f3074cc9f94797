"""Which implementation runs on a device and dtype, and why."""

from dataclasses import dataclass

import torch

from loraplex.kernels.ops import Ops
from loraplex.kernels.reference import TorchOps


@dataclass(frozen=True, slots=True)
class OpsChoice:
    """The operations to use; `note` says why not the native ones, for the log."""

    ops: Ops
    note: str | None = None


def choose_ops(device: torch.device, dtype: torch.dtype, num_threads: int) -> OpsChoice:
    """Native code for bfloat16 on a capable processor, torch elsewhere."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return OpsChoice(TorchOps(), f"native CPU kernels serve bfloat16 on the CPU, not {dtype} on {device}")
    from loraplex.kernels.cpu import NativeCpuOps
    from loraplex.kernels.native import NativeUnavailable

    try:
        return OpsChoice(NativeCpuOps(num_threads))
    except NativeUnavailable as error:
        return OpsChoice(TorchOps(), str(error))

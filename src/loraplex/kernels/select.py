"""Which implementation runs on a device and dtype, and why."""

import importlib.util
from dataclasses import dataclass

import torch

from loraplex.kernels.ops import Ops
from loraplex.kernels.reference import TorchOps
from loraplex.kernels.types import GPU_MAX_GROUP

GPU_HEAD_DIMS = (64, 128, 256)  # FlashInfer's
GPU_LEAST_CAPABILITY = 8


@dataclass(frozen=True, slots=True)
class OpsChoice:
    """The operations to use; `note` says why not the native ones, for the log."""

    ops: Ops
    note: str | None = None


def choose_ops(
    device: torch.device, dtype: torch.dtype, num_threads: int, head_dim: int = 64, group: int = 1, extras: str = ""
) -> OpsChoice:
    """Native code for bfloat16 on a capable processor, Triton and FlashInfer on a GPU, torch elsewhere.

    `extras`: what the base has beyond the common decoder, in words; the CUDA kernels lack it.
    """
    if device.type == "cuda":
        return _choose_on_cuda(device, dtype, head_dim, group, extras)
    if dtype is not torch.bfloat16:
        return OpsChoice(TorchOps(), f"native CPU kernels serve bfloat16 on the CPU, not {dtype} on {device}")
    from loraplex.kernels.cpu import NativeCpuOps
    from loraplex.kernels.native import NativeUnavailable

    try:
        return OpsChoice(NativeCpuOps(num_threads))
    except NativeUnavailable as error:
        return OpsChoice(TorchOps(), str(error))


def _choose_on_cuda(device: torch.device, dtype: torch.dtype, head_dim: int, group: int, extras: str) -> OpsChoice:
    slow = "; operations of torch run instead, many times slower"
    missing = [name for name in ("triton", "flashinfer") if importlib.util.find_spec(name) is None]
    if missing:
        return OpsChoice(TorchOps(), f"{' and '.join(missing)} not installed (pip install 'loraplex[cuda]'){slow}")
    if dtype not in (torch.bfloat16, torch.float16):
        return OpsChoice(TorchOps(), f"the CUDA kernels serve bfloat16 and float16, not {dtype}{slow}")
    if extras:
        return OpsChoice(TorchOps(), f"the CUDA kernels do not serve {extras}{slow}")
    if head_dim not in GPU_HEAD_DIMS:
        sizes = ", ".join(map(str, GPU_HEAD_DIMS))
        return OpsChoice(TorchOps(), f"the CUDA kernels serve heads of {sizes}, not {head_dim}{slow}")
    if group > GPU_MAX_GROUP:
        return OpsChoice(
            TorchOps(), f"the CUDA kernels serve {GPU_MAX_GROUP} query heads a key head, not {group}{slow}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < GPU_LEAST_CAPABILITY:
        return OpsChoice(
            TorchOps(), f"the CUDA kernels need compute capability {GPU_LEAST_CAPABILITY}.0, not {major}.{minor}{slow}"
        )
    from loraplex.kernels.gpu.ops import CudaOps

    return OpsChoice(CudaOps(device))

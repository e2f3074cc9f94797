"""An adapter after validation: exact weights for named sites of one base, held in host memory."""

from dataclasses import dataclass

from loraplex.core import AdapterDigest, BaseSite


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor inside the bytes of the artifact (never a memory map: files may be replaced under us)."""

    name: str  # as the file has it
    dtype: str  # safetensors name: "F32", "F16" or "BF16"
    shape: tuple[int, ...]
    data: memoryview  # little-endian, row-major


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """One LoRA pair: y += scale * (x A^T) B^T."""

    site: BaseSite
    rank: int
    scale: float  # alpha / r, or alpha / sqrt(r) for rsLoRA
    a: TensorView  # [rank, d_in]
    b: TensorView  # [d_out, rank]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A validated adapter version. `modules` is ordered as the base's sites."""

    digest: AdapterDigest
    modules: tuple[AdapterModule, ...]
    max_rank: int
    num_bytes: int  # of the LoRA tensors as stored
    targets: tuple[str, ...]  # distinct module names, e.g. ("q_proj", "v_proj")
    declared_base: str | None  # base_model_name_or_path of the config; not proof of anything

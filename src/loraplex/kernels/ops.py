"""The operations a decoder is made of. Two implementations: torch (`reference.py`) and native CPU code (`cpu.py`)."""

from typing import Protocol

from torch import Tensor

from loraplex.kernels.types import AttentionShape, HeadNorms, KvBatch, Linear, LoraBatch, LoraSite, RopeTable


class Ops(Protocol):
    """Outputs are written into `out`, `y` or `residual`, which the caller owns. All sums are kept in float32."""

    @property
    def name(self) -> str:
        """What runs, for the ready line and benchmarks."""
        ...

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, sites: tuple[LoraSite, ...] = ()) -> Linear:
        """Bring weight [d_out, d_in] into this implementation's layout. Done once, at load."""
        ...

    def bind_lora(self, batch: LoraBatch) -> LoraBatch:
        """Prepare the adapters of a step for `add_lora`."""
        ...

    def bind_kv(self, batch: KvBatch) -> KvBatch:
        """Prepare the sequences of a step for `rope_and_store` and `attention`."""
        ...

    def linear(self, x: Tensor, linear: Linear, out: Tensor) -> None:
        """out [rows, d_out] = x [rows, d_in] W^T + bias; out may be float32."""
        ...

    def add_lora(self, y: Tensor, x: Tensor, sites: tuple[LoraSite, ...], lora: LoraBatch) -> None:
        """y[rows, site] += scale * (x A^T) B where a segment has an adapter at a site; the rest keeps its bits.

        x [rows, d_in], y [rows, width of the fused output]. Rounds once, after the sum (Punica, arXiv 2310.18547, 4).
        """
        ...

    def add_rms_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual += delta, then out = residual / rms(residual) * weight. All [rows, hidden]."""
        ...

    def rope_and_store(
        self, qkv: Tensor, layer: int, shape: AttentionShape, rope: RopeTable, norms: HeadNorms | None, kv: KvBatch
    ) -> None:
        """Normalise heads (if `norms`), rotate q and k, write k and v to the pages; q stays in qkv, rotated.

        qkv [rows, (num_heads + 2 num_kv_heads) * head_dim].
        """
        ...

    def attention(self, qkv: Tensor, layer: int, shape: AttentionShape, kv: KvBatch, out: Tensor) -> None:
        """Causal attention of every row over its sequence's pages. out [rows, num_heads * head_dim]."""
        ...

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [rows, n] = silu(gate_up[:, :n]) * gate_up[:, n:]."""
        ...

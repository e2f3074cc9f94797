"""The operations a decoder is made of: in torch (`reference.py`), native CPU code (`cpu.py`) and on CUDA (`gpu`)."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from loraplex.kernels.types import AttentionShape, HeadNorms, KvBatch, Linear, LoraBatch, LoraDelta, LoraSite, RopeTable


class Ops(Protocol):
    """Outputs are written into `out`, `y` or `residual`, which the caller owns. All sums are kept in float32."""

    @property
    def name(self) -> str:
        """What runs, for the ready line and benchmarks."""
        ...

    @property
    def in_graphs(self) -> bool:
        """Whether steps are captured in CUDA graphs; batches then come bound (`gpu/ops.py`)."""
        ...

    @property
    def wide_residual(self) -> bool:
        """Whether the sum of all layers' outputs is kept in float32, else in the model's dtype."""
        ...

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> None:
        """out [rows, hidden] = table [vocab, hidden] at token_ids [rows] int64; out may be float32."""
        ...

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, sites: tuple[LoraSite, ...] = ()) -> Linear:
        """Bring weight [d_out, d_in] into this implementation's layout. Done once, at load."""
        ...

    def bind_lora(self, batch: LoraBatch) -> LoraBatch:
        """Prepare the adapters of a step for `linear`."""
        ...

    def bind_kv(self, batch: KvBatch) -> KvBatch:
        """Prepare the sequences of a step for `rope_and_store` and `attention`."""
        ...

    def linear(self, x: Tensor, linear: Linear, out: Tensor, lora: LoraBatch | None = None) -> LoraDelta | None:
        """out [rows, d_out] = x [rows, d_in] W^T + bias, plus scale * (x A^T) B at the sites of a row's adapter.

        What the adapters add may be left in the result instead, for the next operation to add: they then ran beside the
        product. Rows and sites without an adapter keep the base's bits. out may be float32 where there is no `lora`.
        """
        ...

    def add_rms_norm(
        self,
        residual: Tensor,
        update: Tensor | None,
        weight: Tensor,
        eps: float,
        out: Tensor,
        delta: LoraDelta | None = None,
    ) -> None:
        """residual += update (and its delta), then out = residual / rms(residual) * weight. All [rows, hidden].

        weight may be float32; out may be residual.
        """
        ...

    def final_norm(
        self,
        residual: Tensor,
        update: Tensor,
        rows: Tensor | None,
        weight: Tensor,
        eps: float,
        out: Tensor,
        delta: LoraDelta | None = None,
    ) -> None:
        """As `add_rms_norm`, of `rows` [len(out)] only (None: of all in order). residual may be left as it was."""
        ...

    def rope_and_store(
        self,
        qkv: Tensor,
        layer: int,
        shape: AttentionShape,
        rope: RopeTable,
        norms: HeadNorms | None,
        kv: KvBatch,
        delta: LoraDelta | None = None,
    ) -> None:
        """Normalise heads (if `norms`), rotate q and k, write k and v to the pages; q stays in qkv, rotated.

        qkv [rows, (num_heads + 2 num_kv_heads) * head_dim].
        """
        ...

    def attention(self, qkv: Tensor, layer: int, shape: AttentionShape, kv: KvBatch, out: Tensor) -> None:
        """Causal attention of every row over its sequence's pages. out [rows, num_heads * head_dim]."""
        ...

    def silu_and_mul(self, gate_up: Tensor, out: Tensor, delta: LoraDelta | None = None) -> None:
        """out [rows, n] = silu(gate_up[:, :n]) * gate_up[:, n:]."""
        ...


@runtime_checkable
class GeluOps(Ops, Protocol):
    """With what Gemma needs beyond `Ops`; not on CUDA."""

    def gelu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [rows, n] = gelu(gate_up[:, :n]) * gate_up[:, n:], with the tanh form of GeLU."""
        ...

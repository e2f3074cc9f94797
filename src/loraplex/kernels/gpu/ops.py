"""The operations on CUDA: dense products by cuBLAS, attention by FlashInfer, adapters and the rest in Triton.

A linear's adapters run beside its product on a second stream, into a buffer that the next operation adds. There is one
such buffer: a delta is read before the next linear begins. In steps of many rows only shrink runs beside the product,
and the next operation expands (`prefill.py`).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraplex.kernels.gpu import glue, prefill
from loraplex.kernels.gpu.lora import BoundLora, lora_delta
from loraplex.kernels.gpu.prefill import BoundPrefill
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


@dataclass(frozen=True, slots=True)
class KvPages:
    """Pages of every sequence of a step, one list after the other."""

    starts: Tensor  # [num_seqs + 1] int32 on the host
    last_len: Tensor  # [num_seqs] int32 on the host: tokens in each sequence's last page
    pages: Tensor  # [starts[-1]] int32 on the device


class Attention(Protocol):
    """One step's attention, planned (`attention.PagedAttention`, `decode_attention.DecodeAttention`)."""

    def run(self, q: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape, out: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class BoundKv:
    """Where a step's rows stand, on the device: `KvBatch.native` here."""

    row_page: Tensor  # [rows] int32: page of the row's own key and value; -1 stores none
    row_offset: Tensor  # [rows] int32: its place in that page
    row_pos: Tensor  # [rows] int32
    attention: Attention


_FEW_PROGRAMS = 16  # along a work list: adapters that take far less time than the product beside them
_LONG_PRODUCT_BYTES = 40 * 2**20  # of weights: a product that takes longer than a pause and two launches


class CudaOps:
    """bfloat16 and float16 on NVIDIA GPUs. Batches come bound: `native` is a BoundLora and a BoundKv.

    `reserve` before the first step. Nothing here waits for the device, so a step may be captured in a CUDA graph.
    """

    name = "Triton and FlashInfer on CUDA"
    in_graphs = True
    wide_residual = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._widest = 0
        self._delta: Tensor | None = None

    def reserve(self, max_rows: int, dtype: torch.dtype) -> None:
        """Room for what adapters add in a step of `max_rows` rows. After the last `prepare_linear`."""
        self._delta = torch.empty(max_rows * self._widest, dtype=dtype, device=self._device)

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> None:
        glue.embed(token_ids, table, out)

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, sites: tuple[LoraSite, ...] = ()) -> Linear:
        if sites:
            self._widest = max(self._widest, weight.shape[0])
        return Linear(weight.contiguous(), bias, weight.shape[1], weight.shape[0], sites)

    def bind_lora(self, batch: LoraBatch) -> LoraBatch:
        assert isinstance(batch.native, BoundLora | BoundPrefill), "the runner binds a step's adapters"
        return batch

    def bind_kv(self, batch: KvBatch) -> KvBatch:
        assert isinstance(batch.native, BoundKv), "the runner binds a step's sequences"
        return batch

    def linear(self, x: Tensor, linear: Linear, out: Tensor, lora: LoraBatch | None = None) -> LoraDelta | None:
        if lora is None or not linear.sites:
            self._product(x, linear, out)
            return None
        bound: BoundLora | BoundPrefill = lora.native
        if isinstance(bound, BoundPrefill) and not bound.adapts(linear.sites):
            self._product(x, linear, out)
            return None
        main = torch.cuda.current_stream(self._device)
        self._side.wait_stream(main)
        self._product(x, linear, out)
        with torch.cuda.stream(self._side):
            delta = self._delta_of(x, linear, out, bound)
        main.wait_stream(self._side)
        return delta

    def _delta_of(self, x: Tensor, linear: Linear, out: Tensor, bound: BoundLora | BoundPrefill) -> LoraDelta:
        """What adapters add to `linear`'s output, or v for the next operation to expand."""
        if isinstance(bound, BoundPrefill):
            return prefill.shrink(x, linear.sites, bound)
        assert self._delta is not None, "reserve comes first"
        values = self._delta[: out.numel()].view(out.shape)
        if bound.num_programs <= _FEW_PROGRAMS and linear.weight.nbytes >= _LONG_PRODUCT_BYTES:
            glue.pause(bound.items.count)
        lora_delta(values, x, linear.sites, bound)
        return LoraDelta(values, bound.items.covered, linear.sites)

    def _product(self, x: Tensor, linear: Linear, out: Tensor) -> None:
        if out.dtype is not x.dtype:
            assert linear.bias is None, "a wide output has no bias"
            torch.mm(x, linear.weight.T, out_dtype=out.dtype, out=out)
        elif linear.bias is None:
            torch.mm(x, linear.weight.T, out=out)
        else:
            torch.addmm(linear.bias, x, linear.weight.T, out=out)

    def add_rms_norm(
        self,
        residual: Tensor,
        update: Tensor | None,
        weight: Tensor,
        eps: float,
        out: Tensor,
        delta: LoraDelta | None = None,
    ) -> None:
        glue.add_rms_norm(residual, update, self._expanded(update, delta), weight, eps, out)

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
        glue.add_rms_norm(residual, update, self._expanded(update, delta), weight, eps, out, rows)

    def _expanded(self, update: Tensor | None, delta: LoraDelta | None) -> LoraDelta | None:
        """What is left to add to `update`: a norm needs whole rows, so v B is added to it in place before."""
        if delta is None or delta.shrunk is None:
            return delta
        assert update is not None
        prefill.add(update, delta)
        return None

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
        bound: BoundKv = kv.native
        keys, values = kv.pages[:, layer, 0], kv.pages[:, layer, 1]
        where = (bound.row_page, bound.row_offset, bound.row_pos)
        if delta is not None and delta.shrunk is not None:
            prefill.rope_and_store(qkv, delta, shape, rope, norms, keys, values, *where)
            return
        glue.rope_and_store(qkv, delta, shape, rope, norms, keys, values, *where)

    def attention(self, qkv: Tensor, layer: int, shape: AttentionShape, kv: KvBatch, out: Tensor) -> None:
        bound: BoundKv = kv.native
        q = qkv.view(qkv.shape[0], -1, shape.head_dim)[:, : shape.num_heads]
        keys, values = kv.pages[:, layer, 0], kv.pages[:, layer, 1]
        bound.attention.run(q, keys, values, shape, out.view(q.shape))

    def silu_and_mul(self, gate_up: Tensor, out: Tensor, delta: LoraDelta | None = None) -> None:
        if delta is not None and delta.shrunk is not None:
            prefill.silu_and_mul(gate_up, delta, out)
            return
        glue.silu_and_mul(gate_up, delta, out)

"""The operations through native CPU code, for bfloat16.

A row's bits depend on that row alone: not on how many rows, sequences or adapters share the call.
"""

import ctypes
import weakref
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from loraplex.kernels.native import load_library
from loraplex.kernels.reference import ADDED, TorchOps
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


class _LoraTables(Structure):
    _fields_ = (
        ("pool", c_void_p),
        ("seg_start", c_void_p),
        ("seg_slot", c_void_p),
        ("num_segments", c_int64),
        ("chunk_start", c_void_p),
        ("num_sites", c_int64),
        ("chunk_a", c_void_p),
        ("chunk_b", c_void_p),
        ("chunk_rank", c_void_p),
        ("scale", c_void_p),
    )


class _LoraSites(Structure):
    _fields_ = (
        ("count", c_int64),
        ("d_in", c_int64),
        ("site", c_void_p),
        ("d_out", c_void_p),
        ("out_offset", c_void_p),
    )


class _KvView(Structure):
    _fields_ = (
        ("pages", c_void_p),
        ("page_stride", c_int64),
        ("value_offset", c_int64),
        ("page_tokens", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("page_table", c_void_p),
        ("table_stride", c_int64),
    )


def _declare(lib: ctypes.CDLL) -> None:
    p, i, n, f = c_void_p, c_int64, c_int, c_float
    lib.lp_packed_elems.restype = c_int64
    lib.lp_pool_new.restype = c_void_p
    signatures = {
        "lp_pool_new": (n,),
        "lp_pool_free": (p,),
        "lp_packed_elems": (i, i),
        "lp_pack_weight": (p, p, i, i, p),
        "lp_gemm": (p, p, i, p, p, p, i, i, i, i, n),
        "lp_add_lora": (p, p, i, p, i, POINTER(_LoraTables), POINTER(_LoraSites)),
        "lp_attention": (p, p, i, p, i, POINTER(_KvView), i, p, p, i, i, f, f, n),
        "lp_add_rms_norm": (p, p, p, p, n, p, i, i, f),
        "lp_rope_and_store": (p, p, i, POINTER(_KvView), i, p, p, i, p, p, n, f, p, p, i),
        "lp_silu_and_mul": (p, p, p, i, i),
        "lp_gelu_and_mul": (p, p, p, i, i),
    }
    for name, types in signatures.items():
        getattr(lib, name).argtypes = types


class _BoundKv:
    """Views of one step's pages, a struct for each layer."""

    __slots__ = ("num_rows", "row_pos", "row_seq", "views")

    def __init__(self, batch: KvBatch) -> None:
        pages, table = batch.pages, batch.page_table
        layer_bytes = pages.stride(1) * pages.element_size()
        self.views = [
            _KvView(
                pages.data_ptr() + layer * layer_bytes,
                pages.stride(0),
                pages.stride(2),
                pages.shape[3],
                pages.shape[4],
                pages.shape[5],
                table.data_ptr(),
                table.stride(0),
            )
            for layer in range(pages.shape[1])
        ]
        self.row_seq = batch.row_seq.data_ptr()
        self.row_pos = batch.row_pos.data_ptr()
        self.num_rows = batch.row_pos.shape[0]


class NativeCpuOps:
    """bfloat16 on processors with AVX-512 BF16; the dense product needs AMX and goes through torch without it."""

    in_graphs = False
    wide_residual = False

    def __init__(self, num_threads: int) -> None:
        self._lib = load_library()
        _declare(self._lib)
        self._pool = self._lib.lp_pool_new(num_threads)
        # Not at interpreter exit: an engine's thread may still be inside.
        weakref.finalize(self, self._lib.lp_pool_free, self._pool).atexit = False
        self._has_amx = bool(self._lib.lp_has_amx())
        self._torch = TorchOps()
        self._sites: dict[tuple[LoraSite, ...], tuple[_LoraSites, list[Tensor]]] = {}
        self.name = "native CPU (AVX-512 BF16, AMX)" if self._has_amx else "native CPU (AVX-512 BF16)"

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> None:
        self._torch.embed(token_ids, table, out)

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, sites: tuple[LoraSite, ...] = ()) -> Linear:
        d_out, d_in = weight.shape
        if not self._packs(d_in):
            return self._torch.prepare_linear(weight, bias, sites)
        weight = weight.contiguous()
        packed = torch.empty(self._lib.lp_packed_elems(d_out, d_in), dtype=torch.bfloat16)
        self._lib.lp_pack_weight(self._pool, weight.data_ptr(), d_out, d_in, packed.data_ptr())
        return Linear(packed, bias, d_in, d_out, sites)

    def _packs(self, d_in: int) -> bool:
        return self._has_amx and d_in % 32 == 0

    def bind_lora(self, batch: LoraBatch) -> LoraBatch:
        tables = _LoraTables(
            batch.pages.data_ptr(),
            batch.seg_start.data_ptr(),
            batch.seg_slot.data_ptr(),
            batch.seg_slot.shape[0],
            batch.chunk_start.data_ptr(),
            batch.scale.shape[1],
            batch.chunk_a.data_ptr(),
            batch.chunk_b.data_ptr(),
            batch.chunk_rank.data_ptr(),
            batch.scale.data_ptr(),
        )
        return LoraBatch(
            batch.pages,
            batch.seg_start,
            batch.seg_slot,
            batch.chunk_start,
            batch.chunk_a,
            batch.chunk_b,
            batch.chunk_rank,
            batch.scale,
            tables,
        )

    def bind_kv(self, batch: KvBatch) -> KvBatch:
        return KvBatch(batch.pages, batch.page_table, batch.seq_start, batch.row_seq, batch.row_pos, _BoundKv(batch))

    def linear(self, x: Tensor, linear: Linear, out: Tensor, lora: LoraBatch | None = None) -> None:
        self._product(x, linear, out)
        if lora is not None:
            self.add_lora(out, x, linear.sites, lora)

    def _product(self, x: Tensor, linear: Linear, out: Tensor) -> None:
        if not self._packs(linear.d_in):
            self._torch.linear(x, linear, out)
            return
        bias = linear.bias.data_ptr() if linear.bias is not None else None
        status = self._lib.lp_gemm(
            self._pool,
            x.data_ptr(),
            x.stride(0),
            linear.weight.data_ptr(),
            bias,
            out.data_ptr(),
            out.stride(0),
            x.shape[0],
            linear.d_out,
            linear.d_in,
            out.dtype is torch.float32,
        )
        assert not status, f"lp_gemm refused shape {tuple(x.shape)} by {linear.d_out}"

    def _site_table(self, sites: tuple[LoraSite, ...]) -> _LoraSites:
        entry = self._sites.get(sites)
        if entry is None:
            columns = [
                torch.tensor(values, dtype=torch.int32)
                for values in zip(*((s.index, s.d_out, s.out_offset) for s in sites), strict=True)
            ]
            table = _LoraSites(len(sites), sites[0].d_in, *(column.data_ptr() for column in columns))
            entry = self._sites[sites] = (table, columns)
        return entry[0]

    def add_lora(self, y: Tensor, x: Tensor, sites: tuple[LoraSite, ...], lora: LoraBatch) -> None:
        """y[rows, site] += scale * (x A^T) B. Shapes: `Ops.linear`; y is the fused output."""
        self._lib.lp_add_lora(
            self._pool, y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), lora.native, self._site_table(sites)
        )

    def add_rms_norm(
        self,
        residual: Tensor,
        update: Tensor | None,
        weight: Tensor,
        eps: float,
        out: Tensor,
        delta: LoraDelta | None = None,
    ) -> None:
        assert delta is None, ADDED
        rows, width = residual.shape
        self._lib.lp_add_rms_norm(
            self._pool,
            residual.data_ptr(),
            update.data_ptr() if update is not None else None,
            weight.data_ptr(),
            weight.dtype is torch.float32,
            out.data_ptr(),
            rows,
            width,
            eps,
        )

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
        if rows is not None:
            residual, update = residual[rows], update[rows]
        self.add_rms_norm(residual, update, weight, eps, out, delta)

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
        assert delta is None, ADDED
        bound: _BoundKv = kv.native
        self._lib.lp_rope_and_store(
            self._pool,
            qkv.data_ptr(),
            qkv.stride(0),
            bound.views[layer],
            shape.num_heads,
            rope.cosine.data_ptr(),
            rope.sine.data_ptr(),
            rope.cosine.shape[1],
            norms.q_weight.data_ptr() if norms else None,
            norms.k_weight.data_ptr() if norms else None,
            norms is not None and norms.q_weight.dtype is torch.float32,
            norms.eps if norms else 0.0,
            bound.row_seq,
            bound.row_pos,
            bound.num_rows,
        )

    def attention(self, qkv: Tensor, layer: int, shape: AttentionShape, kv: KvBatch, out: Tensor) -> None:
        bound: _BoundKv = kv.native
        self._lib.lp_attention(
            self._pool,
            qkv.data_ptr(),
            qkv.stride(0),
            out.data_ptr(),
            out.stride(0),
            bound.views[layer],
            shape.num_heads,
            bound.row_seq,
            bound.row_pos,
            bound.num_rows,
            shape.window,
            shape.scale,
            shape.softcap,
            self._has_amx,
        )

    def silu_and_mul(self, gate_up: Tensor, out: Tensor, delta: LoraDelta | None = None) -> None:
        assert delta is None, ADDED
        self._lib.lp_silu_and_mul(self._pool, gate_up.data_ptr(), out.data_ptr(), out.shape[0], out.shape[1])

    def gelu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = gelu(gate) * up, tanh form."""
        self._lib.lp_gelu_and_mul(self._pool, gate_up.data_ptr(), out.data_ptr(), out.shape[0], out.shape[1])

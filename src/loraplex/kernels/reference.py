"""Every operation in plain torch: the specification of the others, and the path of devices and dtypes without them."""

import torch
from torch import Tensor

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

ADDED = "adapters were added by the linear itself"


def add_lora(y: Tensor, x: Tensor, sites: tuple[LoraSite, ...], lora: LoraBatch) -> None:
    """y[segment, site] += scale * (x A^T) B, chunk by chunk, in float32. x [rows, d_in], y [rows, width].

    Rounds once, after the sum (Punica, arXiv 2310.18547, section 4).
    """
    starts, slots = lora.seg_start.tolist(), lora.seg_slot.tolist()
    for segment, slot in enumerate(slots):
        if slot < 0:
            continue
        rows = slice(starts[segment], starts[segment + 1])
        for site in sites:
            first, last = lora.chunk_start[slot, site.index : site.index + 2].tolist()
            if first == last:
                continue
            delta = _chunks_delta(x[rows].float(), site, lora, first, last)
            target = y[rows, site.out_offset : site.out_offset + site.d_out]
            target.copy_(target.float() + lora.scale[slot, site.index] * delta)


def _chunks_delta(x: Tensor, site: LoraSite, lora: LoraBatch, first: int, last: int) -> Tensor:
    """Sum over chunks of (x A^T) B, unscaled. x [rows, d_in] float32; result [rows, d_out] float32."""
    delta = x.new_zeros(x.shape[0], site.d_out)
    for chunk in range(first, last):
        rank = int(lora.chunk_rank[chunk])
        a_offset, b_offset = int(lora.chunk_a[chunk]), int(lora.chunk_b[chunk])
        a = lora.pages[a_offset : a_offset + rank * site.d_in].view(rank, site.d_in).float()
        b = lora.pages[b_offset : b_offset + rank * site.d_out].view(rank, site.d_out).float()
        delta += (x @ a.T) @ b
    return delta


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32; result float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding by halves of the first dims. x [rows, heads, head_dim] float32; cosine, sine [rows, half]."""
    half = cosine.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cosine[:, None], sine[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, shape: AttentionShape) -> Tensor:
    """One sequence. q [rows, heads, d], k and v [tokens, kv_heads, d], positions [rows]; result [rows, heads, d]."""
    groups = shape.num_heads // shape.num_kv_heads
    k = k.float().repeat_interleave(groups, dim=1)
    v = v.float().repeat_interleave(groups, dim=1)
    scores = torch.einsum("rhd,thd->hrt", q.float(), k) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    tokens = torch.arange(k.shape[0], device=q.device)
    hidden = tokens[None] > positions[:, None]
    if shape.window:
        hidden |= tokens[None] <= positions[:, None] - shape.window
    return torch.einsum("hrt,thd->rhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


class TorchOps:
    """The operations through torch, on any device and dtype."""

    name = "torch"
    in_graphs = False
    wide_residual = False

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> None:
        torch.index_select(table, 0, token_ids, out=out)

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, sites: tuple[LoraSite, ...] = ()) -> Linear:
        return Linear(weight, bias, weight.shape[1], weight.shape[0], sites)

    def bind_lora(self, batch: LoraBatch) -> LoraBatch:
        return batch

    def bind_kv(self, batch: KvBatch) -> KvBatch:
        return batch

    def linear(self, x: Tensor, linear: Linear, out: Tensor, lora: LoraBatch | None = None) -> None:
        out.copy_(torch.nn.functional.linear(x, linear.weight, linear.bias))
        if lora is not None:
            self.add_lora(out, x, linear.sites, lora)

    def add_lora(self, y: Tensor, x: Tensor, sites: tuple[LoraSite, ...], lora: LoraBatch) -> None:
        """y[rows, site] += scale * (x A^T) B. Shapes: `Ops.linear`; y is the fused output."""
        add_lora(y, x, sites, lora)

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
        if update is not None:
            residual += update
        out.copy_(rms_norm(residual, weight, eps))

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
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        q, k, v = heads.tensor_split((shape.num_heads, shape.num_heads + shape.num_kv_heads), dim=1)
        wide_q, wide_k = q.float(), k.float()
        if norms is not None:
            wide_q = rms_norm(q, norms.q_weight, norms.eps)
            wide_k = rms_norm(k, norms.k_weight, norms.eps)
        positions = kv.row_pos.long()
        cosine, sine = rope.cosine[positions], rope.sine[positions]
        q.copy_(rotate(wide_q, cosine, sine))
        page_tokens = kv.pages.shape[3]
        page = kv.page_table[kv.row_seq.long(), positions // page_tokens].long()
        offset = positions % page_tokens
        kv.pages[page, layer, 0, offset] = rotate(wide_k, cosine, sine).to(qkv.dtype)
        kv.pages[page, layer, 1, offset] = v

    def attention(self, qkv: Tensor, layer: int, shape: AttentionShape, kv: KvBatch, out: Tensor) -> None:
        q = qkv.view(qkv.shape[0], -1, shape.head_dim)[:, : shape.num_heads]
        result = out.view(out.shape[0], shape.num_heads, shape.head_dim)
        starts = kv.seq_start.tolist()
        for seq in range(len(starts) - 1):
            rows = slice(starts[seq], starts[seq + 1])
            positions = kv.row_pos[rows].long()
            num_tokens = int(positions[-1]) + 1
            used = kv.page_table[seq, : -(-num_tokens // kv.pages.shape[3])].long()
            keys, values = (kv.pages[used, layer, i].flatten(0, 1)[:num_tokens] for i in (0, 1))
            result[rows] = attend(q[rows], keys, values, positions, shape).to(out.dtype)

    def silu_and_mul(self, gate_up: Tensor, out: Tensor, delta: LoraDelta | None = None) -> None:
        assert delta is None, ADDED
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def gelu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = gelu(gate) * up, tanh form."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)

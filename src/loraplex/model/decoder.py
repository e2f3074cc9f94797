"""The decoder of all supported families: fused projections, pre-norm, rotary attention, gated MLP."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels import AttentionShape, HeadNorms, Linear, LoraBatch, Ops, RopeTable
from loraplex.model.batch import DeviceBatch
from loraplex.model.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; each linear carries its LoRA sites."""

    input_norm: Tensor  # [hidden]
    qkv: Linear
    output: Linear
    post_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear
    attention: AttentionShape
    head_norms: HeadNorms | None


class _Workspace:
    """Buffers of one step, allocated once for the most rows a step may have."""

    def __init__(self, config: DecoderConfig, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        def buffer(width: int) -> Tensor:
            return torch.empty(max_rows, width, dtype=dtype, device=device)

        self.residual = buffer(config.hidden_size)
        self.hidden = buffer(config.hidden_size)
        self.delta = buffer(config.hidden_size)
        self.qkv = buffer(config.q_size + 2 * config.kv_size)
        self.heads = buffer(config.q_size)
        self.gate_up = buffer(2 * config.intermediate_size)
        self.activated = buffer(config.intermediate_size)


def _apply(ops: Ops, linear: Linear, x: Tensor, out: Tensor, lora: LoraBatch | None) -> None:
    """out = x W^T + bias, plus each row's adapter."""
    ops.linear(x, linear, out)
    if lora is not None:
        ops.add_lora(out, x, linear.sites, lora)


class Decoder:
    """A base model on one device. `forward` is its only verb; adapters and pages come with the batch."""

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        embedding: Tensor,
        layers: tuple[DecoderLayer, ...],
        final_norm: Tensor,
        head: Linear,
        rope: RopeTable,
        max_rows: int,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding  # [vocab, hidden]
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.rope = rope
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.max_rows = max_rows
        self._workspace = _Workspace(config, max_rows, embedding.dtype, embedding.device)

    @torch.inference_mode()
    def forward(self, batch: DeviceBatch, on_layer: Callable[[], None] = lambda: None) -> Tensor:
        """Run a step and write its keys and values to the pages. Logits [num_logits, vocab] float32.

        `on_layer` is called before each layer: a sign of life in long steps.
        """
        rows, ops, work = batch.token_ids.shape[0], self.ops, self._workspace
        assert rows <= self.max_rows, f"{rows} rows in a step of at most {self.max_rows}"
        lora = ops.bind_lora(batch.lora) if batch.lora is not None else None
        kv = ops.bind_kv(batch.kv)
        residual, hidden, delta = work.residual[:rows], work.hidden[:rows], work.delta[:rows]
        qkv, heads = work.qkv[:rows], work.heads[:rows]
        gate_up, activated = work.gate_up[:rows], work.activated[:rows]
        torch.index_select(self.embedding, 0, batch.token_ids, out=residual)
        eps = self.config.rms_norm_eps
        for index, layer in enumerate(self.layers):
            on_layer()
            ops.add_rms_norm(residual, delta if index else None, layer.input_norm, eps, hidden)
            _apply(ops, layer.qkv, hidden, qkv, lora)
            ops.rope_and_store(qkv, index, layer.attention, self.rope, layer.head_norms, kv)
            ops.attention(qkv, index, layer.attention, kv, heads)
            _apply(ops, layer.output, heads, delta, lora)
            ops.add_rms_norm(residual, delta, layer.post_norm, eps, hidden)
            _apply(ops, layer.gate_up, hidden, gate_up, lora)
            ops.silu_and_mul(gate_up, activated)
            _apply(ops, layer.down, activated, delta, lora)
        return self._logits(residual, delta, batch.logit_rows)

    def _logits(self, residual: Tensor, delta: Tensor, wanted: Tensor) -> Tensor:
        logits = torch.empty(wanted.shape[0], self.config.vocab_size, dtype=torch.float32, device=self.device)
        if not wanted.shape[0]:
            return logits
        last, last_delta = residual[wanted], delta[wanted]
        normed = torch.empty_like(last)
        self.ops.add_rms_norm(last, last_delta, self.final_norm, self.config.rms_norm_eps, normed)
        self.ops.linear(normed, self.head, logits)
        return logits

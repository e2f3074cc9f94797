"""The decoder of all supported families: fused projections, pre-norm, rotary attention, gated MLP.

Gemma's further norms, GeLU, soft caps and scaled embeddings come in where a layer or the config has them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels import AttentionShape, GeluOps, HeadNorms, Linear, LoraDelta, Ops, RopeTable
from loraplex.model.batch import DeviceBatch
from loraplex.model.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; each linear carries its LoRA sites."""

    input_norm: Tensor  # [hidden]
    qkv: Linear
    output: Linear
    output_norm: Tensor | None  # [hidden]: of what attention adds
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear
    down_norm: Tensor | None  # [hidden]: of what the MLP adds
    attention: AttentionShape
    head_norms: HeadNorms | None
    rope: RopeTable


class _Workspace:
    """Buffers of one step, allocated once for the most rows a step may have."""

    def __init__(
        self,
        config: DecoderConfig,
        max_rows: int,
        dtype: torch.dtype,
        residual_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def buffer(width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(max_rows, width, dtype=dtype, device=device)

        self.residual = buffer(config.hidden_size, residual_dtype)
        self.hidden = buffer(config.hidden_size)
        self.update = buffer(config.hidden_size)
        self.qkv = buffer(config.q_size + 2 * config.kv_size)
        self.heads = buffer(config.q_size)
        self.gate_up = buffer(2 * config.intermediate_size)
        self.activated = buffer(config.intermediate_size)


class Decoder:
    """A base model on one device. `forward` is its only verb; adapters and pages come with the batch."""

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        head: Linear,
        max_rows: int,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding  # [vocab, hidden]
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.max_rows = max_rows
        self._gelu: GeluOps | None = None
        if config.family.activation != "silu":
            assert isinstance(ops, GeluOps), f"{ops.name} lacks GeLU"
            self._gelu = ops
        self._scale = _embedding_scale(config, embedding.dtype)
        residual_dtype = torch.float32 if ops.wide_residual else embedding.dtype
        self._workspace = _Workspace(config, max_rows, embedding.dtype, residual_dtype, embedding.device)

    @torch.inference_mode()
    def forward(
        self, batch: DeviceBatch, on_layer: Callable[[], None] = lambda: None, logits: Tensor | None = None
    ) -> Tensor:
        """Run a step and write its keys and values to the pages. Logits [num_logits, vocab] float32.

        They are written to `logits` if given. `on_layer` is called before each layer: a sign of life in long steps.
        """
        rows, ops, work = batch.token_ids.shape[0], self.ops, self._workspace
        assert rows <= self.max_rows, f"{rows} rows in a step of at most {self.max_rows}"
        lora = ops.bind_lora(batch.lora) if batch.lora is not None else None
        kv = ops.bind_kv(batch.kv)
        residual, hidden, update = work.residual[:rows], work.hidden[:rows], work.update[:rows]
        qkv, heads = work.qkv[:rows], work.heads[:rows]
        gate_up, activated = work.gate_up[:rows], work.activated[:rows]
        ops.embed(batch.token_ids, self.embedding, residual)
        if self._scale is not None:
            residual *= self._scale
        eps = self.config.rms_norm_eps
        delta: LoraDelta | None = None
        for index, layer in enumerate(self.layers):
            on_layer()
            ops.add_rms_norm(residual, update if index else None, layer.input_norm, eps, hidden, delta)
            delta = ops.linear(hidden, layer.qkv, qkv, lora)
            ops.rope_and_store(qkv, index, layer.attention, layer.rope, layer.head_norms, kv, delta)
            ops.attention(qkv, index, layer.attention, kv, heads)
            delta = ops.linear(heads, layer.output, update, lora)
            delta = self._norm_update(update, layer.output_norm, delta)
            ops.add_rms_norm(residual, update, layer.mlp_norm, eps, hidden, delta)
            delta = ops.linear(hidden, layer.gate_up, gate_up, lora)
            self._activate(gate_up, activated, delta)
            delta = ops.linear(activated, layer.down, update, lora)
            delta = self._norm_update(update, layer.down_norm, delta)
        num_logits = rows if batch.logit_rows is None else batch.logit_rows.shape[0]
        if logits is None:
            logits = torch.empty(num_logits, self.config.vocab_size, dtype=torch.float32, device=self.device)
        if num_logits:
            normed = hidden[:num_logits]
            ops.final_norm(residual, update, batch.logit_rows, self.final_norm, eps, normed, delta)
            ops.linear(normed, self.head, logits)
            if cap := self.config.final_softcap:
                logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _norm_update(self, update: Tensor, weight: Tensor | None, delta: LoraDelta | None) -> LoraDelta | None:
        """Normalise in place what attention or MLP adds, where the family does. Returns the delta still to be added."""
        if weight is None:
            return delta
        assert delta is None, "what adapters add is part of what is normalised"
        self.ops.add_rms_norm(update, None, weight, self.config.rms_norm_eps, update)
        return None

    def _activate(self, gate_up: Tensor, out: Tensor, delta: LoraDelta | None) -> None:
        if self._gelu is None:
            self.ops.silu_and_mul(gate_up, out, delta)
        else:
            assert delta is None, "the activation adds no delta"
            self._gelu.gelu_and_mul(gate_up, out)


def _embedding_scale(config: DecoderConfig, dtype: torch.dtype) -> float | None:
    """What embeddings are multiplied by, rounded to the model's type as transformers does; None is nothing."""
    if not config.family.scaled_embeddings:
        return None
    return torch.tensor(config.hidden_size**0.5, dtype=torch.float32).to(dtype).item()

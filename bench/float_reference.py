"""What a Llama answers, in plain torch straight from the checkpoint: the reference for relative errors.

Shares nothing with the engine but the reading of safetensors files. Layers are read one after the other, so float32
weights of a whole 8B model need not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llama8b import SCALE, Shape, as_tensor
from loraplex.adapters import Adapter, AdapterModule
from loraplex.core import AdapterDigest
from loraplex.model import Checkpoint

EPS, THETA = 1e-5, 500000.0


_Modules = dict[AdapterDigest, dict[str, AdapterModule]]  # by name of the linear


@dataclass(frozen=True, slots=True)
class KnownSequence:
    """A sequence whose logits are wanted from token `first` on; the adapter it ran with."""

    tokens: Sequence[int]
    first: int
    adapter: Adapter | None


class _Rows:
    """All tokens of some sequences, one after the other, ordered so that each adapter has one slice."""

    def __init__(self, sequences: Sequence[KnownSequence]) -> None:
        key = [s.adapter.digest if s.adapter else "" for s in sequences]
        self.order = sorted(range(len(sequences)), key=key.__getitem__)
        self.slices: dict[int, slice] = {}
        self.of_adapter: list[tuple[Adapter | None, slice]] = []
        end = 0
        for index in self.order:
            start, end = end, end + len(sequences[index].tokens)
            self.slices[index] = slice(start, end)
            adapter = sequences[index].adapter
            if self.of_adapter and key[index] == (self.of_adapter[-1][0].digest if self.of_adapter[-1][0] else ""):
                start = self.of_adapter.pop()[1].start
            self.of_adapter.append((adapter, slice(start, end)))


class FloatReference:
    """In float32, x (W + s A B) with merged weights: the specification.

    In another dtype unmerged, every result rounded: what that dtype costs without any of our code.
    """

    def __init__(self, directory: Path, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._checkpoint, self._shape, self._device, self._dtype = Checkpoint(directory), shape, device, dtype
        self._head_dim = shape.hidden // shape.heads

    def _tensor(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name).to(self._device).to(self._dtype)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[KnownSequence]) -> list[Tensor]:
        """Logits float32 [len(tokens) - first, vocab] of each sequence, on the device."""
        rows = _Rows(sequences)
        modules = {a.digest: {m.site.name: m for m in a.modules} for a, _ in rows.of_adapter if a is not None}
        tokens = torch.tensor([token for index in rows.order for token in sequences[index].tokens])
        hidden = self._checkpoint.tensor("model.embed_tokens.weight")[tokens].to(self._device).to(self._dtype)
        for layer in range(self._shape.layers):
            hidden = self._layer(f"model.layers.{layer}.", hidden, rows, modules)
        hidden = self._norm(hidden, "model.norm.weight")
        head, answers = self._tensor("lm_head.weight"), []
        for index, sequence in enumerate(sequences):
            answers.append((hidden[rows.slices[index]][sequence.first :] @ head.T).float())
        return answers

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        return (wide * self._tensor(name).float()).to(self._dtype)

    def _linear(self, name: str, x: Tensor, rows: _Rows, modules: _Modules) -> Tensor:
        weight = self._tensor(f"{name}.weight")
        out = torch.empty(x.shape[0], weight.shape[0], dtype=self._dtype, device=self._device)
        for adapter, part in rows.of_adapter:
            module = modules[adapter.digest].get(name) if adapter else None
            out[part] = x[part] @ weight.T if module is None else self._adapted(x[part], weight, module)
        return out

    def _adapted(self, x: Tensor, weight: Tensor, module: AdapterModule) -> Tensor:
        a, b = (as_tensor(view, self._device).to(self._dtype) for view in (module.a, module.b))
        assert module.scale == SCALE
        if self._dtype is torch.float32:
            return x @ (weight + module.scale * (b @ a)).T
        return x @ weight.T + module.scale * ((x @ a.T) @ b.T)

    def _layer(self, prefix: str, hidden: Tensor, rows: _Rows, modules: _Modules) -> Tensor:
        def linear(path: str, x: Tensor) -> Tensor:
            return self._linear(prefix + path, x, rows, modules)

        x = self._norm(hidden, f"{prefix}input_layernorm.weight")
        q, k, v = (linear(f"self_attn.{name}_proj", x).view(x.shape[0], -1, self._head_dim) for name in "qkv")
        attended = torch.empty_like(q)
        for part in rows.slices.values():
            attended[part] = self._attention(q[part], k[part], v[part])
        hidden = hidden + linear("self_attn.o_proj", attended.flatten(1))
        x = self._norm(hidden, f"{prefix}post_attention_layernorm.weight")
        gate, up = linear("mlp.gate_proj", x), linear("mlp.up_proj", x)
        return hidden + linear("mlp.down_proj", torch.nn.functional.silu(gate) * up)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of one sequence. q [len, heads, dim]; k, v [len, kv_heads, dim]."""
        length, group = q.shape[0], q.shape[1] // k.shape[1]
        q, k = self._rotate(q), self._rotate(k)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * self._head_dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool, device=self._device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights.to(self._dtype), v)

    def _rotate(self, x: Tensor) -> Tensor:
        half = self._head_dim // 2
        frequencies = THETA ** (-torch.arange(half, dtype=torch.float64, device=self._device) / half)
        angles = torch.arange(x.shape[0], dtype=torch.float64, device=self._device)[:, None] * frequencies
        cosine, sine = angles.cos().float()[:, None], angles.sin().float()[:, None]
        first, second = x[..., :half].float(), x[..., half:].float()
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(self._dtype)

"""From a checkpoint directory to a decoder on a device."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from loraplex.core import BaseDescription, BaseRefused, BaseSite, RefusalReason
from loraplex.kernels import AttentionShape, HeadNorms, Linear, LoraSite, Ops, RopeTable
from loraplex.model.checkpoint import Checkpoint, Progress, base_fingerprint
from loraplex.model.config import DecoderConfig, RopeConfig, read_config
from loraplex.model.decoder import Decoder, DecoderLayer
from loraplex.model.rope import build_rope_table

# The adaptable linears of a layer in forward order: module path, group that is one product.
_SPLIT_MODULES = (
    ("self_attn.q_proj", "qkv"),
    ("self_attn.k_proj", "qkv"),
    ("self_attn.v_proj", "qkv"),
    ("self_attn.o_proj", "output"),
    ("mlp.gate_proj", "gate_up"),
    ("mlp.up_proj", "gate_up"),
    ("mlp.down_proj", "down"),
)
_FUSED_MODULES = (
    ("self_attn.qkv_proj", "qkv"),
    ("self_attn.o_proj", "output"),
    ("mlp.gate_up_proj", "gate_up"),
    ("mlp.down_proj", "down"),
)


def site_modules(config: DecoderConfig) -> tuple[tuple[str, str], ...]:
    """The adaptable linears of a layer in forward order: module path, group that is one product."""
    return _FUSED_MODULES if config.family.fused else _SPLIT_MODULES


def site_sizes(config: DecoderConfig) -> Mapping[str, tuple[int, int]]:
    """(d_in, d_out) of each adaptable module, by path inside a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = {
        "self_attn.qkv_proj": (hidden, config.q_size + 2 * config.kv_size),
        "self_attn.q_proj": (hidden, config.q_size),
        "self_attn.k_proj": (hidden, config.kv_size),
        "self_attn.v_proj": (hidden, config.kv_size),
        "self_attn.o_proj": (config.q_size, hidden),
        "mlp.gate_up_proj": (hidden, 2 * inner),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    return {path: sizes[path] for path, _ in site_modules(config)}


def list_sites(config: DecoderConfig) -> tuple[BaseSite, ...]:
    """Every adaptable linear; its place in this tuple is its index in the LoRA tables."""
    sizes = site_sizes(config)
    return tuple(
        BaseSite(f"model.layers.{layer}.{path}", layer, path.rsplit(".", 1)[1], *sizes[path], _has_bias(config, path))
        for layer in range(config.num_layers)
        for path, _ in site_modules(config)
    )


def _hidden_norms(config: DecoderConfig) -> tuple[str, ...]:
    """Norms of a layer over hidden_size."""
    around = ("input_layernorm", "post_attention_layernorm")
    inner = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    return around + inner if config.family.sandwich_norms else around


def _has_bias(config: DecoderConfig, path: str) -> bool:
    if path.startswith("mlp."):
        return config.mlp_bias
    return config.output_bias if path.endswith("o_proj") else config.qkv_bias


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the checkpoint must have."""
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for path, (d_in, d_out) in site_sizes(config).items():
            expected[f"{prefix}{path}.weight"] = (d_out, d_in)
            if _has_bias(config, path):
                expected[f"{prefix}{path}.bias"] = (d_out,)
        for norm in _hidden_norms(config):
            expected[f"{prefix}{norm}.weight"] = (config.hidden_size,)
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            expected[f"{prefix}self_attn.{norm}.weight"] = (config.head_dim,)
    return expected


def _ignorable(config: DecoderConfig) -> tuple[str, ...]:
    """Tensors some exporters add that carry nothing: derived tables, and the copy of a tied head."""
    tables = tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers))
    return (*tables, "lm_head.weight") if config.tied_embeddings else tables


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Where and how a base is loaded. `dtype` None takes the one the config declares."""

    device: torch.device
    max_rows: int  # most rows of one step
    max_model_len: int  # positions the rope table covers
    dtype: torch.dtype | None = None


class _LayerLoader:
    """Reads one layer at a time, so that at most one layer exists twice in memory."""

    def __init__(
        self, checkpoint: Checkpoint, config: DecoderConfig, ops: Ops, dtype: torch.dtype, options: LoadOptions
    ):
        self.checkpoint, self.config, self.ops = checkpoint, config, ops
        self.dtype, self.device = dtype, options.device
        self._rope = self._table(config.rope, options)
        self._local_rope = self._table(config.local_rope, options) if config.local_rope else self._rope

    def _table(self, rope: RopeConfig, options: LoadOptions) -> RopeTable:
        return build_rope_table(rope, self.config.rotary_dim, options.max_model_len).to(options.device)

    def tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(device=self.device, dtype=self.dtype)

    def norm(self, name: str) -> Tensor:
        """The weight of a norm; where the family adds 1 to it, the sum in float32, which no narrower type holds."""
        weight = self.tensor(name)
        return 1.0 + weight.float() if self.config.family.norm_offset else weight

    def fused(self, layer: int, group: str) -> Linear:
        """The linears of a group as one, with the LoRA sites of its parts."""
        sizes, prefix, modules = site_sizes(self.config), f"model.layers.{layer}.", site_modules(self.config)
        weights, biases, sites, offset = [], [], [], 0
        for position, (path, owner) in enumerate(modules):
            if owner != group:
                continue
            d_in, d_out = sizes[path]
            sites.append(LoraSite(layer * len(modules) + position, d_in, d_out, offset))
            weights.append(self.tensor(f"{prefix}{path}.weight"))
            if _has_bias(self.config, path):
                biases.append(self.tensor(f"{prefix}{path}.bias"))
            offset += d_out
        bias = torch.cat(biases) if biases else None
        return self.ops.prepare_linear(torch.cat(weights), bias, tuple(sites))

    def layer(self, layer: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{layer}."
        head_norms = None
        if config.qk_norm:
            q_norm, k_norm = (self.norm(f"{prefix}self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
            head_norms = HeadNorms(q_norm, k_norm, config.rms_norm_eps)
        norms = [self.norm(f"{prefix}{name}.weight") for name in _hidden_norms(config)]
        window, heads = config.windows[layer], (config.num_heads, config.num_kv_heads, config.head_dim)
        return DecoderLayer(
            input_norm=norms[0],
            qkv=self.fused(layer, "qkv"),
            output=self.fused(layer, "output"),
            output_norm=norms[1] if config.family.sandwich_norms else None,
            mlp_norm=norms[2] if config.family.sandwich_norms else norms[1],
            gate_up=self.fused(layer, "gate_up"),
            down=self.fused(layer, "down"),
            down_norm=norms[3] if config.family.sandwich_norms else None,
            attention=AttentionShape(*heads, config.attention_scale, window, config.attention_softcap),
            head_norms=head_norms,
            rope=self._local_rope if window else self._rope,
        )


def open_checkpoint(directory: Path) -> tuple[DecoderConfig, Checkpoint]:
    """Config and checked tensors of a base. Raises BaseRefused."""
    config = read_config(directory)
    checkpoint = Checkpoint(directory)
    checkpoint.check_names(expected_tensors(config), _ignorable(config))
    _check_tied_head(config, checkpoint)
    return config, checkpoint


def _check_tied_head(config: DecoderConfig, checkpoint: Checkpoint) -> None:
    """Refuse a head of its own under a config that ties it: transformers would use it, the config says not to."""
    if not config.tied_embeddings or "lm_head.weight" not in checkpoint.names:
        return
    if not torch.equal(checkpoint.tensor("lm_head.weight"), checkpoint.tensor("model.embed_tokens.weight")):
        message = "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight."
        raise BaseRefused(RefusalReason.FIELD_INVALID, message, "lm_head.weight")


def describe_base(name: str, config: DecoderConfig, checkpoint: Checkpoint) -> BaseDescription:
    """Identity and sites of a base; hashes its weights unless a cached fingerprint is still valid."""
    return BaseDescription(
        name=name,
        fingerprint=base_fingerprint(checkpoint, os.cpu_count() or 1),
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        tied_embeddings=config.tied_embeddings,
        sites=list_sites(config),
    )


class _LazyLayers(Sequence[DecoderLayer]):
    """Layers that are read when they are asked for, and kept by nobody."""

    def __init__(self, loader: _LayerLoader, num_layers: int) -> None:
        self._loader, self._num_layers = loader, num_layers

    def __len__(self) -> int:
        return self._num_layers

    @overload
    def __getitem__(self, index: int) -> DecoderLayer: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[DecoderLayer]: ...

    def __getitem__(self, index: int | slice) -> DecoderLayer | Sequence[DecoderLayer]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._num_layers))]
        if not 0 <= index < self._num_layers:
            raise IndexError(f"layer {index} of {self._num_layers}")
        return self._loader.layer(index)


@torch.inference_mode()
def reference_decoder(
    config: DecoderConfig, checkpoint: Checkpoint, ops: Ops, options: LoadOptions, token_ids: Tensor
) -> tuple[Decoder, Tensor]:
    """A decoder that computes in float32 and holds one layer at a time, and `token_ids` [rows] as it wants them.

    Weights are those that are served, in the served type (`options.dtype`): `ops.linear` must widen them. The embedding
    has only the rows of these tokens, and the head stays on the host.
    """
    loader = _LayerLoader(checkpoint, config, ops, options.dtype or getattr(torch, config.dtype), options)
    used, renamed = torch.unique(token_ids, return_inverse=True)
    table = checkpoint.tensor("model.embed_tokens.weight")
    head = table if config.tied_embeddings else checkpoint.tensor("lm_head.weight")
    decoder = Decoder(
        config=config,
        ops=ops,
        embedding=table[used].to(loader.dtype).to(options.device, torch.float32),
        layers=_LazyLayers(loader, config.num_layers),
        final_norm=loader.norm("model.norm.weight"),
        head=ops.prepare_linear(head, None),
        max_rows=token_ids.shape[0],
    )
    return decoder, renamed.to(options.device)


@torch.inference_mode()
def load_decoder(
    config: DecoderConfig, checkpoint: Checkpoint, ops: Ops, options: LoadOptions, progress: Progress | None = None
) -> Decoder:
    """Load the weights. `progress` is called after each layer with (layers done, layers in all)."""
    dtype = options.dtype or getattr(torch, config.dtype)
    loader = _LayerLoader(checkpoint, config, ops, dtype, options)
    embedding = loader.tensor("model.embed_tokens.weight").contiguous()
    head = embedding if config.tied_embeddings else loader.tensor("lm_head.weight")
    prepared_head = ops.prepare_linear(head, None)
    layers = []
    for layer in range(config.num_layers):
        layers.append(loader.layer(layer))
        if progress:
            progress(layer + 1, config.num_layers)
    return Decoder(
        config=config,
        ops=ops,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=loader.norm("model.norm.weight"),
        head=prepared_head,
        max_rows=options.max_rows,
    )

"""What the rest of loraplex knows about a base model: its identity and the linear layers an adapter may adapt."""

from dataclasses import dataclass

from loraplex.core.types import BaseFingerprint


@dataclass(frozen=True, slots=True)
class BaseSite:
    """One linear layer of the base that a LoRA pair can attach to."""

    name: str  # dotted module path, e.g. "model.layers.0.self_attn.q_proj"
    layer: int
    module: str  # last part of the path, e.g. "q_proj"
    d_in: int
    d_out: int
    has_bias: bool = True  # where it is not known it counts as having one


@dataclass(frozen=True, slots=True)
class BaseDescription:
    """Identity and adaptable layers of a base. `sites` is ordered by layer, then as the forward pass meets them."""

    name: str
    fingerprint: BaseFingerprint
    model_type: str
    vocab_size: int
    num_layers: int
    tied_embeddings: bool
    sites: tuple[BaseSite, ...]

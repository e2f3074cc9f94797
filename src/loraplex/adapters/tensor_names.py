"""From tensor names to (site, A or B). Wrappers that trainers leave in a name are taken off; all else must fit exactly.

Taken off: parts that torch.compile, DDP, FSDP, activation checkpointing and multimodal models around the language model
insert anywhere, PEFT's `base_model.model.` in front, and the adapter name `default` before `weight`. No module of a
base has such a name, so what remains is unambiguous; two tensors that end up with one name are refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from loraplex.adapters.refusal import tensor_refused
from loraplex.adapters.targets import VOCABULARY_MODULES
from loraplex.adapters.types import TensorView
from loraplex.core import AdapterRefused, BaseDescription, BaseSite, RefusalReason

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module", "language_model"})
_PEFT_PREFIX = ("base_model", "model")
_FEATURES = {
    "lora_magnitude_vector": "belongs to DoRA",
    "lora_embedding_A": "adapts an embedding",
    "lora_embedding_B": "adapts an embedding",
    "modules_to_save": "replaces a whole module of the base (modules_to_save)",
    "token_adapter": "replaces rows of the embedding",
    "trainable_tokens_delta": "replaces rows of the embedding",
}


class Side(StrEnum):
    """Which half of a LoRA pair a tensor is."""

    A = "lora_A"
    B = "lora_B"


@dataclass(frozen=True, slots=True)
class LoraName:
    """What a tensor name means."""

    site: BaseSite
    side: Side


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Both halves of one site, shapes not yet checked."""

    site: BaseSite
    a: TensorView
    b: TensorView


def check_vocabulary(tensors: Iterable[TensorView], base: BaseDescription) -> None:
    """Raise VOCAB_MISMATCH if the file carries an embedding or head for another number of tokens."""
    for tensor in tensors:
        parts = _unwrap(tensor.name)
        is_matrix = VOCABULARY_MODULES.intersection(parts) and parts[-1] == "weight" and len(tensor.shape) == 2
        if is_matrix and not any(part.startswith("lora_") for part in parts) and tensor.shape[0] != base.vocab_size:
            problem = f"has {tensor.shape[0]} rows, but the base has a vocabulary of {base.vocab_size} tokens"
            raise tensor_refused(RefusalReason.VOCAB_MISMATCH, tensor.name, problem)


def pair_tensors(tensors: Iterable[TensorView], base: BaseDescription) -> dict[str, LoraPair]:
    """The complete pairs of a file by site name. Raises AdapterRefused if any tensor is not half of a pair."""
    sites = {site.name: site for site in base.sites}
    found: dict[LoraName, TensorView] = {}
    for tensor in tensors:
        name = read_name(tensor.name, sites, base)
        if name in found:
            problem = f"names the same parameter as tensor {found[name].name!r:.120}"
            raise tensor_refused(RefusalReason.KEY_DUPLICATE, tensor.name, problem)
        found[name] = tensor
    return {name.site.name: _pair(name.site, found) for name in found}


def _pair(site: BaseSite, found: Mapping[LoraName, TensorView]) -> LoraPair:
    a, b = found.get(LoraName(site, Side.A)), found.get(LoraName(site, Side.B))
    if a is None or b is None:
        missing, present = (Side.A, Side.B) if a is None else (Side.B, Side.A)
        message = f"Module {site.name!r} has {present} but no {missing}; both halves of a pair are needed."
        raise AdapterRefused(RefusalReason.PAIR_INCOMPLETE, message, site.name)
    return LoraPair(site, a, b)


def read_name(name: str, sites: Mapping[str, BaseSite], base: BaseDescription) -> LoraName:
    """What a tensor name means for these sites. Raises AdapterRefused, naming the tensor and why it cannot be used."""
    parts = _unwrap(name)
    for part in parts:
        if part in _FEATURES:
            problem = f"{_FEATURES[part]}, which is not supported"
            raise tensor_refused(RefusalReason.FEATURE_UNSUPPORTED, name, problem)
    if len(parts) >= 3 and parts[-2] == "default":
        del parts[-2]
    side = next((side for side in Side if parts[-2:-1] == [side.value]), None)
    if side is None:
        raise _refuse_other(name, parts)
    if parts[-1] == "bias":
        problem = "is a bias of a LoRA pair (lora_bias), which is not supported"
        raise tensor_refused(RefusalReason.FEATURE_UNSUPPORTED, name, problem)
    site = sites.get(".".join(parts[:-2])) if parts[-1] == "weight" else None
    if site is None:
        raise _refuse_site(name, parts[:-2], base)
    return LoraName(site, side)


def _unwrap(name: str) -> list[str]:
    """The parts of a name without what wrappers put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if tuple(parts[:2]) == _PEFT_PREFIX:
        del parts[:2]
    return parts or [""]


def _refuse_other(name: str, parts: list[str]) -> AdapterRefused:
    if parts[-1] in ("weight", "bias"):
        problem = "is no half of a LoRA pair; a weight of the shared base cannot be replaced by an adapter"
    else:
        problem = "is no half of a LoRA pair"
    return tensor_refused(RefusalReason.KEY_UNMATCHED, name, problem)


def _refuse_site(name: str, module: list[str], base: BaseDescription) -> AdapterRefused:
    if module and module[-1] in VOCABULARY_MODULES:
        problem = "adapts the embedding or the output head, which is not supported"
        return tensor_refused(RefusalReason.FEATURE_UNSUPPORTED, name, problem)
    problem = f"names no linear layer of the base {base.name!r}, which has {base.num_layers} layers"
    return tensor_refused(RefusalReason.KEY_UNMATCHED, name, problem)

"""From tensor names to (site, A or B). Wrappers that trainers leave in a name are taken off; all else must fit exactly.

Taken off: parts that torch.compile, DDP, FSDP, activation checkpointing and multimodal models around the language model
insert anywhere, PEFT's `base_model.model.` in front, and the adapter's name before `weight`. No module of a base has
such a name, so what remains is unambiguous; two tensors that end up with one name are refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loraplex.adapters.limits import MAX_WRAPPERS, MAX_WRAPPINGS
from loraplex.adapters.refusal import show, tensor_refused
from loraplex.adapters.targets import VOCABULARY_MODULES
from loraplex.adapters.types import TensorView
from loraplex.adapters.wrappers import WRAPPERS, NamedModules, Wrapping, split_name
from loraplex.core import AdapterRefused, BaseDescription, BaseSite, RefusalReason

_DEFAULT_ADAPTER = "default"  # the name that PEFT gives, so one that it reads in any file
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
    wrapping: Wrapping = ()  # of the module's path; empty only in a name that has none
    adapter_name: str | None = None  # what stands before `weight`; None for nothing and for PEFT's own "default"


@dataclass(frozen=True, slots=True)
class _Half:
    """A tensor and what its name means."""

    tensor: TensorView
    name: LoraName


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Both halves of one site, shapes not yet checked."""

    site: BaseSite
    a: TensorView
    b: TensorView


def check_vocabulary(tensors: Iterable[TensorView], base: BaseDescription) -> None:
    """Raise VOCAB_MISMATCH if the file carries an embedding or head for another number of tokens."""
    for tensor in tensors:
        parts = split_name(tensor.name).parts
        is_matrix = VOCABULARY_MODULES.intersection(parts) and parts[-1] == "weight" and len(tensor.shape) == 2
        if is_matrix and not any(part.startswith("lora_") for part in parts) and tensor.shape[0] != base.vocab_size:
            problem = f"has {tensor.shape[0]} rows, but the base has a vocabulary of {base.vocab_size} tokens"
            raise tensor_refused(RefusalReason.VOCAB_MISMATCH, tensor.name, problem)


def find_modules(tensors: Iterable[TensorView], base: BaseDescription) -> NamedModules:
    """Which modules the names of a file name, and how. Names that mean nothing are passed over: `pair_tensors` refuses.

    Raises AdapterRefused (KEY_UNMATCHED) for names with more wrappers than are read.
    """
    sites = {site.name for site in base.sites}
    wrappings: dict[str, Wrapping] = {}
    ranks: dict[str, int] = {}
    is_wrapped = False
    for tensor in tensors:
        num_wrappers = sum(part in WRAPPERS for part in tensor.name.split("."))
        if num_wrappers > MAX_WRAPPERS:
            problem = f"has {num_wrappers} wrappers in its name; the limit is {MAX_WRAPPERS}"
            raise tensor_refused(RefusalReason.KEY_UNMATCHED, tensor.name, problem)
        is_wrapped |= num_wrappers > 0
        split = split_name(tensor.name)
        index = _side_index(split.parts)
        module = "" if index is None else ".".join(split.parts[:index])
        if index is None or module not in sites:
            continue
        wrappings.setdefault(module, split.wrapping[: index + 1])
        if split.parts[index] == Side.A:
            ranks.setdefault(module, tensor.shape[0] if tensor.shape else 0)
    if len(set(wrappings.values())) > MAX_WRAPPINGS:
        message = f"The names of the file wrap modules in more than {MAX_WRAPPINGS} different ways."
        raise AdapterRefused(RefusalReason.KEY_UNMATCHED, message)
    return NamedModules(is_wrapped, wrappings, ranks)


def pair_tensors(tensors: Iterable[TensorView], base: BaseDescription) -> dict[str, LoraPair]:
    """The complete pairs of a file by site name. Raises AdapterRefused if any tensor is not half of a pair."""
    sites = {site.name: site for site in base.sites}
    found: dict[tuple[str, Side], _Half] = {}
    first: _Half | None = None
    for tensor in tensors:
        half = _Half(tensor, read_name(tensor.name, sites, base))
        first = first or half
        key = (half.name.site.name, half.name.side)
        if key in found:
            problem = f"names the same parameter as tensor {found[key].tensor.name!r:.120}"
            raise tensor_refused(RefusalReason.KEY_DUPLICATE, tensor.name, problem)
        if half.name.adapter_name != first.name.adapter_name:
            problem = f"has another adapter's name before 'weight' than tensor {show(first.tensor.name)}"
            raise tensor_refused(RefusalReason.KEY_UNMATCHED, tensor.name, problem)
        found[key] = half
    return {site: _pair(sites[site], found) for site, _ in found}


def _pair(site: BaseSite, found: Mapping[tuple[str, Side], _Half]) -> LoraPair:
    a, b = found.get((site.name, Side.A)), found.get((site.name, Side.B))
    if a is None or b is None:
        missing, present = (Side.A, Side.B) if a is None else (Side.B, Side.A)
        message = f"Module {site.name!r} has {present} but no {missing}; both halves of a pair are needed."
        raise AdapterRefused(RefusalReason.PAIR_INCOMPLETE, message, site.name)
    if a.name.wrapping != b.name.wrapping:
        problem = f"has other wrappers around its module than the other half, {show(a.tensor.name)}"
        raise tensor_refused(RefusalReason.KEY_UNMATCHED, b.tensor.name, problem)
    return LoraPair(site, a.tensor, b.tensor)


def read_name(name: str, sites: Mapping[str, BaseSite], base: BaseDescription) -> LoraName:
    """What a tensor name means for these sites. Raises AdapterRefused, naming the tensor and why it cannot be used."""
    split = split_name(name)
    parts = split.parts
    for part in parts:
        if part in _FEATURES:
            problem = f"{_FEATURES[part]}, which is not supported"
            raise tensor_refused(RefusalReason.FEATURE_UNSUPPORTED, name, problem)
    index = _side_index(parts)
    if index is None:
        raise _refuse_other(name, parts)
    if parts[-1] == "bias":
        problem = "is a bias of a LoRA pair (lora_bias), which is not supported"
        raise tensor_refused(RefusalReason.FEATURE_UNSUPPORTED, name, problem)
    site = sites.get(".".join(parts[:index])) if parts[-1] == "weight" else None
    if site is None:
        raise _refuse_site(name, parts[:index], base)
    adapter_name = next((part for part in parts[index + 1 : -1] if part != _DEFAULT_ADAPTER), None)
    return LoraName(site, Side(parts[index]), split.wrapping[: index + 1], adapter_name)


def _side_index(parts: Sequence[str]) -> int | None:
    """Where `lora_A` or `lora_B` stands: before the last part, or before the adapter's name and the last part."""
    sides = (index for index in (len(parts) - 2, len(parts) - 3) if index >= 0 and parts[index] in tuple(Side))
    return next(sides, None)


def _refuse_other(name: str, parts: Sequence[str]) -> AdapterRefused:
    if parts[-1] in ("weight", "bias"):
        problem = "is no half of a LoRA pair; a weight of the shared base cannot be replaced by an adapter"
    else:
        problem = "is no half of a LoRA pair"
    return tensor_refused(RefusalReason.KEY_UNMATCHED, name, problem)


def _refuse_site(name: str, module: Sequence[str], base: BaseDescription) -> AdapterRefused:
    if module and module[-1] in VOCABULARY_MODULES:
        problem = "adapts the embedding or the output head, which is not supported"
        return tensor_refused(RefusalReason.FEATURE_UNSUPPORTED, name, problem)
    problem = f"names no linear layer of the base {base.name!r}, which has {base.num_layers} layers"
    return tensor_refused(RefusalReason.KEY_UNMATCHED, name, problem)

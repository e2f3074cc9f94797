"""What tensor names mean, and which are refused."""

import itertools

import pytest

from loraplex.adapters.tensor_names import Side, read_name
from loraplex.core import AdapterRefused

from .factories import Entry, check, make_base, make_tensors, reason, tensor

BASE = make_base()
SITES = {site.name: site for site in BASE.sites}
SITE = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    "name",
    [
        f"base_model.model.{SITE}.lora_A.weight",
        f"base_model.model.{SITE}.lora_A.default.weight",
        f"{SITE}.lora_A.weight",
        f"_orig_mod.base_model.model.{SITE}.lora_A.weight",
        f"module.base_model.model.{SITE}.lora_A.default.weight",
        f"module._orig_mod.module.{SITE}.lora_A.weight",
        f"base_model.model.module.{SITE}.lora_A.weight",
        f"base_model.model.language_model.{SITE}.lora_A.weight",
        f"base_model.model.model.language_model.{SITE.removeprefix('model.')}.lora_A.weight",
        f"language_model.{SITE}.lora_A.default.weight",
        "base_model.model.model.layers.1._orig_mod.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn.q_proj.lora_A.weight",
    ],
)
def test_wrappers_are_taken_off(name: str) -> None:
    found = read_name(name, SITES, BASE)
    assert (found.site.name, found.side) == (SITE, Side.A)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "weight",
        "lora_A.weight",
        "module",
        f"{SITE}.weight",
        f"base_model.model.{SITE}.base_layer.weight",
        f"{SITE}.lora_A",
        f"{SITE}.lora_C.weight",
        f"{SITE}.lora_a.weight",
        f"{SITE}.lora_A.one.two.weight",
        f"{SITE}.lora_A.other.scale",
        f"{SITE}.lora_A.scale",
        f"{SITE} .lora_A.weight",
        f"base_model.model.base_model.model.{SITE}.lora_A.weight",
        f"base_model.{SITE}.lora_A.weight",
        "layers.1.self_attn.q_proj.lora_A.weight",
        "q_proj.lora_A.weight",
        "model.layers.01.self_attn.q_proj.lora_A.weight",
        "model.layers.7.self_attn.q_proj.lora_A.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_anything_else_is_unmatched(name: str) -> None:
    with pytest.raises(AdapterRefused) as caught:
        read_name(name, SITES, BASE)
    assert (caught.value.reason_code, caught.value.subject) == ("KEY_UNMATCHED", name)


@pytest.mark.parametrize(
    "name",
    [
        f"{SITE}.lora_magnitude_vector",
        f"{SITE}.lora_magnitude_vector.default.weight",
        f"{SITE}.lora_B.bias",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.modules_to_save.weight",
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
    ],
)
def test_tensors_of_other_features_are_named_so(name: str) -> None:
    with pytest.raises(AdapterRefused) as caught:
        read_name(name, SITES, BASE)
    assert caught.value.reason_code == "FEATURE_UNSUPPORTED"


def renamed(*names: str) -> dict[str, Entry]:
    """PEFT's names as in a raw state dict: with these adapter names before `weight`, in turn."""
    before = itertools.cycle(f".{name}.weight" if name else ".weight" for name in names)
    return {name.removesuffix(".weight") + next(before): entry for name, entry in make_tensors().items()}


def test_one_adapter_name_may_stand_in_all_tensors() -> None:
    plain = check()
    assert check(tensors=renamed("customer-7")).digest == plain.digest
    assert check(tensors=renamed("default", "")).digest == plain.digest, "PEFT reads its own name or none"


@pytest.mark.parametrize("names", [("one", "two"), ("one", ""), ("", "one"), ("default", "one"), ("one",) * 7 + ("",)])
def test_several_adapter_names_are_refused(names: tuple[str, ...]) -> None:
    assert reason(tensors=renamed(*names)) == "KEY_UNMATCHED"


def test_two_adapters_for_one_module_are_refused() -> None:
    assert reason(tensors=renamed("one") | renamed("two")) == "KEY_DUPLICATE"


def test_two_tensors_for_one_parameter_are_refused() -> None:
    tensors = make_tensors()
    tensors[f"{SITE}.lora_A.weight"] = tensor((2, 8), seed=99)
    assert reason(tensors=tensors) == "KEY_DUPLICATE"


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_half_a_pair_is_refused(half: str) -> None:
    tensors = make_tensors()
    del tensors[f"base_model.model.{SITE}.{half}.weight"]
    assert reason(tensors=tensors) == "PAIR_INCOMPLETE"


@pytest.mark.parametrize("name", ["base_model.model.lm_head.weight", "model.embed_tokens.modules_to_save.weight"])
def test_other_vocabulary_is_named_before_all_else(name: str) -> None:
    tensors = make_tensors() | {name: tensor((40, 8))}
    assert reason({"peft_type": "LORA", "modules_to_save": ["lm_head"]}, tensors) == "VOCAB_MISMATCH"


def test_embedding_of_the_same_vocabulary_is_still_refused() -> None:
    assert reason(tensors=make_tensors() | {"base_model.model.lm_head.weight": tensor((32, 8))}) == "KEY_UNMATCHED"

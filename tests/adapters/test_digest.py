"""The digest changes with what changes the answers, and with nothing else."""

import random

import pytest

from loraplex.adapters import AdapterLimits, Artifact, check_artifact

from .factories import (
    PREFIX,
    Entry,
    check,
    make_artifact,
    make_base,
    make_config,
    make_tensors,
    tensor,
    write_safetensors,
)

DIGEST = check().digest


def rename(old: str, new: str) -> dict[str, Entry]:
    return {name.replace(old, new): entry for name, entry in make_tensors().items()}


def test_digest_is_sha256_in_hex() -> None:
    assert len(DIGEST) == 64
    assert set(DIGEST) <= set("0123456789abcdef")


def test_format_is_frozen() -> None:
    """A change here orphans every digest that was ever logged."""
    tensors = {name: (dtype, shape, bytes(len(data))) for name, (dtype, shape, data) in make_tensors().items()}
    assert check(tensors=tensors).digest == "9e37ac009b2684264d309ad2fe6eb2d99efe0310f31d92b7034dc72389324f02"


@pytest.mark.parametrize(
    ("old", "new"),
    [(PREFIX, ""), (PREFIX, f"module.{PREFIX}"), (".weight", ".default.weight"), ("layers.0", "layers.0._orig_mod")],
)
def test_name_variants_have_the_same_digest(old: str, new: str) -> None:
    assert check(tensors=rename(old, new)).digest == DIGEST


def test_tensor_order_and_metadata_do_not_enter() -> None:
    items = list(make_tensors().items())
    random.Random(3).shuffle(items)
    weights = write_safetensors(dict(items), {"format": "pt", "lora_alpha": "99"})
    artifact = Artifact(make_artifact().config, memoryview(weights))
    assert check_artifact(artifact, make_base(), AdapterLimits()).digest == DIGEST


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_dropout": 0.5},
        {"base_model_name_or_path": "other"},
        {"target_modules": ["v_proj", "self_attn.q_proj"]},
        {"lora_alpha": 4.0},
        {"lora_alpha": 8, "alpha_pattern": {"q_proj": 4, "v_proj": 4}},
    ],
)
def test_config_that_means_the_same_has_the_same_digest(changes: dict[str, object]) -> None:
    assert check(make_config(**changes)).digest == DIGEST


@pytest.mark.parametrize("changes", [{"lora_alpha": 4.5}, {"use_rslora": True}, {"alpha_pattern": {"v_proj": 5}}])
def test_other_scale_has_another_digest(changes: dict[str, object]) -> None:
    assert check(make_config(**changes)).digest != DIGEST


def test_one_flipped_bit_has_another_digest() -> None:
    digests = {DIGEST}
    for name, (dtype, shape, data) in make_tensors().items():
        flipped = bytes([data[0] ^ 1]) + data[1:]
        digests.add(check(tensors=make_tensors() | {name: (dtype, shape, flipped)}).digest)
    assert len(digests) == 1 + len(make_tensors())


def test_same_values_for_other_modules_have_another_digest() -> None:
    base = make_base()
    config = {"target_modules": ["0.self_attn.q_proj"]}, {"target_modules": ["1.self_attn.q_proj"]}
    digests = set()
    for layer, changes in enumerate(config):
        name = f"model.layers.{layer}.self_attn.q_proj"
        tensors = {f"{name}.lora_A.weight": tensor((2, 8)), f"{name}.lora_B.weight": tensor((8, 2))}
        digests.add(check(make_config(**changes), tensors, base).digest)
    assert len(digests) == 2

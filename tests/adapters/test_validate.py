"""Whole adapters against a base: what is accepted comes out exact, what is refused has the fitting reason."""

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from loraplex.adapters import AdapterLimits, load_adapter
from loraplex.core import AdapterRefused, BaseDescription, BaseFingerprint, BaseSite, ConfigError

from .factories import Entry, check, make_base, make_config, make_tensors, reason, tensor, write_adapter

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def replaced(name: str, entry: Entry) -> dict[str, Entry]:
    return make_tensors() | {name: entry}


def test_accepted_adapter_is_what_the_file_holds(tmp_path: Path) -> None:
    config = make_config(base_model_name_or_path="org/base")
    adapter = load_adapter(write_adapter(tmp_path, config), make_base(), AdapterLimits(max_rank=2))
    assert [module.site.name for module in adapter.modules] == [
        f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "v_proj")
    ]
    assert {(module.rank, module.scale) for module in adapter.modules} == {(2, 2.0)}
    assert adapter.modules[0].a.data == make_tensors()[f"{Q0}.lora_A.weight"][2]
    assert adapter.modules[0].b.shape == (8, 2)
    assert (adapter.max_rank, adapter.targets) == (2, ("q_proj", "v_proj"))
    assert adapter.num_bytes == sum(len(data) for _, _, data in make_tensors().values())
    assert adapter.declared_base == "org/base"


def test_replacing_the_files_afterwards_changes_nothing(tmp_path: Path) -> None:
    adapter = load_adapter(write_adapter(tmp_path), make_base(), AdapterLimits())
    before = bytes(adapter.modules[0].a.data)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert adapter.modules[0].a.data == before


def test_dtypes_may_be_mixed() -> None:
    name = f"{Q0}.lora_A.weight"
    for dtype in ("F16", "BF16"):
        assert check(tensors=replaced(name, tensor((2, 8), dtype))).modules[0].a.dtype == dtype


def test_ranks_may_differ_by_pattern() -> None:
    tensors = make_tensors(modules=("q_proj",), rank=3) | make_tensors(modules=("v_proj",), rank=2)
    adapter = check(make_config(rank_pattern={"q_proj": 3}), tensors)
    assert [module.rank for module in adapter.modules] == [3, 2, 3, 2]
    assert adapter.max_rank == 3


def test_partial_layers_need_tensors_for_those_layers_only() -> None:
    tensors = {name: entry for name, entry in make_tensors().items() if "layers.1." in name}
    assert len(check(make_config(layers_to_transform=[1]), tensors).modules) == 2


@pytest.mark.parametrize(
    ("name", "entry", "code"),
    [
        (f"{Q0}.lora_A.weight", tensor((8, 2)), "SHAPE_MISMATCH"),
        (f"{Q0}.lora_A.weight", tensor((1, 2, 8)), "SHAPE_MISMATCH"),
        (f"{Q0}.lora_A.weight", tensor((16,)), "SHAPE_MISMATCH"),
        (f"{Q0}.lora_B.weight", tensor((9, 2)), "SHAPE_MISMATCH"),
        (f"{Q0}.lora_A.weight", tensor((3, 8)), "RANK_MISMATCH"),
        (f"{Q0}.lora_B.weight", tensor((8, 3)), "RANK_MISMATCH"),
        (f"{Q0}.lora_A.weight", ("F32", (0, 8), b""), "WEIGHTS_EMPTY"),
        (f"{Q0}.lora_A.weight", ("F64", (2, 8), bytes(128)), "DTYPE_UNSUPPORTED"),
        (f"{Q0}.lora_A.weight", ("I8", (2, 8), bytes(16)), "DTYPE_UNSUPPORTED"),
        (f"{Q0}.lora_A.weight", ("BF16", (2, 8), b"\x80\x7f" * 16), "NONFINITE"),
        ("base_model.model.model.norm.weight", tensor((8,)), "KEY_UNMATCHED"),
    ],
)
def test_one_wrong_tensor_refuses_the_adapter(name: str, entry: Entry, code: str) -> None:
    assert reason(tensors=replaced(name, entry)) == code


def test_no_tensors_are_refused() -> None:
    assert reason(tensors={}) == "WEIGHTS_EMPTY"


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "v_proj", "down_proj"]])
def test_config_and_tensors_must_cover_each_other(targets: list[str]) -> None:
    assert reason(make_config(target_modules=targets)) == "TARGET_NOT_COVERED"


def test_excluded_module_with_tensors_is_refused() -> None:
    assert reason(make_config(exclude_modules=["v_proj"])) == "TARGET_NOT_COVERED"


def test_tensors_of_an_entry_that_names_nothing_are_refused() -> None:
    config = make_config(target_modules=["q_proj", "v_proj", "c_attn"])
    assert check(config).digest == check().digest
    tensors = make_tensors() | {f"{Q0}.lora_A.weight".replace("q_proj", "c_attn"): tensor((2, 8))}
    assert reason(config, tensors) == "KEY_UNMATCHED"


def test_bias_is_served_where_there_are_none_to_train() -> None:
    sites = make_base().sites
    for biased, served in (((), ("all", "lora_only")), (("down_proj",), ("lora_only",)), (("q_proj",), ())):
        changed = tuple(dataclasses.replace(site, has_bias=site.module in biased) for site in sites)
        base = dataclasses.replace(make_base(), sites=changed)
        assert check(make_config(bias="none"), base=base).digest == check().digest
        for bias in ("all", "lora_only"):
            expected = None if bias in served else "FEATURE_UNSUPPORTED"
            assert reason(make_config(bias=bias), base=base) == expected, (biased, bias)
        tensors = replaced(f"{Q0}.base_layer.bias", tensor((8,)))
        assert reason(make_config(bias="lora_only"), tensors, base) in ("KEY_UNMATCHED", "FEATURE_UNSUPPORTED")


def test_bias_names_the_layer_that_has_one_and_unknown_counts_as_one() -> None:
    with pytest.raises(AdapterRefused, match=r"'bias' is 'all'.*model\.layers\.0\.self_attn\.q_proj"):
        check(make_config(bias="all"))


def test_rank_above_the_limit_names_rank_limit_and_flag() -> None:
    with pytest.raises(AdapterRefused, match=r"rank 2.*limit is 1.*--max-lora-rank") as caught:
        check(max_rank=1)
    assert caught.value.reason_code == "RANK_TOO_LARGE"
    check(max_rank=2)


def test_adapter_of_another_base_is_refused() -> None:
    other = BaseDescription(
        "other", BaseFingerprint("1" * 64), "llama", 32, 2, False,
        tuple(BaseSite(site.name, site.layer, site.module, site.d_in + 8, site.d_out) for site in make_base().sites),
    )  # fmt: skip
    assert reason(base=other) == "SHAPE_MISMATCH"
    assert reason(base=make_base(num_layers=1)) == "KEY_UNMATCHED"
    assert reason(base=make_base(num_layers=3)) == "TARGET_NOT_COVERED"


@pytest.mark.parametrize("limits", [{"max_rank": 0}, {"max_bytes": 0}])
def test_limits_that_cannot_work_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        AdapterLimits(**limits)


def test_large_adapter_is_checked_quickly(tmp_path: Path) -> None:
    """64 MB in well under the seconds that a scan in Python would take."""
    size = 2**15
    sites = (BaseSite("model.layers.0.mlp.down_proj", 0, "down_proj", size, size),)
    base = BaseDescription("wide", BaseFingerprint("0" * 64), "llama", 32, 1, False, sites)
    data = np.zeros((512, size), "<u2").tobytes()
    name = "base_model.model.model.layers.0.mlp.down_proj"
    tensors = {
        f"{name}.lora_A.weight": ("BF16", (512, size), data),
        f"{name}.lora_B.weight": ("BF16", (size, 512), data),
    }
    config = make_config(r=512, target_modules=["down_proj"])
    write_adapter(tmp_path, config, tensors)
    start = time.perf_counter()
    load_adapter(tmp_path, base, AdapterLimits())
    assert time.perf_counter() - start < 5

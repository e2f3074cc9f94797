"""adapter_config.json: each field read, known to have no effect, or refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.peft_config import PeftConfig, parse_document, read_config
from loraplex.core import AdapterRefused

from .factories import make_config


def read(**changes: Any) -> PeftConfig:
    return read_config(parse_document(json.dumps(make_config(**changes)).encode()))


def refusal(**changes: Any) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught:
        read(**changes)
    return caught.value


def test_plain_config_is_read() -> None:
    config = read(base_model_name_or_path="org/base", alpha_pattern={"q_proj": 3})
    assert (config.rank, config.alpha, config.use_rslora) == (2, 4.0, False)
    assert config.target_modules == {"q_proj", "v_proj"}
    assert config.alpha_pattern == (("q_proj", 3.0),)
    assert config.declared_base == "org/base"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff{}", b"3", b'{"r":1,"r":1}', b'{"a":{"b":1,"b":1}}', b"[" * 10**5]
)
def test_text_that_is_no_unambiguous_object_is_invalid(data: bytes) -> None:
    with pytest.raises(AdapterRefused) as caught:
        parse_document(data)
    assert caught.value.reason_code == "CONFIG_INVALID"


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[[NaN]]", '{"a":NaN}'])
@pytest.mark.parametrize("field", ["lora_alpha", "lora_dropout", "whatever"])
def test_number_that_is_not_finite_is_refused_wherever_it_stands(field: str, text: str) -> None:
    with pytest.raises(AdapterRefused) as caught:
        parse_document(f'{{"{field}":{text}}}'.encode())
    assert (caught.value.reason_code, caught.value.subject) == ("NONFINITE", field)


@pytest.mark.parametrize("value", ["IA3", "lora", None, 1, ...])
def test_other_peft_type_is_refused(value: object) -> None:
    assert refusal(peft_type=value).reason_code == "PEFT_TYPE_UNSUPPORTED"


@pytest.mark.parametrize("value", ["SEQ_CLS", "", 0, "causal_lm"])
def test_other_task_type_is_refused(value: object) -> None:
    assert refusal(task_type=value).reason_code == "TASK_TYPE_UNSUPPORTED"


@pytest.mark.parametrize("value", [None, ...])
def test_task_type_may_be_left_open(value: object) -> None:
    read(task_type=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("r", value) for value in (0, -1, True, "4", 4.0, None, 2**31, [4])),
        *(("lora_alpha", value) for value in (True, "8", None, [8])),
        *(("rank_pattern", value) for value in (None, [], {"q_proj": 0}, {"q_proj": 2.0}, {"q_proj": True})),
        *(("alpha_pattern", value) for value in (None, [], {"q_proj": "2"}, {"q_proj": None})),
        *(("target_modules", value) for value in (None, ..., 3, ["q_proj", 3], {"q_proj": 1})),
        *(("exclude_modules", value) for value in (3, [None])),
        *(("layers_to_transform", value) for value in ("0", [True], False, [0.0], {})),
        *(("use_rslora", value) for value in (1, "true")),
        *(("lora_dropout", value) for value in (None, "0.1", 1.5, -0.1, True)),
        *(("bias", value) for value in (None, "some", [])),
        ("init_lora_weights", 1),
        ("fan_in_fan_out", "no"),
        ("base_model_name_or_path", 5),
        ("layers_pattern", "layers"),  # needs layers_to_transform
    ],
)
def test_wrong_type_or_value_is_invalid(field: str, value: object) -> None:
    assert refusal(**{field: value}).reason_code == "FIELD_INVALID"


def test_layer_fields_are_invalid_beside_all_linear() -> None:
    assert refusal(target_modules="all-linear", layers_to_transform=[0]).reason_code == "FIELD_INVALID"
    assert refusal(target_modules="all-linear", layers_pattern=[]).reason_code == "FIELD_INVALID"


def test_no_targets_are_refused() -> None:
    assert refusal(target_modules=[]).reason_code == "TARGET_NOT_COVERED"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("trainable_token_indices", []),  # PEFT wraps the embedding even so
        ("layer_replication", [[0, 1]]),
        ("lora_bias", True),
        ("alora_invocation_tokens", [1]),
        ("megatron_config", {"a": 1}),
        ("target_parameters", ["x"]),
        ("use_qalora", True),
        ("use_bdlora", {}),
        ("eva_config", {}),
        ("corda_config", {}),
        ("lora_ga_config", {}),
        ("arrow_config", {}),
        ("kasa_config", {}),  # at its defaults KaSA changes the answers
        ("velora_config", {}),
        ("monteclora_config", {"num_samples": 8}),
        ("loftq_config", {"loftq_bits": 4}),
        ("ensure_weight_tying", True),
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("fan_in_fan_out", True),
        *(("init_lora_weights", name) for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")),
        ("some_future_field", {"mode": 1}),
        ("some_future_field", 0),
    ],
)
def test_feature_beyond_plain_lora_is_refused_by_name(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert (error.reason_code, error.subject) == ("FEATURE_UNSUPPORTED", field)
    assert field in error.message


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "a" * 513},
        {"exclude_modules": "a" * 513},
        {"rank_pattern": {".*" * 300: 2}},
        {"alpha_pattern": {".*" * 300: 2}},
        {"layers_to_transform": [0], "layers_pattern": ".*" * 300},
    ],
)
def test_long_expression_is_refused(changes: dict[str, object]) -> None:
    error = refusal(**changes)
    assert (error.reason_code, error.subject) == ("FIELD_INVALID", list(changes)[-1])
    assert "512" in error.message


def test_many_expressions_are_refused() -> None:
    assert refusal(rank_pattern={f".*{i}": 2 for i in range(257)}).reason_code == "FIELD_INVALID"
    assert len(read(rank_pattern={f".*{i}": 2 for i in range(256)}).expressions) == 256
    assert not read(rank_pattern={f"layers.{i}": 2 for i in range(4000)}).expressions, "names are not run"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (field, value)
            for field in ("modules_to_save", "use_dora", "a_field_to_come")
            for value in (None, False, [])
        ),
        ("trainable_token_indices", None),
        ("eva_config", None),
        ("loftq_config", {}),
        ("megatron_core", "megatron.core"),
        ("qalora_group_size", 16),
        ("inference_mode", True),
        ("lora_dropout", 0.1),
        ("lora_dropout", 1),
        ("revision", "main"),
        ("peft_version", "99.0"),
        ("auto_mapping", {"base_model_class": "x"}),
        *(("init_lora_weights", value) for value in (True, False, None, "gaussian", "orthogonal", "eva", "GAUSSIAN")),
        ("bias", "none"),
        ("layers_to_transform", []),
    ],
)
def test_field_without_effect_changes_nothing(field: str, value: object) -> None:
    assert read(**{field: value}) == read()


@pytest.mark.parametrize("left_out", [("r",), ("lora_alpha",), ("r", "lora_alpha")])
def test_rank_and_alpha_left_out_are_those_of_peft(left_out: tuple[str, ...], tmp_path: Path) -> None:
    lora_config = pytest.importorskip("peft").LoraConfig
    document = {key: value for key, value in make_config().items() if key not in left_out}
    (tmp_path / "adapter_config.json").write_text(json.dumps(document))
    theirs, ours = lora_config.from_pretrained(str(tmp_path)), read(**dict.fromkeys(left_out, ...))
    assert (ours.rank, ours.alpha) == (theirs.r, theirs.lora_alpha)
    assert 8 in (ours.rank, ours.alpha)


@pytest.mark.parametrize("value", ["none", "all", "lora_only", ...])
def test_trained_biases_are_read(value: object) -> None:
    assert read(bias=value).bias == ("none" if value is ... else value)


@pytest.mark.parametrize("alpha", [0, -3, 0.5, 10**30])
def test_any_finite_alpha_is_read(alpha: float) -> None:
    assert read(lora_alpha=alpha).alpha == float(alpha)


def test_alpha_beyond_a_float_is_not_finite() -> None:
    assert refusal(lora_alpha=10**400).reason_code == "NONFINITE"


def test_long_values_are_shortened_in_messages() -> None:
    assert len(refusal(target_modules="x" * 10_000).message) < 400


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for text in (data, b'{"r":' + data + b"}"):
        try:
            read_config(parse_document(text))
        except AdapterRefused as error:
            assert error.reason_code


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([*make_config(), "rank_pattern", "layers_to_transform", "bias", "new"]), values)
def test_any_value_of_any_field_is_read_or_refused(field: str, value: object) -> None:
    try:
        config = read_config({**make_config(), field: value})
    except AdapterRefused:
        return
    assert math.isfinite(config.alpha)

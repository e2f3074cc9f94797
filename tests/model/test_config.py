"""config.json: what every family reads, and what is refused with which words."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from loraplex.core import BaseRefused, RefusalReason
from loraplex.model import FAMILIES, read_config
from loraplex.model.config import parse_config

SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}


def raw_config(model_type: str = "llama", **overrides: Any) -> dict[str, Any]:
    return SHAPE | {"model_type": model_type, "num_key_value_heads": 8} | overrides


def refusal(raw: dict[str, Any]) -> BaseRefused:
    with pytest.raises(BaseRefused) as caught:
        parse_config(raw)
    return caught.value


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fields_left_out_mean_what_transformers_takes_them_for(model_type: str) -> None:
    theirs = transformers.AutoConfig.for_model(model_type, **SHAPE)
    ours = parse_config({"model_type": model_type} | SHAPE)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    ropes = [theirs.rope_parameters]
    if model_type == "gemma3_text":
        ropes = [theirs.rope_parameters[kind] for kind in ("full_attention", "sliding_attention")]
    assert [rope.theta for rope in (ours.rope, ours.local_rope) if rope] == [rope["rope_theta"] for rope in ropes]
    if model_type.startswith("gemma"):
        types = getattr(theirs, "layer_types", ["full_attention"] * 3)
        assert ours.windows == tuple(theirs.sliding_window if kind == "sliding_attention" else 0 for kind in types)
    else:
        assert ours.windows == ((theirs.sliding_window or 0) if model_type == "mistral" else 0,) * 3
    scalar = getattr(theirs, "query_pre_attn_scalar", ours.head_dim)
    assert ours.attention_scale == scalar**-0.5
    assert ours.attention_softcap == (theirs.attn_logit_softcapping if model_type == "gemma2" else 0)
    assert ours.final_softcap == (getattr(theirs, "final_logit_softcapping", None) or 0)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_window_without_its_fields_means_what_transformers_takes_it_for(model_type: str) -> None:
    raw = SHAPE | {"num_hidden_layers": 30, "use_sliding_window": True}
    theirs = transformers.AutoConfig.for_model(model_type, **raw)
    expected = [theirs.sliding_window if kind == "sliding_attention" else 0 for kind in theirs.layer_types]
    assert list(parse_config({"model_type": model_type} | raw).windows) == expected


@pytest.mark.parametrize("pattern", [{}, {"sliding_window_pattern": 4}])
@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_window_pattern_means_what_transformers_takes_it_for(model_type: str, pattern: dict[str, int]) -> None:
    raw = SHAPE | {"num_hidden_layers": 13, "num_key_value_heads": 8, "sliding_window": 9} | pattern
    theirs = transformers.AutoConfig.for_model(model_type, **raw)
    expected = tuple(9 if kind == "sliding_attention" else 0 for kind in theirs.layer_types)
    assert parse_config({"model_type": model_type} | raw).windows == expected


def test_published_spellings_of_the_activation_are_read() -> None:
    for model_type, given in (
        ("gemma", {"hidden_act": "gelu"}),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}),
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}),
        ("gemma3_text", {"hidden_activation": "gelu_pytorch_tanh"}),
        ("phi3", {"hidden_act": "silu"}),
    ):
        assert parse_config(raw_config(model_type, **given)).model_type == model_type


LONG = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope_is_served_up_to_the_original_length(name: str) -> None:
    raw = raw_config("phi3", rope_scaling=LONG | {"type": name}, max_position_embeddings=4096)
    config = parse_config(raw | {"original_max_position_embeddings": 512})
    assert (config.rope.kind, config.max_position_embeddings) == ("longrope", 512)
    assert parse_config(raw | {"max_position_embeddings": 100}).max_position_embeddings == 100


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("gemma", "hidden_act", "silu"),
        ("gemma", "hidden_activation", "gelu"),
        ("gemma", "use_bidirectional_attention", True),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "hidden_act", "silu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma3_text", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("gemma3_text", "rope_parameters", {"sliding_attention": {"rope_type": "longrope", "factor": 2.0}}),
        (
            "gemma3_text",
            "rope_parameters",
            {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
        ),
        ("phi3", "hidden_act", "gelu"),
        ("phi3", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("phi3", "rope_scaling", {"type": "llama3", "factor": 2.0}),
    ],
)
def test_feature_of_a_family_that_is_not_built_is_refused_by_name(model_type: str, field: str, value: Any) -> None:
    error = refusal(raw_config(model_type, **{field: value}))
    assert error.reason is RefusalReason.FEATURE_UNSUPPORTED
    assert error.subject == field
    assert field in error.message


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("gemma2", "attn_logit_softcapping", 0),
        ("gemma2", "attn_logit_softcapping", "50"),
        ("gemma2", "final_logit_softcapping", -1.0),
        ("gemma2", "final_logit_softcapping", float("nan")),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("gemma2", "query_pre_attn_scalar", [256]),
        ("gemma2", "sliding_window", None),
        ("gemma2", "layer_types", ["full_attention"]),
        ("gemma3_text", "sliding_window_pattern", 0),
        ("gemma3_text", "sliding_window_pattern", "6"),
        ("gemma3_text", "layer_types", ["chunked_attention"] * 3),
        ("gemma3_text", "rope_local_base_freq", 1.0),
        ("gemma3_text", "rope_local_base_freq", "1e4"),
        ("gemma3_text", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        ("gemma3_text", "rope_parameters", {"full_attention": [1]}),
        ("gemma3_text", "rope_scaling", {"type": "linear", "factor": 8.0}),
        ("gemma3_text", "rope_scaling", {"rope_type": "linear"}),
        ("phi3", "rope_scaling", {"type": "longrope"}),
        ("phi3", "rope_scaling", LONG | {"short_factor": [1.0]}),
        ("phi3", "rope_scaling", LONG | {"long_factor": [1.0, 0]}),
        ("phi3", "rope_scaling", LONG | {"long_factor": [1.0, "2"]}),
        ("phi3", "rope_scaling", LONG | {"short_factor": [1.0, None]}),
        ("phi3", "rope_scaling", LONG | {"factor": 0}),
        ("phi3", "rope_scaling", LONG | {"attention_factor": "1"}),
        ("phi3", "partial_rotary_factor", 0.8),
        ("phi3", "partial_rotary_factor", 0.1),
        ("phi3", "partial_rotary_factor", 2.0),
        ("phi3", "partial_rotary_factor", "half"),
        ("phi3", "sliding_window", 0),
    ],
)
def test_bad_value_of_a_family_is_refused(model_type: str, field: str, value: Any) -> None:
    raw = raw_config(model_type, original_max_position_embeddings=512) | {field: value}
    if model_type.startswith("gemma"):
        raw["head_dim"] = 4
    error = refusal(raw)
    assert error.reason is RefusalReason.FIELD_INVALID
    assert "config.json" in error.message
    assert len(error.message) < 600


def test_original_length_of_longrope_must_be_above_one() -> None:
    raw = raw_config("phi3", rope_scaling=LONG, original_max_position_embeddings=1)
    assert refusal(raw).reason is RefusalReason.FIELD_INVALID


def test_null_fields_mean_the_default() -> None:
    config = parse_config(raw_config(num_key_value_heads=None, head_dim=None, rope_scaling=None, sliding_window=None))
    assert (config.num_kv_heads, config.head_dim) == (32, 4)
    assert parse_config(raw_config("mistral", sliding_window=None)).windows == (0, 0, 0)


def test_biases_follow_the_family() -> None:
    def biases(model_type: str, **overrides: Any) -> tuple[bool, bool, bool]:
        config = parse_config(raw_config(model_type, **overrides))
        return config.qkv_bias, config.output_bias, config.mlp_bias

    assert biases("llama", attention_bias=True) == (True, True, False)
    assert biases("llama", mlp_bias=True) == (False, False, True)
    assert biases("mistral", attention_bias=True) == (False, False, False)
    assert biases("qwen2") == (True, False, False)
    assert biases("qwen3", attention_bias=True) == (True, True, False)


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "gemma3"},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "llama", "architectures": ["MistralForCausalLM"]},
        {"model_type": "llama", "architectures": "LlamaForCausalLM2"},
        {"model_type": "llama", "architectures": 5},
        {"model_type": ["llama"]},
        {"model_type": None},
    ],
    ids=json.dumps,
)
def test_unsupported_architecture_lists_the_supported_ones(raw: dict[str, Any]) -> None:
    error = refusal(raw_config() | raw)
    assert error.reason is RefusalReason.ARCHITECTURE_UNSUPPORTED
    for name, family in FAMILIES.items():
        assert f"{name} ({family.architecture})" in error.message


def test_missing_model_type_is_refused() -> None:
    assert refusal(SHAPE).reason is RefusalReason.ARCHITECTURE_UNSUPPORTED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("quantization_config", {}),
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5),
        ("pretraining_tp", 2),
        ("is_encoder_decoder", True),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "longrope", "factor": 2.0}),
        ("rope_parameters", {"rope_type": ["yarn"], "factor": 2.0}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("rope_parameters", {"full_attention": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_feature_that_is_not_built_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(raw_config(**{field: value}))
    assert error.reason is RefusalReason.FEATURE_UNSUPPORTED
    assert error.subject == field
    assert field in error.message


def test_unknown_rope_type_lists_the_supported_ones() -> None:
    message = refusal(raw_config(rope_scaling={"rope_type": "spiral"})).message
    assert all(kind in message for kind in ("spiral", "default", "linear", "llama3", "yarn"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", None),
        ("hidden_size", "128"),
        ("hidden_size", 128.0),
        ("num_hidden_layers", True),
        ("num_hidden_layers", -1),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 5),
        ("head_dim", 5),
        ("intermediate_size", []),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("rope_theta", "1e4"),
        ("rope_theta", -5.0),
        ("rope_theta", 0),
        ("rope_theta", 1.0),
        ("rope_theta", 10**400),
        ("rope_scaling", [1]),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": "2"}),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("rope_scaling", {"type": "linear", "factor": float("nan")}),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "attention_factor": "big"}),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "beta_fast": [32]}),
        ("rope_scaling", {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
        ("rope_scaling", {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
        ("dtype", "int8"),
        ("dtype", ["float32"]),
        ("torch_dtype", "float64"),
    ],
)
def test_bad_value_is_refused_and_named(field: str, value: Any) -> None:
    error = refusal(raw_config(**{field: value}))
    assert error.reason is RefusalReason.FIELD_INVALID
    assert "config.json" in error.message
    assert len(error.message) < 600


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sliding_window", 0),
        ("sliding_window", "8"),
        ("use_sliding_window", "true"),
        ("max_window_layers", float("nan")),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "linear_attention", "full_attention"]),
        ("layer_types", [["full_attention"]] * 3),
        ("layer_types", "full_attention"),
    ],
)
def test_bad_window_is_refused(field: str, value: Any) -> None:
    raw = raw_config("qwen2", use_sliding_window=True, sliding_window=8) | {field: value}
    assert refusal(raw).reason is RefusalReason.FIELD_INVALID


def test_unreadable_config_is_refused(tmp_path: Path) -> None:
    def reason() -> RefusalReason:
        with pytest.raises(BaseRefused) as caught:
            read_config(tmp_path)
        return caught.value.reason

    assert reason() is RefusalReason.CONFIG_MISSING
    for content in (b"{", b"[]", b"\xff\xfe", b"3"):
        (tmp_path / "config.json").write_bytes(content)
        assert reason() is RefusalReason.CONFIG_INVALID


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "There is no directory"),
        ("some.gguf", "is a file"),
        ("base/adapter_config.json", "is an adapter, not a base"),
        ("base/README.md", "has no config.json"),
    ],
)
def test_what_is_no_base_is_named(made: str | None, words: str, tmp_path: Path) -> None:
    given = tmp_path / (made or "org/name").split("/")[0]
    if made is not None:
        (tmp_path / made).parent.mkdir(exist_ok=True)
        (tmp_path / made).write_text("{}")
    with pytest.raises(BaseRefused) as caught:
        read_config(given)
    assert caught.value.reason is RefusalReason.CONFIG_MISSING
    assert words in caught.value.message
    assert repr(str(given)) in caught.value.message
    assert ("not downloaded" in caught.value.message) == (made is None)

"""A base model's shape, read from its config.json. What differs between families is data in `FAMILIES`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.core import BaseRefused, RefusalReason


@dataclass(frozen=True, slots=True)
class Family:
    """How a family departs from the common decoder. `bias_field` names the config field that turns on q, k, v (and,
    with `output_bias`, o) biases; `always_qkv_bias` has them without a field. `defaults` is what transformers takes
    for a field that config.json leaves out."""

    architecture: str
    always_qkv_bias: bool = False
    bias_field: str | None = None
    output_bias: bool = False
    mlp_bias_field: str | None = None
    qk_norm: bool = False
    windowed: bool = False  # sliding_window applies to every layer when set
    layered_window: bool = False  # use_sliding_window, from max_window_layers on or by layer_types
    defaults: Mapping[str, Any] | None = None


_QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", bias_field="attention_bias", output_bias=True, mlp_bias_field="mlp_bias"),
    "mistral": Family(
        "MistralForCausalLM",
        windowed=True,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family("Qwen2ForCausalLM", always_qkv_bias=True, layered_window=True, defaults=_QWEN_DEFAULTS),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        bias_field="attention_bias",
        output_bias=True,
        qk_norm=True,
        layered_window=True,
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
    ),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear, llama3 or yarn; `fields` has that kind's numbers."""

    theta: float
    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder. `windows[layer]` 0 is full attention, else the positions a token sees, itself included."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    rope: RopeConfig
    dtype: str  # as the config declares it: "float32", "float16" or "bfloat16"

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def _refuse(field: str, message: str, reason: RefusalReason = RefusalReason.FIELD_INVALID) -> BaseRefused:
    return BaseRefused(reason, f"config.json: {message}", field)


_LARGEST = 1e30  # of any number in a config; the largest in use are rotary bases of about 1e9


class _Fields:
    """Typed access to config.json; an error names the field."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refuse(name, f"{name} must be a positive integer, got {value!r}.")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number of 0 or more: none of those in a config may be negative."""
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
            raise _refuse(name, f"{name} must be a number from 0 to {_LARGEST}, got {value!r:.80}.")
        return float(value)

    def flag(self, name: str | None, default: bool = False) -> bool:
        value = self.raw.get(name) if name else None
        value = default if value is None else value
        if not isinstance(value, bool):
            raise _refuse(str(name), f"{name} must be true or false, got {value!r}.")
        return value


def read_config(directory: Path) -> DecoderConfig:
    """Read and check config.json. Raises BaseRefused with the field, its value and what is supported."""
    _check_directory(directory)
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refuse("config.json", f"cannot be read: {error.strerror}.", RefusalReason.CONFIG_MISSING) from error
    except ValueError as error:
        raise _refuse("config.json", "is not valid JSON.", RefusalReason.CONFIG_INVALID) from error
    if not isinstance(raw, dict):
        raise _refuse("config.json", "is not a JSON object.", RefusalReason.CONFIG_INVALID)
    return parse_config(raw)


def _check_directory(directory: Path) -> None:
    """Raise BaseRefused with what is there instead of a base."""
    shown = repr(str(directory))
    if directory.is_file():
        message = f"{shown} is a file; a base is a directory (`loraplex import-gguf` makes one from a GGUF file)."
    elif not directory.is_dir():
        message = (
            f"There is no directory {shown}. Names on the Hugging Face hub are not downloaded: give the directory."
        )
    elif (directory / "config.json").exists():
        return
    elif (directory / "adapter_config.json").exists():
        message = f"{shown} is an adapter, not a base: give the base's directory, and this one with --lora-modules."
    else:
        message = f"{shown} has no config.json; a base is a directory with config.json, tokenizer.json and safetensors."
    raise BaseRefused(RefusalReason.CONFIG_MISSING, message, "config.json")


def _find_family(raw: Mapping[str, Any]) -> Family:
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    architectures = raw.get("architectures") or ([family.architecture] if family else [None])
    if family is None or not isinstance(architectures, list) or family.architecture not in architectures:
        supported = ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
        raise _refuse(
            "model_type",
            f"model_type {model_type!r} with architectures {architectures!r} is not supported; supported: {supported}.",
            RefusalReason.ARCHITECTURE_UNSUPPORTED,
        )
    return family


def _check_features(raw: Mapping[str, Any]) -> None:
    """Refuse what would change the arithmetic and is not built."""
    expected: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("hidden_act", ("silu", "swish", None)),
        ("quantization_config", (None,)),
        ("partial_rotary_factor", (None, 1.0)),
        ("pretraining_tp", (None, 1)),
        ("is_encoder_decoder", (None, False)),
    )
    for field, allowed in expected:
        if raw.get(field) not in allowed:
            served = " or ".join(repr(value) for value in allowed if value is not None) or "leaving it out"
            raise _refuse(
                field,
                f"{field} {raw[field]!r:.200} is not supported, only {served}.",
                RefusalReason.FEATURE_UNSUPPORTED,
            )


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json object describes. Raises BaseRefused."""
    family = _find_family(raw)
    raw = {**(family.defaults or {}), **raw}
    fields = _Fields(raw)
    _check_features(raw)
    num_layers, num_heads = fields.positive_int("num_hidden_layers"), fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
    hidden_size = fields.positive_int("hidden_size")
    head_dim = fields.positive_int("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise _refuse(
            "num_key_value_heads",
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads}) and "
            f"head_dim ({head_dim}) must be even.",
        )
    has_bias = family.always_qkv_bias or fields.flag(family.bias_field)
    return DecoderConfig(
        model_type=raw["model_type"],
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.positive_int("max_position_embeddings", 2048),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=has_bias,
        output_bias=has_bias and family.output_bias,
        mlp_bias=fields.flag(family.mlp_bias_field),
        qk_norm=family.qk_norm,
        windows=_windows(family, fields, num_layers),
        rope=_rope(raw, fields),
        dtype=_dtype(raw),
    )


def _windows(family: Family, fields: _Fields, num_layers: int) -> tuple[int, ...]:
    if fields.raw.get("sliding_window") is None:
        return (0,) * num_layers
    if family.windowed:
        return (fields.positive_int("sliding_window"),) * num_layers
    if not family.layered_window or not fields.flag("use_sliding_window"):
        return (0,) * num_layers
    window = fields.positive_int("sliding_window")
    types = fields.raw.get("layer_types")
    if types is None:
        first = int(fields.number("max_window_layers", 28))
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    known = {"sliding_attention": window, "full_attention": 0}
    if not isinstance(types, list) or len(types) != num_layers or not all(str(kind) in known for kind in types):
        raise _refuse("layer_types", f"layer_types must name {' or '.join(known)} for each of {num_layers} layers.")
    return tuple(known[kind] for kind in types)


_ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_ORIGINAL = "original_max_position_embeddings"
_OPTIONAL_ROPE_FIELDS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def _rope(raw: Mapping[str, Any], fields: _Fields) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before).

    Where a config has both, transformers follows `rope_scaling`; and an original length beside them goes before theirs.
    """
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(field) or {}
    if not isinstance(given, dict):
        raise _refuse(field, f"{field} must be an object, got {given!r:.200}.")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        supported = ", ".join(_ROPE_FIELDS)
        reason = RefusalReason.FEATURE_UNSUPPORTED
        raise _refuse(field, f"{field} of type {kind!r:.80} is not supported; supported are {supported}.", reason)
    values = dict(given)
    if kind in ("llama3", "yarn"):
        lengths = (raw.get(_ORIGINAL), given.get(_ORIGINAL), fields.positive_int("max_position_embeddings", 2048))
        values[_ORIGINAL] = next(length for length in lengths if length is not None)
    _check_rope(field, kind, values)
    theta = _Fields(given).number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1.0:
        raise _refuse("rope_theta", f"rope_theta must be above 1, got {theta}.")
    return RopeConfig(theta, kind, values)


def _check_rope(field: str, kind: str, values: dict[str, Any]) -> None:
    """Raise BaseRefused unless the numbers of this kind are there and can be computed with."""
    numbers = _Fields(values)
    for name in _ROPE_FIELDS[kind]:
        if values.get(name) is None or numbers.number(name, 0.0) == 0.0:
            raise _refuse(field, f"{field} of type {kind!r} needs a positive number {name}, got {values.get(name)!r}.")
    for name in _OPTIONAL_ROPE_FIELDS:
        numbers.number(name, 0.0)
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise _refuse(field, f"{field}: low_freq_factor must be below high_freq_factor.")
    is_nested = any(isinstance(value, dict) for value in values.values())
    if is_nested or values.get("partial_rotary_factor") not in (None, 1.0):
        message = f"{field}: one setting for all layers and a partial_rotary_factor of 1.0 are supported."
        raise _refuse(field, message, RefusalReason.FEATURE_UNSUPPORTED)


def _dtype(raw: Mapping[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in ("float32", "float16", "bfloat16"):
        raise _refuse("dtype", f"dtype {dtype!r} is not supported; supported are float32, float16, bfloat16.")
    return str(dtype)

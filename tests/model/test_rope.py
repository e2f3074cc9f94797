"""Rotary tables equal transformers', over every kind, spelling and way to leave a field out."""

import copy
from typing import Any

import pytest
import torch
import transformers

from loraplex.model.config import parse_config
from loraplex.model.rope import build_rope_table

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "old theta": {"rope_theta": 5e5},
    "new theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "null scaling": {"rope_theta": 1e6, "rope_scaling": None},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}},
    "old linear": {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "new dict, old theta": {"rope_theta": 99.0, "rope_parameters": {"rope_type": "linear", "factor": 2}},
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    "old llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "old yarn": {"rope_theta": 1e6, "rope_scaling": OLD_YARN},
    "yarn attention factor": {"rope_parameters": YARN | {"attention_factor": 0.8}},
    "yarn mscale pair": {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.2}},
    "yarn lone mscale": {"rope_parameters": YARN | {"mscale": 0.707}},
    "yarn zero mscale": {"rope_parameters": YARN | {"mscale": 0.0, "mscale_all_dim": 1.0}},
    "yarn untruncated": {"rope_parameters": YARN | {"truncate": False}},
    "yarn null truncate": {"rope_parameters": YARN | {"truncate": None}},
    "yarn betas": {"rope_parameters": YARN | {"beta_fast": 8, "beta_slow": 2}},
    "yarn narrow ramp": {"rope_parameters": YARN | {"beta_fast": 1, "beta_slow": 1}},
    "yarn small factor": {"rope_parameters": YARN | {"factor": 1.0}},
    "yarn without original": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}},
    "original at top": {"original_max_position_embeddings": 64, "rope_scaling": OLD_YARN, "rope_theta": 5000.0},
    "both spellings": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "empty new spelling": {"rope_parameters": {}, "rope_theta": 99.0, "rope_scaling": {"type": "linear", "factor": 2}},
    "two type fields": {"rope_scaling": {"rope_type": "linear", "type": "mrope", "factor": 2.0}},
}
# Angles reach max_len radians, where float32 has steps of 3e-5: frequencies one unit apart differ by that much.
ANGLE_TOLERANCE = 3e-5


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("case", CONFIGS)
def test_tables_equal_transformers(case: str, head_dim: int) -> None:
    shape = {
        "vocab_size": 10,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    raw = shape | CONFIGS[case]
    oracle = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(**copy.deepcopy(raw))
    )
    cosine, sine = oracle(torch.zeros(1, 256, head_dim), torch.arange(256)[None])
    config = parse_config({"model_type": "llama"} | raw)
    table = build_rope_table(config.rope, config.rotary_dim, 256)
    half = head_dim // 2
    torch.testing.assert_close(table.cosine, cosine[0, :, :half], rtol=0, atol=ANGLE_TOLERANCE)
    torch.testing.assert_close(table.sine, sine[0, :, :half], rtol=0, atol=ANGLE_TOLERANCE)


def shape_of(head_dim: int) -> dict[str, Any]:
    return {
        "vocab_size": 10,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


LAYERED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "old bases": {"rope_theta": 5e5, "rope_local_base_freq": 700.0},
    "old linear": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "old default": {"rope_scaling": {"rope_type": "default"}},
    "new": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e3},
        }
    },
    "one alone": {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}, "rope_theta": 99.0},
    "null": {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "default"}}},
    "llama3": {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {"rope_type": "default"}}},
    "yarn": {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN | {"factor": 2.0}}},
    "original at top": {
        "original_max_position_embeddings": 16,
        "rope_parameters": {"full_attention": LLAMA3 | {"original_max_position_embeddings": 32}},
    },
    "both": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e5}},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
}


@pytest.mark.parametrize("case", LAYERED)
def test_tables_of_both_kinds_of_layer_equal_transformers(case: str) -> None:
    raw = shape_of(16) | LAYERED[case]
    oracle = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(
        transformers.Gemma3TextConfig(**copy.deepcopy(raw))
    )
    config = parse_config({"model_type": "gemma3_text"} | raw)
    assert config.local_rope is not None
    for kind, rope in (("full_attention", config.rope), ("sliding_attention", config.local_rope)):
        cosine, sine = oracle(torch.zeros(1, 256, 16), torch.arange(256)[None], kind)
        table = build_rope_table(rope, config.rotary_dim, 256)
        torch.testing.assert_close(table.cosine, cosine[0, :, :8], rtol=0, atol=ANGLE_TOLERANCE)
        torch.testing.assert_close(table.sine, sine[0, :, :8], rtol=0, atol=ANGLE_TOLERANCE)


SHORT, FAR = [1.0 + 0.25 * i for i in range(8)], [4.0 + i for i in range(8)]
LONG = {"type": "longrope", "short_factor": SHORT, "long_factor": FAR}
PHI3: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta": {"rope_theta": 5e5},
    "old partial": {"partial_rotary_factor": 0.75},
    "new partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}},
    "both partial": {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
    "longrope": {"rope_scaling": LONG, "original_max_position_embeddings": 64},
    "longrope, first name": {"rope_scaling": LONG | {"type": "yarn"}, "original_max_position_embeddings": 64},
    "longrope, new": {"rope_parameters": LONG | {"rope_type": "longrope"}, "original_max_position_embeddings": 64},
    "longrope inside": {"rope_scaling": LONG | {"original_max_position_embeddings": 32}},
    "longrope default length": {"rope_scaling": LONG},
    "longrope partial": {
        "partial_rotary_factor": 0.5,
        "rope_scaling": LONG | {"short_factor": SHORT[:4], "long_factor": FAR[:4]},
        "original_max_position_embeddings": 64,
    },
    "longrope factor": {"rope_scaling": LONG | {"factor": 16.0}, "original_max_position_embeddings": 64},
    "longrope attention factor": {
        "rope_scaling": LONG | {"attention_factor": 1.25},
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("case", PHI3)
def test_tables_of_phi3_equal_transformers(case: str) -> None:
    raw = shape_of(16) | PHI3[case]
    oracle = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(transformers.Phi3Config(**copy.deepcopy(raw)))
    config = parse_config({"model_type": "phi3"} | raw)
    length = config.max_position_embeddings  # the original one with longrope
    cosine, sine = oracle(torch.zeros(1, length, 16), torch.arange(length)[None])
    table = build_rope_table(config.rope, config.rotary_dim, length)
    half = config.rotary_dim // 2
    assert cosine.shape[-1] == 2 * half
    torch.testing.assert_close(table.cosine, cosine[0, :, :half], rtol=0, atol=ANGLE_TOLERANCE)
    torch.testing.assert_close(table.sine, sine[0, :, :half], rtol=0, atol=ANGLE_TOLERANCE)

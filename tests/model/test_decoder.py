"""Every family and variant gives transformers' logits, alone and with adapters, through the engine as it serves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from loraplex.core import SamplingParams

from ..conftest import MakeAdapter, MakeBase
from ..oracle import (
    FUSED_PROJECTIONS,
    GREEDY,
    PROJECTIONS,
    Harness,
    Reference,
    assert_equals_reference,
    edit_config,
    make_base,
    random_prompt,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}
WINDOWED = {"use_sliding_window": True, "sliding_window": 8}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.5 * i for i in range(8)],
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 64,
}
LAYERED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 3.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
BY_TYPE = WINDOWED | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-grouped": ("llama", {}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-narrow-heads": ("llama", {"head_dim": 6}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-both-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rms-eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "llama-yarn-untruncated": ("llama", {"rope_parameters": YARN | {"truncate": False}}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral-wide-heads-window-of-one": ("mistral", {"head_dim": 32, "sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}),
    "qwen2-window-from-layer": ("qwen2", WINDOWED | {"max_window_layers": 1}),
    "qwen2-window-by-type": ("qwen2", BY_TYPE),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-wide-heads-bias": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3-window-from-layer": ("qwen3", WINDOWED | {"max_window_layers": 2}),
    "qwen3-window-by-type": ("qwen3", BY_TYPE),
    "qwen3-tied-multi-query": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "gemma": ("gemma", {}),
    "gemma-untied-bias": ("gemma", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma-legacy-gelu-wide-heads": ("gemma", {"hidden_act": "gelu", "head_dim": 32, "num_key_value_heads": 1}),
    "gemma-odd-width": ("gemma", {"hidden_size": 72, "rope_parameters": LINEAR}),  # a root that is no whole number
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-attention-cap-only": ("gemma2", {"final_logit_softcapping": None}),
    "gemma2-untied-bias": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2-by-type": ("gemma2", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    "gemma2-all-full": ("gemma2", {"layer_types": ["full_attention"] * 3}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-two-ropes": ("gemma3_text", {"rope_parameters": LAYERED}),
    "gemma3-final-cap": ("gemma3_text", {"final_logit_softcapping": 4.0}),
    "gemma3-attention-cap-has-no-effect": ("gemma3_text", {"attn_logit_softcapping": 2.0}),
    "gemma3-pattern-of-six": ("gemma3_text", {"layer_types": None, "num_hidden_layers": 7}),
    "gemma3-pattern-of-two": ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}),
    "gemma3-untied-multi-query-bias": (
        "gemma3_text",
        {"tie_word_embeddings": False, "num_key_value_heads": 1, "attention_bias": True, "head_dim": 32},
    ),
    "phi3": ("phi3", {}),
    "phi3-tied-multi-query": ("phi3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "phi3-window": ("phi3", {"sliding_window": 8}),
    "phi3-partial-rotary": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "phi3-longrope-partial": (
        "phi3",
        {
            "rope_parameters": LONG
            | {"short_factor": [1.5] * 6, "long_factor": [3.0] * 6, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 64,
        },
    ),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
PROMPT_LENS = (1, 2, 16, 17, 45)  # a page has 16 tokens or more; 45 is beyond every window above


def assert_matches(base: Path, reference: Reference, **settings: Any) -> None:
    harness = Harness(base, **settings)
    prompts = [random_prompt(length) for length in PROMPT_LENS]
    ids = [harness.add(prompt) for prompt in prompts]
    harness.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert_equals_reference(harness.trace(request_id), prompt, reference)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    base = make_base(tmp_path, family, **overrides)
    assert_matches(base, Reference(base))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_generate_of_transformers(family: str, tiny_base: MakeBase) -> None:
    base = tiny_base(family)
    reference, harness = Reference(base), Harness(base)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for length in (1, 30):
        prompt = random_prompt(length, seed=3)
        trace = harness.answer(prompt, params)
        assert trace.tokens == reference.greedy(prompt, 40)
        assert_equals_reference(trace, prompt, reference)


@pytest.mark.parametrize("budget", [1, 3, 16, 37])
@pytest.mark.parametrize("variant", ["llama-grouped", "mistral-window", "qwen3-window-by-type", "gemma2", "gemma3"])
def test_chunked_prefill_equals_transformers(variant: str, budget: int, tiny_base: MakeBase) -> None:
    family, overrides = VARIANTS[variant]
    base = tiny_base(family, **overrides)
    assert_matches(base, Reference(base), max_num_batched_tokens=budget)


def _old_spelling(raw: dict[str, Any]) -> None:
    """config.json as transformers 4 wrote it."""
    rope = raw.pop("rope_parameters")
    kind = rope.pop("rope_type")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    raw["torch_dtype"] = raw.pop("dtype")
    raw["transformers_version"] = "4.40.0"


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 777.0}, LINEAR, LLAMA3, YARN], ids=lambda rope: rope["rope_type"]
)
def test_old_config_spelling_equals_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    base = make_base(tmp_path, "llama", rope_parameters=rope)
    edit_config(base, _old_spelling)
    assert_matches(base, Reference(base))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_checkpoints_served_in_float32_equal_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    base = make_base(tmp_path, "qwen2", dtype=dtype)
    assert json.loads((base / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert_matches(base, Reference(base))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma", "gemma2", "gemma3_text", "phi3"])
def test_narrow_serving_stays_near_float32(family: str, dtype: str, tiny_base: MakeBase) -> None:
    base = tiny_base(family)
    prompt = random_prompt(45)
    trace = Harness(base, dtype=dtype).answer(prompt)
    exact = Reference(base).logits([*prompt, *trace.tokens[:-1]])[len(prompt) - 1 :]
    error = (torch.stack(trace.logits) - exact).abs().max() / exact.abs().max()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)  # 8 and 11 significant bits through 3 layers


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_sharded_checkpoint_gives_the_same_logits(family: str, tiny_base: MakeBase, tmp_path: Path) -> None:
    whole = tiny_base(family)
    model = transformers.AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(tmp_path, max_shard_size="80KB")
    shutil.copy(whole / "tokenizer.json", tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    prompt = random_prompt(20)
    one, other = Harness(whole).answer(prompt), Harness(tmp_path).answer(prompt)
    assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))


# ---------------------------------------------------------------------- adapters
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-r1": {"rank": 1},
    "all-r8": {"rank": 8},
    "all-r33": {"rank": 33},
    "qv-r16-alpha": {"rank": 16, "targets": ("q_proj", "v_proj"), "lora_alpha": 7},
    "down-r64": {"rank": 64, "targets": ("down_proj",)},
    "up-o-r3": {"rank": 3, "targets": ("up_proj", "o_proj")},
    "rslora-r8": {"rank": 8, "use_rslora": True, "lora_alpha": 4},
    "patterns": {
        "rank": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 17, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 3, "layers.0.self_attn.q_proj": 50},
    },
    "rslora-patterns": {
        "rank": 4,
        "use_rslora": True,
        "rank_pattern": {"gate_proj": 9},
        "alpha_pattern": {"gate_proj": 5, "k_proj": 1},
    },
    "one-layer": {"rank": 8, "layers_to_transform": [1]},
}


FUSED_ADAPTERS: dict[str, dict[str, Any]] = {
    "all-r1": {"rank": 1},
    "all-r8": {"rank": 8},
    "all-r33": {"rank": 33},
    "qkv-r16-alpha": {"rank": 16, "targets": ("qkv_proj",), "lora_alpha": 7},
    "gate-up-o-r3": {"rank": 3, "targets": ("gate_up_proj", "o_proj")},
    "rslora-r8": {"rank": 8, "use_rslora": True, "lora_alpha": 4},
    "patterns": {
        "rank": 4,
        "lora_alpha": 8,
        "rank_pattern": {"qkv_proj": 17, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"gate_up_proj": 3, "layers.0.self_attn.qkv_proj": 50},
    },
    "one-layer": {"rank": 8, "layers_to_transform": [1]},
}


def assert_adapter_matches(base: Path, adapter: Path) -> None:
    harness = Harness(base)
    ref = harness.load("a", adapter)
    prompts = [random_prompt(length, seed=5) for length in (1, 19, 40)]
    ids = [harness.add(prompt, adapter=ref) for prompt in prompts]
    plain = harness.add(prompts[1])
    harness.run()
    assert not torch.allclose(harness.trace(ids[1]).logits[0], harness.trace(plain).logits[0], atol=0.05)
    for merged in (False, True):
        reference = Reference(base, adapter, merged=merged)
        for request_id, prompt in zip(ids, prompts, strict=True):
            # Logits reach 7; on the worst of these PEFT's own float32 is 4e-5 off float64, ours 2e-5.
            assert_equals_reference(harness.trace(request_id), prompt, reference, atol=1e-4)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_equals_peft_unmerged_and_merged(adapter: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    assert_adapter_matches(base, tiny_adapter(base, **ADAPTERS[adapter]))


@pytest.mark.parametrize("adapter", ["all-r8", "patterns"])
@pytest.mark.parametrize(
    "variant",
    [
        "mistral-window",
        "qwen2-window-by-type",
        "qwen3-wide-heads-bias",
        "llama-both-biases",
        "gemma",
        "gemma2",
        "gemma3-two-ropes",
        "phi3-window",
        "phi3-longrope-partial",
    ],
)
def test_adapter_equals_peft_in_every_family(
    variant: str, adapter: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    family, overrides = VARIANTS[variant]
    base = tiny_base(family, **overrides)
    options = FUSED_ADAPTERS if family == "phi3" else ADAPTERS
    assert_adapter_matches(base, tiny_adapter(base, **options[adapter]))


@pytest.mark.parametrize("adapter", FUSED_ADAPTERS)
def test_adapter_on_fused_projections_equals_peft(adapter: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("phi3")
    assert_adapter_matches(base, tiny_adapter(base, **FUSED_ADAPTERS[adapter]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "adapter"),
    [(name, adapter) for name in VARIANTS for adapter in (FUSED_ADAPTERS if "phi3" in name else ADAPTERS)],
)
def test_every_adapter_equals_peft_on_every_variant(
    variant: str, adapter: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    family, overrides = VARIANTS[variant]
    base = tiny_base(family, **overrides)
    options = FUSED_ADAPTERS if family == "phi3" else ADAPTERS
    assert_adapter_matches(base, tiny_adapter(base, **options[adapter]))


@pytest.mark.parametrize("family", FAMILIES)
def test_projections_named_here_are_all_that_exist(family: str, tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base(family))
    expected = FUSED_PROJECTIONS if family == "phi3" else PROJECTIONS
    assert {site.module for site in harness.engine.base.sites} == set(expected)
    assert GREEDY.greedy

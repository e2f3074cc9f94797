"""The served families: how each departs from the common decoder, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Family:
    """How a family departs from the common decoder. `bias_field` names the config field that turns on q, k, v (and,
    with `output_bias`, o) biases; `always_qkv_bias` has them without a field. `defaults` is what transformers takes
    for a field that config.json leaves out. `allowed` are the values of a field that are served, where they are others
    than the common ones."""

    architecture: str
    always_qkv_bias: bool = False
    bias_field: str | None = None
    output_bias: bool = False
    mlp_bias_field: str | None = None
    qk_norm: bool = False
    windowed: bool = False  # sliding_window applies to every layer when set
    layered_window: bool = False  # use_sliding_window, from max_window_layers on or by layer_types
    window_pattern: int = 0  # by layer_types, else each layer but every window_pattern-th
    window_pattern_field: str | None = None  # config field that gives another window_pattern
    fused: bool = False  # qkv_proj and gate_up_proj in the checkpoint and for adapters
    activation: str = "silu"
    norm_offset: bool = False  # norms multiply by 1 + weight
    scaled_embeddings: bool = False  # by the root of hidden_size
    sandwich_norms: bool = False  # a norm after attention and MLP too
    query_scalar: bool = False  # query_pre_attn_scalar in place of head_dim
    attention_softcap: bool = False
    final_softcap: bool = False
    local_rope: bool = False  # layers with a window have a rotary embedding of their own
    rope_kinds: tuple[str, ...] = ROPE_KINDS
    partial_rotary: bool = False
    defaults: Mapping[str, Any] | None = None
    allowed: Mapping[str, tuple[Any, ...]] | None = None


_QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
_TANH, _CAUSAL = "gelu_pytorch_tanh", {"use_bidirectional_attention": (None, False)}
_GEMMA_DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_GEMMA2_DEFAULTS = _GEMMA_DEFAULTS | {"num_key_value_heads": 4, "sliding_window": 4096}
# transformers reads hidden_activation here, yet published configs carry both: they must agree.
_GEMMA2_ALLOWED = _CAUSAL | {"hidden_act": (None, "gelu", _TANH), "hidden_activation": (None, _TANH)}

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
    "gemma": Family(
        "GemmaForCausalLM",
        bias_field="attention_bias",
        output_bias=True,
        activation="gelu_tanh",
        norm_offset=True,
        scaled_embeddings=True,
        defaults=_GEMMA_DEFAULTS | {"num_key_value_heads": 16},
        # "gelu" stands for the tanh form in this family's first configs; so transformers takes it.
        allowed=_CAUSAL | {"hidden_act": (None, "gelu", _TANH), "hidden_activation": (None, _TANH)},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        bias_field="attention_bias",
        output_bias=True,
        activation="gelu_tanh",
        norm_offset=True,
        scaled_embeddings=True,
        sandwich_norms=True,
        query_scalar=True,
        attention_softcap=True,
        final_softcap=True,
        window_pattern=2,
        defaults=_GEMMA2_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        allowed=_GEMMA2_ALLOWED,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        bias_field="attention_bias",
        output_bias=True,
        qk_norm=True,
        activation="gelu_tanh",
        norm_offset=True,
        scaled_embeddings=True,
        sandwich_norms=True,
        query_scalar=True,
        final_softcap=True,  # attn_logit_softcapping has no effect in this family, in transformers as here
        window_pattern=6,
        window_pattern_field="sliding_window_pattern",
        local_rope=True,
        defaults=_GEMMA2_DEFAULTS | {"max_position_embeddings": 131072},
        allowed=_GEMMA2_ALLOWED,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        windowed=True,
        fused=True,
        rope_kinds=("default", "longrope"),
        partial_rotary=True,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
}

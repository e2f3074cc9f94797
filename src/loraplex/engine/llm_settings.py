"""Keyword settings of `LLM`: those of EngineConfig, and vLLM's where they can be honoured or change nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from loraplex.core import ConfigError, limits
from loraplex.engine.config import EngineConfig

_DTYPE_ALIASES: Mapping[Any, str] = {
    "half": "float16",
    "float": "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """What the keywords of an `LLM` come to."""

    config: EngineConfig
    enable_lora: bool
    seed: int | None


@dataclass(frozen=True, slots=True)
class _Rule:
    """Values of a setting of vLLM that change nothing here, and what there is instead of the others."""

    accepts: Callable[[Any], bool]
    wanted: str
    instead: str


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _is_anything(value: Any) -> bool:
    return True


def _is_logprobs_limit(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limits.MAX_LOGPROBS


def _only(instead: str, **accepted: Any) -> dict[str, _Rule]:
    """Rules that take one value, or one of a tuple; None is taken everywhere."""

    def rule(value: Any) -> _Rule:
        values = value if isinstance(value, tuple) else (value,)
        wanted = " or ".join(map(repr, values))
        return _Rule(lambda given: any(type(given) is type(v) and given == v for v in values), wanted, instead)

    return {name: rule(value) for name, value in accepted.items()}


def _any(accepts: Callable[[Any], bool], wanted: str, *names: str) -> dict[str, _Rule]:
    """Rules for settings whose every sensible value changes nothing."""
    return dict.fromkeys(names, _Rule(accepts, wanted, "the setting has no effect here, leave it out"))


_RULES: Mapping[str, _Rule] = {
    **_any(
        *(_is_bool, "true or false", "disable_log_stats", "disable_log_requests"),
        *("disable_custom_all_reduce", "disable_async_output_proc", "async_scheduling", "use_tqdm_on_load"),
    ),
    **_any(
        *(_is_count, "a number of at least 0", "swap_space", "cpu_offload_gb", "max_cpu_loras"),
        *("lora_extra_vocab_size", "max_seq_len_to_capture", "max_parallel_loading_workers"),
    ),
    **_any(_is_anything, "anything", "compilation_config", "download_dir", "hf_token"),
    "max_logprobs": _Rule(
        _is_logprobs_limit, f"an integer from 0 to {limits.MAX_LOGPROBS}", f"{limits.MAX_LOGPROBS} is the most given"
    ),
    **_only(
        "one process computes; num_threads says with how many threads",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        distributed_executor_backend=("uni", "mp"),
        fully_sharded_loras=False,
    ),
    **_only("code that comes with a checkpoint is never run", trust_remote_code=False),
    **_only("checkpoints of plain float weights are served, in dtype", quantization=None),
    **_only("keys and values are kept in dtype", kv_cache_dtype="auto"),
    **_only("adapters are converted to dtype", lora_dtype="auto"),
    **_only("weights are read from safetensors", load_format=("auto", "safetensors")),
    **_only("adapters with biases are refused", enable_lora_bias=False),
    **_only("tokenizer.json of the base is used", tokenizer_mode=("auto", "hf"), skip_tokenizer_init=False),
    **_only("model is a directory and nothing is downloaded", revision=None, tokenizer_revision=None),
    **_only("the config is read from config.json", config_format=("auto", "hf"), hf_overrides={}),
    **_only(
        "text is generated, nothing else is computed",
        task=("auto", "generate"),
        runner=("auto", "generate"),
        convert=("auto", "none"),
    ),
    **_only("there is no speculative decoding", speculative_config=None),
    **_only("there is no prefix cache for requests without a tenant, and these have none", enable_prefix_caching=False),
    **_only("prompts are always computed in chunks, see max_num_batched_tokens", enable_chunked_prefill=True),
    **_only("memory_bytes or kv_pages sizes the pool", kv_cache_memory_bytes=None, num_gpu_blocks_override=None),
    **_only("the page size follows from the model", block_size=None),
    **_only("the defaults are those of SamplingParams", generation_config="vllm", override_generation_config={}),
    **_only("requests run in the order given", scheduling_policy="fcfs"),
    **_only("windows are those of the model", disable_sliding_window=False),
    **_only("the operations are chosen by dtype and processor", attention_backend=None),
    **_only("SamplingParams has all there is", logits_processors=None),
}
_OWN = tuple(field.name for field in fields(EngineConfig))
_HONOURED = ("enable_lora", "seed", "tokenizer")


def read_settings(model: str, settings: Mapping[str, Any]) -> LlmSettings:
    """Sort an `LLM`'s keywords. Raises ConfigError for a name that is not known or a value that cannot be honoured."""
    own: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _OWN:
            own[name] = value
        elif name in _RULES:
            _check_rule(name, value)
        elif name not in _HONOURED:
            known = ", ".join(sorted({*_OWN, *_RULES, *_HONOURED, "served_model_name"}))
            raise ConfigError(f"LLM has no setting {name!r:.80}; it knows {known}.")
    if "dtype" in own and isinstance(own["dtype"], (str, torch.dtype)):
        own["dtype"] = _DTYPE_ALIASES.get(own["dtype"], own["dtype"])
    _check_tokenizer(model, settings.get("tokenizer"))
    return LlmSettings(EngineConfig(**own), _read_enable_lora(settings.get("enable_lora")), _read_seed(settings))


def _check_rule(name: str, value: Any) -> None:
    rule = _RULES[name]
    if value is not None and not rule.accepts(value):
        raise ConfigError(f"{name} may only be {rule.wanted}, got {value!r:.80}: {rule.instead}.")


def _check_tokenizer(model: str, tokenizer: Any) -> None:
    if tokenizer is not None and str(tokenizer) != model:
        message = f"tokenizer may only be the base's own directory {model!r}, got {str(tokenizer)!r:.200}."
        raise ConfigError(message)


def _read_enable_lora(value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"enable_lora must be true or false, got {value!r:.80}.")
    return value is not False


def _read_seed(settings: Mapping[str, Any]) -> int | None:
    seed = settings.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"seed must be an integer, got {seed!r:.80}.")
    return seed

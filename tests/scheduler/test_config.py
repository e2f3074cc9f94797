"""Settings that cannot work are refused with the value, the limit and the knob."""

import math

import pytest

from loraplex.core import ConfigError
from loraplex.scheduler import SchedulerConfig

KNOBS = {
    "max_model_len": "--max-model-len",
    "max_step_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "max_loras": "--max-loras",
}


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", KNOBS)
def test_counts_start_at_one(name: str, value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**{"max_model_len": 8, name: value})
    assert caught.value.message == f"{name} must be at least 1, got {value}; set {KNOBS[name]}."


def test_smallest_config_is_accepted() -> None:
    config = SchedulerConfig(1, max_step_tokens=1, max_num_seqs=1, max_loras=1, adapter_patience_s=0)
    assert config.max_step_tokens == 1


@pytest.mark.parametrize(("max_step_tokens", "works"), [(7, False), (8, True), (9, True)])
def test_every_running_sequence_needs_a_token_of_the_budget(max_step_tokens: int, works: bool) -> None:
    if works:
        SchedulerConfig(8, max_step_tokens=max_step_tokens, max_num_seqs=8)
        return
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(8, max_step_tokens=max_step_tokens, max_num_seqs=8)
    for part in ("(7)", "(8)", "--max-num-batched-tokens", "--max-num-seqs"):
        assert part in caught.value.message


@pytest.mark.parametrize("patience_s", [-0.1, math.nan, math.inf])
def test_patience_is_a_finite_time(patience_s: float) -> None:
    with pytest.raises(ConfigError, match="adapter_patience_s must be 0 or more"):
        SchedulerConfig(8, adapter_patience_s=patience_s)


@pytest.mark.parametrize(("tokens", "works"), [(8, False), (9, True), (None, True)])
def test_prompts_need_tokens_beside_those_of_decoding_sequences(tokens: int | None, works: bool) -> None:
    if works:
        assert (
            SchedulerConfig(8, max_step_tokens=16, max_num_seqs=8, max_mixed_tokens=tokens).max_mixed_tokens == tokens
        )
        return
    with pytest.raises(ConfigError, match=r"max_mixed_tokens \(8\) must be more than .* --max-num-mixed-tokens"):
        SchedulerConfig(8, max_step_tokens=16, max_num_seqs=8, max_mixed_tokens=tokens)

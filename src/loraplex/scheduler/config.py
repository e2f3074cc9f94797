"""Settings of the scheduler."""

import math
from dataclasses import dataclass

from loraplex.core import ConfigError

_KNOBS = {"max_step_tokens": "--max-num-batched-tokens"}  # flags with vLLM's name; the others are named as the field


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets of a step and bounds of the queue.

    `max_loras` bounds the distinct adapters of a step and reserves no memory. `adapter_patience_s`: how long a request
    that waits for an adapter's turn may be overtaken by requests whose adapter already runs. The base may overtake it
    after that as well.
    """

    max_model_len: int
    max_step_tokens: int = 512
    max_num_seqs: int = 64
    max_loras: int = 32
    adapter_patience_s: float = 0.5

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_step_tokens", "max_num_seqs", "max_loras"):
            value = getattr(self, name)
            if value < 1:
                knob = _KNOBS.get(name, "--" + name.replace("_", "-"))
                raise ConfigError(f"{name} must be at least 1, got {value}; set {knob}.")
        if self.max_step_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sequence takes one token of the budget; set --max-num-batched-tokens or --max-num-seqs."
            )
        if not (math.isfinite(self.adapter_patience_s) and self.adapter_patience_s >= 0):
            raise ConfigError(f"adapter_patience_s must be 0 or more seconds, got {self.adapter_patience_s}.")

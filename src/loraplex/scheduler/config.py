"""Settings of the scheduler."""

import math
from dataclasses import dataclass, field

from loraplex.core import ConfigError
from loraplex.pool import ReloadCost

_KNOBS = {"max_step_tokens": "--max-num-batched-tokens"}  # flags with vLLM's name; the others are named as the field


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets of a step and bounds of the queue.

    `max_loras` bounds the distinct adapters of a step and reserves no memory (None: as many as sequences).
    `adapter_patience_s`: how long a request that waits for an adapter's turn may be overtaken by requests whose adapter
    already runs. After that it may be by the base, and by requests whose adapter began to run less than so long ago.
    `aging_s`: who has waited so long counts as of the highest priority that waits.

    `max_mixed_tokens` bounds a step in which sequences decode, which wait for the prompts in it (None: no bound of its
    own). A prompt that comes beside them takes more steps.

    `load_ahead`: adapters are loaded beside steps, with at most `max_load_pages` pages on their way (None: no bound);
    without, a step waits for the adapters that it brings in. `tpot_target_ms` bounds, by the calibrated cost model, the
    ranks of a step and its prompt tokens where sequences decode; `CostModel` says what both get at least.
    `fair_shares`: tenants are served by what they were served, not by age alone. `max_waiting_tokens` bounds the prompt
    tokens of the queue.

    `reload` and `prefix_page_s` say what bringing an adapter back and computing a cached page again take; with 0 the
    least recently used goes first.
    """

    max_model_len: int
    max_step_tokens: int = 512
    max_num_seqs: int = 64
    max_mixed_tokens: int | None = None
    max_loras: int | None = None
    adapter_patience_s: float = 0.5
    aging_s: float = 10.0
    load_ahead: bool = False
    max_load_pages: int | None = None
    tpot_target_ms: float | None = None
    fair_shares: bool = True
    max_waiting_tokens: int | None = None
    prefix_caching: bool = True
    reload: ReloadCost = field(default_factory=ReloadCost)
    prefix_page_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_step_tokens", "max_num_seqs", "max_loras"):
            value = getattr(self, name)
            if value is not None and value < 1:
                knob = _KNOBS.get(name, "--" + name.replace("_", "-"))
                raise ConfigError(f"{name} must be at least 1, got {value}; set {knob}.")
        if self.max_step_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sequence takes one token of the budget; set --max-num-batched-tokens or --max-num-seqs."
            )
        if self.max_mixed_tokens is not None and self.max_mixed_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"max_mixed_tokens ({self.max_mixed_tokens}) must be more than max_num_seqs ({self.max_num_seqs}): "
                "prompts take what decoding sequences leave; set --max-num-mixed-tokens or --max-num-seqs."
            )
        for name in ("adapter_patience_s", "aging_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be 0 or more seconds, got {value}.")
        for name in ("max_load_pages", "max_waiting_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}; set --{name.replace('_', '-')}.")
        target = self.tpot_target_ms
        if target is not None and not (math.isfinite(target) and target > 0):
            raise ConfigError(f"tpot_target_ms must be a number of milliseconds above 0, got {target}.")

    @property
    def max_distinct(self) -> int:
        """Most distinct adapters of a step."""
        return self.max_num_seqs if self.max_loras is None else self.max_loras

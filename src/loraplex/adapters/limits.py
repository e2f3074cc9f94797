"""Limits on adapter artifacts. An artifact past one of them is refused, never truncated."""

from dataclasses import dataclass

from loraplex.core import ConfigError

MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 4 * 2**20
MAX_TENSORS = 20_000
MAX_TENSOR_DIMS = 8
MAX_PATTERN_CHARS = 512  # of a regular expression
MAX_EXPRESSIONS = 256  # regular expressions of one config
PATTERN_CPU_S = 2  # seconds of processor time for all of them
MAX_WRAPPERS = 16  # parts of one tensor name that wrappers put there
MAX_WRAPPINGS = 8  # different ways in which the names of one file are wrapped; each is matched with each module
DEFAULT_MAX_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What this server takes in. Raises ConfigError if a limit cannot work."""

    max_rank: int | None = None  # --max-lora-rank; None is no limit
    max_bytes: int = DEFAULT_MAX_BYTES  # of adapter_model.safetensors

    def __post_init__(self) -> None:
        if self.max_rank is not None and self.max_rank < 1:
            raise ConfigError(f"--max-lora-rank must be at least 1, got {self.max_rank}.")
        if self.max_bytes < 1:
            raise ConfigError(f"max_bytes of an adapter must be at least 1, got {self.max_bytes}.")

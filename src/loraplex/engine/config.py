"""Settings of an engine, and how "auto" values are resolved."""

import os
from dataclasses import dataclass

from loraplex.core import ConfigError

MIB = 2**20
GIB = 2**30
DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("cpu",)
DEFAULT_NUM_SEQS = 64
_OPTIONAL = ("num_threads", "max_model_len", "max_num_seqs", "max_lora_rank", "kv_pages")
_COUNTS = ("max_num_batched_tokens", "max_loras", "max_waiting", "memory_bytes")
_FLAGS = {"memory_bytes": "--memory"}  # the others are named as the field


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings with vLLM's meanings where vLLM has them. None is resolved from the model or the machine.

    The pool is `kv_pages` pages, or as many as `memory_bytes` hold. `max_loras` bounds distinct adapters in a step and
    `max_lora_rank` is a limit: neither reserves memory.
    """

    dtype: str = "auto"
    device: str = "cpu"
    num_threads: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int | None = None
    max_loras: int = 32
    max_lora_rank: int | None = None
    kv_pages: int | None = None
    memory_bytes: int = 1 * GIB
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; choose one of {', '.join(DTYPES)} (--dtype).")
        if self.device not in DEVICES:
            message = f"device {self.device!r} is not supported; choose one of {', '.join(DEVICES)}."
            raise ConfigError(message)
        for name in _OPTIONAL + _COUNTS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r} ({flag}).")

    @property
    def num_seqs(self) -> int:
        """Most sequences in a step: as asked, else 64 or what the token budget holds."""
        return self.max_num_seqs or min(DEFAULT_NUM_SEQS, self.max_num_batched_tokens)

    @property
    def threads(self) -> int:
        """Threads for the model: as asked, else the cores this process may use."""
        return self.num_threads or len(os.sched_getaffinity(0))

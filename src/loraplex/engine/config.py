"""Settings of an engine, and how "auto" values are resolved."""

import os
import re
from dataclasses import dataclass, replace

from loraplex.core import ConfigError

MIB = 2**20
GIB = 2**30
DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = "auto, cpu, cuda or cuda:<number>"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
CPU_MEMORY_BYTES = 1 * GIB
GPU_MEMORY_UTILIZATION = 0.9
MIXED_TOKENS = 512  # of steps in which sequences decode: those that CUDA graphs are captured for
_OPTIONAL = (
    *("num_threads", "max_model_len", "max_num_seqs", "max_loras", "max_lora_rank"),
    *("kv_pages", "max_num_batched_tokens", "max_num_mixed_tokens", "memory_bytes", "max_waiting_tokens"),
)
_COUNTS = ("max_waiting",)
_FLAGS = {"memory_bytes": "--memory", "prefix_caching": "--enable-prefix-caching"}  # the others are named as the field


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings with vLLM's meanings where vLLM has them. None is resolved from the model or the machine.

    The pool is `kv_pages` pages, or as many as `memory_bytes` hold; on a GPU without either, what base and workspace
    leave of `gpu_memory_utilization` of its memory. `max_loras` bounds distinct adapters in a step (None: as many as
    sequences) and `max_lora_rank` is a limit: neither reserves memory. `enforce_eager`: no CUDA graphs. `max_waiting`
    bounds the queue in sequences, `max_waiting_tokens` in prompt tokens. `tpot_target_ms` bounds the ranks and the
    prompt tokens of a step in which sequences decode, by what the engine has measured. `max_num_mixed_tokens` bounds
    the tokens of a step in which sequences decode: each of them waits for the whole step. `prefix_caching`: requests of
    a tenant share computed prefixes; those without a tenant never do.
    """

    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    kv_pages: int | None = None
    memory_bytes: int | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    max_waiting: int = 1024
    enforce_eager: bool = False
    max_waiting_tokens: int | None = None
    max_num_mixed_tokens: int | None = None
    tpot_target_ms: float | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; choose one of {', '.join(DTYPES)} (--dtype).")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device {self.device!r:.80} is not supported; choose one of {DEVICES} (--device).")
        for name in ("enforce_eager", "prefix_caching"):
            value: object = getattr(self, name)
            if not isinstance(value, bool):
                flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
                raise ConfigError(f"{name} must be true or false, got {value!r:.80} ({flag}).")
        target: object = self.tpot_target_ms
        is_number = isinstance(target, (int, float)) and not isinstance(target, bool)
        if target is not None and not (is_number and 0 < target < float("inf")):  # type: ignore[operator]
            raise ConfigError(f"tpot_target_ms must be a number above 0, got {target!r:.80} (--tpot-target-ms).")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {share!r:.80} (--gpu-memory-utilization)."
            )
        for name in _OPTIONAL + _COUNTS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r} ({flag}).")

    def resolved(self, *, on_gpu: bool) -> "EngineConfig":
        """With the token budgets, the sequences of a step and, on the CPU, the pool as suit the device."""
        budget = self.max_num_batched_tokens or (2048 if on_gpu else 512)
        num_seqs = self.max_num_seqs or min(256 if on_gpu else 64, budget)
        mixed = max(MIXED_TOKENS, 2 * num_seqs) if on_gpu and not self.enforce_eager else None
        return replace(
            self,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
            max_num_mixed_tokens=self.max_num_mixed_tokens or mixed,
            memory_bytes=self.memory_bytes or (None if on_gpu else CPU_MEMORY_BYTES),
        )

    @property
    def threads(self) -> int:
        """Threads for the model: as asked, else the cores this process may use."""
        return self.num_threads or len(os.sched_getaffinity(0))

"""Settings of the HTTP server."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.core import ConfigError
from loraplex.server.preloading import PreloadConfig

MIN_API_KEY_CHARS = 8
DEFAULT_BODY_BUDGET_BYTES = 64 * 2**20
_POSITIVE = (
    *("max_body_bytes", "body_budget_bytes", "body_timeout_s"),
    *("stall_timeout_s", "host_patience_s", "adapter_read_timeout_s"),
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the HTTP server may do. Checked when built; raises ConfigError.

    `api_key` None leaves the routes open to whoever reaches the port. `stall_timeout_s` is how long a reader may refuse
    bytes before its stream is cancelled; `body_timeout_s` how long a client may take to send a body.
    `max_body_bytes` None is what prompts of the engine's context need. `body_budget_bytes` bounds all bodies in flight;
    a tenant may have a quarter of it.

    `host_adapter_bytes` of adapters of a registry are kept in host memory, and at most `max_host_adapters`, if given; a
    request waits up to `host_patience_s` for a place, and its adapter's files must come in `adapter_read_timeout_s`.
    `adapter_roots` are the directories below which operators may load adapters at run time; None: not at all.
    `preloads` are adapters that are brought into the pool without a request.
    `public_metrics` opens /metrics to callers without a key also where there is a registry, whose adapter names it
    shows.
    """

    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int | None = None
    body_budget_bytes: int = DEFAULT_BODY_BUDGET_BYTES
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0
    access_log: bool = True
    max_host_adapters: int | None = None
    host_adapter_bytes: int = 4 * 2**30
    host_patience_s: float = 2.0
    adapter_read_timeout_s: float = 30.0
    adapter_roots: tuple[Path, ...] | None = None
    public_metrics: bool = False
    preloads: PreloadConfig = field(default_factory=PreloadConfig)

    def __post_init__(self) -> None:
        if self.api_key is not None and not _is_usable_key(self.api_key):
            raise ConfigError(f"--api-key must be at least {MIN_API_KEY_CHARS} printable ASCII characters, no spaces.")
        for name in _POSITIVE:
            value = getattr(self, name)
            if name == "max_body_bytes" and value is None:
                continue
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} must be a number above 0, got {value!r}.")
        if self.host_adapter_bytes < 1:
            raise ConfigError(f"--cpu-lora-memory must be at least 1 byte, got {self.host_adapter_bytes}.")
        if self.max_host_adapters is not None and self.max_host_adapters < 1:
            raise ConfigError(f"--max-cpu-loras must be at least 1, got {self.max_host_adapters}.")


def _is_usable_key(key: str) -> bool:
    """True for a key that survives an HTTP header unchanged."""
    return len(key) >= MIN_API_KEY_CHARS and all("!" <= char <= "~" for char in key)

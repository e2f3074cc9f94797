"""Host memory for adapters: the error where it is used up, and how an adapter comes back without its artifact."""

from enum import Enum

from loraplex.core.errors import Overloaded, OverloadReason

_RETRY_AFTER_S = 1.0  # the memory does not know who uses it, nor for how long; whoever leases adapters may say more


class HostMemoryFull(Overloaded):
    """Host memory for adapters has no room now. `missing_bytes` must be given back before there is some."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message, _RETRY_AFTER_S, OverloadReason.HOST_MEMORY)
        self.missing_bytes = missing_bytes


class Restored(Enum):
    """Where an adapter was that is ready again without having been read from its artifact."""

    HERE = "here"  # it had not left yet
    FILE = "file"  # packed, on disk

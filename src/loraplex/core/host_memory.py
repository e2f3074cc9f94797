"""The error of host memory for adapters that is used up."""

from loraplex.core.errors import Overloaded, OverloadReason

_RETRY_AFTER_S = 1.0  # the memory does not know who uses it, nor for how long; whoever leases adapters may say more


class HostMemoryFull(Overloaded):
    """Host memory for adapters has no room now. `missing_bytes` must be given back before there is some."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message, _RETRY_AFTER_S, OverloadReason.HOST_MEMORY)
        self.missing_bytes = missing_bytes

"""Room for adapters in host memory: how many, how many bytes, and how much of it one tenant may use at once.

What runs cannot be interrupted, so a tenant's requests never use all of the room: the last quarter is left to others.
"""

from collections import Counter

from loraplex.core import AdapterRefused, CallerLimitReached, Overloaded, OverloadReason, RefusalReason


def share_of(total: int) -> int:
    """What one tenant may use at once: all but a quarter, but at least one."""
    return max(1, total - max(1, total // 4))


class HostRoom:
    """The limits and the books; it decides nothing. A tenant uses what its requests lease, not what lies idle."""

    __slots__ = ("_adapters_used", "_bytes_used", "_num_adapters", "_num_bytes", "max_adapters", "max_bytes")

    def __init__(self, max_adapters: int | None, max_bytes: int) -> None:
        """`max_adapters` None: only bytes are bounded."""
        self.max_adapters = max_adapters
        self.max_bytes = max_bytes
        self._num_adapters = self._num_bytes = 0
        self._adapters_used: Counter[str] = Counter()
        self._bytes_used: Counter[str] = Counter()

    def add(self, num_bytes: int) -> None:
        """An adapter came."""
        self._num_adapters, self._num_bytes = self._num_adapters + 1, self._num_bytes + num_bytes

    def remove(self, num_bytes: int) -> None:
        """An adapter went."""
        self._num_adapters, self._num_bytes = self._num_adapters - 1, self._num_bytes - num_bytes

    def fits(self, num_bytes: int, num_idle: int = 0, idle_bytes: int = 0) -> bool:
        """Whether one more adapter has room once the idle ones that are counted here have gone."""
        free = self.max_bytes - self._num_bytes + idle_bytes
        has_place = self.max_adapters is None or self._num_adapters - num_idle < self.max_adapters
        return has_place and num_bytes <= free

    def use(self, tenant: str, num_bytes: int) -> None:
        """A tenant leases an adapter that it did not lease."""
        self._adapters_used[tenant] += 1
        self._bytes_used[tenant] += num_bytes

    def end_use(self, tenant: str, num_bytes: int) -> None:
        """A tenant's last lease of an adapter has ended."""
        self._adapters_used[tenant] -= 1
        self._bytes_used[tenant] -= num_bytes
        if not self._adapters_used[tenant]:
            del self._adapters_used[tenant], self._bytes_used[tenant]

    def num_used(self, tenant: str) -> int:
        """Adapters that the tenant's requests lease."""
        return self._adapters_used[tenant]

    def is_within_share(self, tenant: str, num_bytes: int) -> bool:
        """Whether the tenant may use one more adapter; its first one may be of any size."""
        num_used, bytes_used = self._adapters_used[tenant], self._bytes_used[tenant]
        has_place = self.max_adapters is None or num_used < share_of(self.max_adapters)
        return not num_used or (has_place and bytes_used + num_bytes <= share_of(self.max_bytes))

    def check_possible(self, num_bytes: int) -> None:
        """Raise AdapterRefused for an adapter that would not fit if it were alone."""
        if num_bytes > self.max_bytes:
            message = f"The adapter has {num_bytes} bytes; the server keeps {self.max_bytes} (--cpu-lora-memory)."
            raise AdapterRefused(RefusalReason.TOO_LARGE, message)

    def refusal(self, tenant: str, num_bytes: int, retry_after_s: float) -> Overloaded:
        """Why a request did not get a place in time."""
        if not self.is_within_share(tenant, num_bytes):
            limit = f"{share_of(self.max_bytes)} bytes (three quarters of --cpu-lora-memory)"
            if self.max_adapters is not None:
                limit = f"{share_of(self.max_adapters)} (three quarters of --max-cpu-loras), or {limit}"
            message = f"This tenant's requests use their share of adapters in host memory: {limit}."
            return CallerLimitReached(message, retry_after_s)
        limit = f"{self.max_bytes} bytes (--cpu-lora-memory)"
        if self.max_adapters is not None:
            limit = f"{self.max_adapters} (--max-cpu-loras), {limit}"
        message = f"The adapters in host memory are all in use: {limit}."
        return Overloaded(message, retry_after_s, OverloadReason.HOST_MEMORY)

"""What is told of adapters in host memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostFigures:
    """Adapters that are ready in host memory now, and how they came and went. All but the first only grow."""

    num_ready: int
    num_loads: int = 0  # from the artifact store
    load_s: float = 0.0  # seconds these took, each for itself
    num_failures: int = 0
    num_evictions: int = 0


class HostCounters:
    """Counts of one server."""

    __slots__ = ("_load_s", "_num_evictions", "_num_failures", "_num_loads")

    def __init__(self) -> None:
        self._num_loads = self._num_failures = self._num_evictions = 0
        self._load_s = 0.0

    def loaded(self, seconds: float) -> None:
        """An adapter came into host memory."""
        self._num_loads += 1
        self._load_s += seconds

    def failed(self) -> None:
        """An adapter did not come."""
        self._num_failures += 1

    def evicted(self) -> None:
        """An idle adapter had to leave."""
        self._num_evictions += 1

    def read(self, num_ready: int) -> HostFigures:
        """As they are now."""
        return HostFigures(num_ready, self._num_loads, self._load_s, self._num_failures, self._num_evictions)

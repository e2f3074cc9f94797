"""What is told of adapters in host memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Loads from one tier, and the seconds that they took, each for itself."""

    count: int = 0
    seconds: float = 0.0

    def plus(self, seconds: float) -> "LoadFigures":
        """With one load more."""
        return LoadFigures(self.count + 1, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class HostFigures:
    """Adapters that are ready in host memory now, and how they came and went. All but the first only grow."""

    num_ready: int
    from_store: LoadFigures = LoadFigures()
    from_packed: LoadFigures = LoadFigures()  # files on disk
    num_failures: int = 0
    num_evictions: int = 0


@dataclass(slots=True)
class HostCounters:
    """Counts of one server."""

    _from_store: LoadFigures = LoadFigures()
    _from_packed: LoadFigures = LoadFigures()
    _num_failures: int = 0
    _num_evictions: int = 0

    def loaded(self, seconds: float, *, was_packed: bool) -> None:
        """An adapter came into host memory, from a packed file or from the artifact store."""
        if was_packed:
            self._from_packed = self._from_packed.plus(seconds)
        else:
            self._from_store = self._from_store.plus(seconds)

    def failed(self) -> None:
        """An adapter did not come."""
        self._num_failures += 1

    def evicted(self) -> None:
        """An idle adapter had to leave."""
        self._num_evictions += 1

    def read(self, num_ready: int) -> HostFigures:
        """As they are now."""
        return HostFigures(num_ready, self._from_store, self._from_packed, self._num_failures, self._num_evictions)

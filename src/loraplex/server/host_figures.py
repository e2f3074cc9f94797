"""What is told of adapters in host memory."""

from dataclasses import dataclass, replace

from loraplex.core import AdapterDigest


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
    """Adapters that are ready in host memory now, and how they came and went; what is not of now only grows."""

    num_ready: int = 0  # now
    from_store: LoadFigures = LoadFigures()
    from_packed: LoadFigures = LoadFigures()  # files on disk
    num_failures: int = 0
    failed_adapters: frozenset[AdapterDigest] = frozenset()  # that could not be read and are not tried now
    num_evictions: int = 0
    num_reloads: int = 0  # of adapters that left for others a while before
    reload_bytes: int = 0  # more with which nine in ten of the last minute's would not have been

    def loaded(self, seconds: float, *, was_packed: bool) -> "HostFigures":
        """With one adapter more that came, from a packed file or from the artifact store."""
        if was_packed:
            return replace(self, from_packed=self.from_packed.plus(seconds))
        return replace(self, from_store=self.from_store.plus(seconds))

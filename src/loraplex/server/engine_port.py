"""How the server sees an engine that it may give adapters to."""

from typing import Protocol

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, EngineClient
from loraplex.core.comparison import AdapterComparison
from loraplex.core.host_memory import Restored


class ServingEngine(EngineClient, Protocol):
    """An EngineClient with adapters. These methods block; any thread may call them while the engine steps."""

    def add_adapter(self, adapter: Adapter) -> None:
        """Keep an adapter in host memory, ready for requests; also one that was retired.

        Raises AdapterRefused, and HostMemoryFull where others must go first.
        """
        ...

    def restore_adapter(self, digest: AdapterDigest) -> Restored | None:
        """As `add_adapter`, of what has not left yet or from what `store_adapter` has kept; None if neither can be."""
        ...

    def store_adapter(self, digest: AdapterDigest) -> None:
        """Keep an adapter that was added where `restore_adapter` finds it, if there is such a place."""
        ...

    def host_bytes(self, digest: AdapterDigest) -> int:
        """Bytes that an adapter takes of host memory, until it has left that once it is retired; 0: it is not there.

        Does not block.
        """
        ...

    def is_in_pool(self, digest: AdapterDigest) -> bool:
        """Whether an adapter has pages of the pool, filled or being filled. Does not block."""
        ...

    def set_tenant_weight(self, tenant: str, weight: float) -> None:
        """A tenant of weight 2 is served twice as much as one of weight 1, which is every tenant's at first.

        Does not block.
        """
        ...

    def pin_adapter(self, digest: AdapterDigest) -> None:
        """Bring an adapter that was added into the pool and keep it there, used or not, until unpinned or retired.

        Raises ModelNotFound for one that was not added, InvalidRequest where too many pages would be pinned,
        Overloaded while a request is here that could not end beside them, and EngineDead.
        """
        ...

    def unpin_adapter(self, digest: AdapterDigest) -> None:
        """Let an adapter be evicted like others. One that is not pinned is ignored. Raises EngineDead."""
        ...

    def preload_adapter(self, digest: AdapterDigest, *, only_free: bool = False) -> None:
        """Have an adapter that was added brought into the pool while nothing waits, if there is room.

        `only_free`: in pages that hold nothing. Raises ModelNotFound for one that was not added, and EngineDead.
        """
        ...

    def take_dropped_preloads(self) -> tuple[AdapterDigest, ...]:
        """What `preload_adapter` was asked for, not `only_free`, and found no room, since the last call.

        In the pool, or in host memory until its turn came. Raises EngineDead.
        """
        ...

    def compare(self, adapter: Adapter) -> AdapterComparison:
        """Hold the adapter, unmerged, against its merged reference. Raises EngineDead."""
        ...
